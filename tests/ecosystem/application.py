"""The bank with the settings of celery-redbeat: what a beat of these tests is started with."""

from __future__ import annotations

import os

from celery import Celery

from tests.support.bank import app


def configure(app: Celery, redis_url: str) -> None:
    # without options of its own, redbeat hands the broker's to Redis
    app.conf.update(redbeat_redis_url=redis_url, redbeat_redis_options={"retry_period": 10})


if "BANK_QUEUE" in os.environ:
    configure(app, os.environ["REDIS_URL"])
