"""What Celery shows of a configuration that has passwords where Celery looks for none."""

from __future__ import annotations

import pytest
from celery import Celery
from celery.app.utils import bugreport

from idempotency.worker.censored import hide_secrets


@pytest.mark.parametrize(
    "address",
    [
        "rediss://cache.example/0?username=u&password=hunter2",
        "db+postgresql+psycopg://db.example/d?user=u&password=hunter2",
        "redis://:hunter2@cache.example/0",
    ],
)
def test_no_password_of_a_backend_is_shown(address: str) -> None:
    for _ in range(2):
        hide_secrets()
    app = Celery("x", broker="amqp://localhost", set_as_current=False)
    app.conf.result_backend = address
    app.conf.result_backend_transport_options = app.conf.broker_transport_options = {"password": "hunter2"}
    assert "hunter2" not in f"{app.conf.table(with_defaults=False, censored=True)}"  # `inspect conf`, Flower
    assert "hunter2" not in bugreport(app)  # `celery report`
