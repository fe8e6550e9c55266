"""What a newcomer's first run meets: an empty test database, and a broker that an application is using."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import kombu
import pytest
from celery import Celery
from sqlalchemy import create_engine, text

import services
from demo.logins import check_unused
from demo.processes import ProcessError
from idempotency import IdempotentTask
from idempotency.application import close_runtime
from idempotency.testing import AssertIdempotent, RecordingServer
from tests.support.broker_users import virtual_host


@pytest.mark.long
def test_the_first_check_migrates_an_empty_test_database(servers: services.Services) -> None:
    name = f"first_test_{uuid4().hex[:8]}"
    url = servers.create_database(name)
    app = Celery("first", set_as_current=False)
    app.conf.idempotency_database_url = url

    @app.task(name="first.note", base=IdempotentTask, bind=True, key="{id}", shared=False)
    def note(self: IdempotentTask, id: str) -> None:
        self.session.execute(text("SELECT 1"))

    server = RecordingServer()
    try:
        assert AssertIdempotent(server)(note, "a").scenarios
        with create_engine(url).connect() as connection:
            assert connection.execute(text("SELECT count(*) FROM idempotency.records")).scalar_one() == 0
    finally:
        server.close()
        close_runtime(app)
        servers.drop_database(name)


def test_the_demo_refuses_a_broker_where_workers_consume_its_queues(servers: services.Services) -> None:
    with virtual_host(servers) as url, kombu.Connection(url) as broker:
        given: Any = SimpleNamespace(servers={}, broker_url=url)
        queue = kombu.Queue("payments", channel=broker.channel())
        queue.declare()
        check_unused(given)
        queue.consume()
        with pytest.raises(ProcessError, match="workers consume the queue 'payments'"):
            check_unused(given)
