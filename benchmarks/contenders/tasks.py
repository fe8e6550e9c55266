"""The job as a task of celery-once and as a function of Powertools, on the application of our own tasks.

celery-once  `QueueOnce` with its Redis backend. Its lock is taken where a task is sent and deleted when it has ended, so
             a worker pays for one DEL, and a duplicate that comes later runs again.
Powertools   `idempotent_function` in a plain Celery task: SET NX before, SET with the result after it. Its own context of
             a Lambda function says how long the caller may still run, from which it knows when a started operation is
             abandoned; without one it would write a warning for each call and never take such an operation over.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

from aws_lambda_powertools.utilities.idempotency import IdempotencyConfig, idempotent_function
from aws_lambda_powertools.utilities.idempotency.persistence.redis import RedisCachePersistenceLayer
from celery_once import QueueOnce
from redis import Redis
from sqlalchemy.orm import Session

from ..jobs import INSERT, app, engine

# Nothing of a run expires during it. Ours keeps what is done for days.
EXPIRES = 3600

app.conf.ONCE = {
    "backend": "celery_once.backends.Redis",
    "settings": {"url": os.environ.get("REDIS_URL", ""), "default_timeout": EXPIRES},
}


def insert(job: str, number: int) -> dict[str, int]:
    """The job itself, as in `jobs.plain`."""
    with Session(engine(os.getpid())) as session, session.begin():
        session.execute(INSERT, {"job": job, "number": number})
    return {"number": number}


@app.task(base=QueueOnce, once={"keys": ["number"]})
def celery_once(number: int) -> dict[str, int]:
    """The job with a lock that is held from the call until the task has ended."""
    return insert("celery_once", number)


class Remaining:
    """Stands for the context of a Lambda function: each task may take a minute."""

    def get_remaining_time_in_millis(self) -> int:
        return 60_000


@lru_cache(maxsize=1)
def _idempotent(_pid: int) -> Any:
    # a client for each pool child, as for the engine
    store = RedisCachePersistenceLayer(client=Redis.from_url(os.environ["REDIS_URL"], decode_responses=True))
    config = IdempotencyConfig(expires_after_seconds=EXPIRES, lambda_context=Remaining())

    @idempotent_function(data_keyword_argument="number", persistence_store=store, config=config)
    def once(*, number: int) -> dict[str, int]:
        return insert("powertools", number)

    return once


@app.task
def powertools(number: int) -> Any:
    """The job once for each number while Redis remembers it."""
    return _idempotent(os.getpid())(number=number)
