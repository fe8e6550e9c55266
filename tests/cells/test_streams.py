"""Streams of a cell: a message for a tenant of another one, or of one that cannot be told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Engine, text

from idempotency import PermanentError
from idempotency.application import close_runtime, runtime_of
from idempotency.errors import ReplayRefused
from idempotency.operate.change import Change
from idempotency.operate.replay import replay
from idempotency.streams import reopened, stream
from idempotency.streams.consumer import Consumer
from idempotency.streams.process import make_reader
from tests.cells.conftest import Cells, Count, Serve
from tests.support.celled import app
from tests.support.processes import eventually
from tests.support.streaming import RabbitBroker, insert

CHANGE = Change("ann", "tested", is_verified=True)


@contextmanager
def handling(declared: Any) -> Iterator[None]:
    stop, runtime = threading.Event(), runtime_of(app)
    consumer = Consumer(runtime, declared, partial(make_reader, app, runtime, declared, None), stop)
    loop = threading.Thread(target=consumer.run)
    loop.start()
    try:
        yield
    finally:
        stop.set()
        loop.join(20)


class Directory:
    def __init__(self) -> None:
        self.known, self.is_away = {"eu-acme": "eu", "eu-house": "eu"}, False

    def __call__(self, tenant: str) -> str | None:
        if self.is_away and tenant == "eu-away":
            raise RuntimeError("the directory is away for this one")
        return self.known.get(tenant)


@pytest.fixture
def directory(serve: Serve) -> Directory:
    serve("eu")
    found = app.conf.idempotency_cell_of = Directory()
    close_runtime(app)
    return found


LETTERS = "SELECT id, tenant, task, key, reason, status FROM idempotency.dead_letters ORDER BY id"


@pytest.mark.long
def test_a_message_that_was_refused_for_its_cell_is_replayed_once_that_is_corrected(
    directory: Directory, cells: Cells, engines: dict[str, Engine], count: Count
) -> None:
    """As its runbook says. Nothing but the letter has the message by then."""
    broker = RabbitBroker(cells["eu"]["broker_url"], "unknown", 1)

    def handle(given: Any, event: Any) -> None:
        insert(given, event["id"])

    declared = stream("unknown", source=broker.source(), key="{event[id]}", tenant="{event[tenant]}")(handle)
    broker.publish({"id": "n1", "tenant": "eu-new"})
    broker.publish({"id": "n2", "tenant": "eu-new"})
    try:
        with engines["eu"].connect() as connection:
            with handling(declared):
                eventually(lambda: len(connection.execute(text(LETTERS)).all()) == 2)
            one, two = connection.execute(text(LETTERS)).all()
            assert (one.tenant, one.task, one.key) == ("eu-new", "stream.unknown", "n1")
            assert (one.reason, one.status) == ("other_cell", "open")
            with pytest.raises(ReplayRefused, match="eu-new"):
                replay(app, one.id, CHANGE)
            directory.known["eu-new"] = "eu"  # it is corrected
            assert replay(app, one.id, CHANGE).key == "n1"
            broker.publish({"id": "n2", "tenant": "eu-new"})  # and the other one has come again by itself
            with handling(declared):
                eventually(lambda: (count("eu", "n1"), count("eu", "n2")) == (1, 1))
            with pytest.raises(ReplayRefused, match="already replayed"):
                replay(app, one.id, CHANGE)
            with pytest.raises(ReplayRefused, match="another message has begun its operation"):
                replay(app, two.id, CHANGE)
            assert [row.status for row in connection.execute(text(LETTERS)).all()] == ["replayed", "open"]
    finally:
        broker.close()


@pytest.mark.long
def test_replays_that_cannot_run_keep_no_other_from_running(
    directory: Directory, cells: Cells, engines: dict[str, Engine], count: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are: each look begins behind those that the last one has found."""
    monkeypatch.setattr(reopened, "LIMIT", 2)
    monkeypatch.setattr(reopened, "PAUSE", 0.5)
    broker, fails = RabbitBroker(cells["eu"]["broker_url"], "many", 1), [True]
    directory.known["eu-away"] = "eu"

    def handle(given: Any, event: Any) -> None:
        if fails[0]:
            raise PermanentError("not yet", "not_yet")
        insert(given, event["id"])

    declared = stream("many", source=broker.source(), key="{event[id]}", tenant="{event[tenant]}")(handle)
    for number in range(5):
        broker.publish({"id": f"b{number}", "tenant": "eu-away"})
    broker.publish({"id": "good", "tenant": "eu-acme"})
    try:
        with engines["eu"].connect() as connection:
            with handling(declared):
                eventually(lambda: len(connection.execute(text(LETTERS)).all()) == 6)
            for row in connection.execute(text(LETTERS)).all():
                replay(app, row.id, CHANGE)
        fails[0], directory.is_away = False, True
        with handling(declared):
            eventually(lambda: count("eu", "good") == 1, timeout=15)
            directory.is_away = False
            eventually(lambda: all(count("eu", f"b{number}") == 1 for number in range(5)), timeout=15)
    finally:
        broker.close()
