"""Batches of a stream in partitions share 4,096 locks with everybody. Each test asserts the bad outcome."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import create_engine, event
from sqlalchemy.pool import NullPool

from idempotency import streams
from idempotency.streams import Handling
from idempotency.streams.declaring import Stream
from tests.partitions.test_proven_upkeep import complete_new, new
from tests.streams.conftest import Make
from tests.streams.conftest import kafka_cluster as kafka_cluster
from tests.streams.conftest import make_streaming as make_streaming
from tests.support.streaming import Handler, Streaming, deposit

runs: list[str] = []
MANY = 1000


def counted(stream: Handling, event: Mapping[str, Any]) -> str:
    runs.append(event["account"])
    return deposit(stream, event)


@dataclass(frozen=True)
class Counted(Handler):
    def declared(self) -> Stream:
        options = {"key": "{event[account]}", **self.options}
        return streams.stream(self.name, source=self.source, **options)(counted)


def runs_beside_another_process(streaming: Streaming, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often bodies of 1,000 events are entered, beside one that commits batches of 100 other keys of its own."""
    runs.clear()
    monkeypatch.setattr(streaming, "handler", lambda **options: Counted(streaming.broker.source(start="earliest"), options=options))
    stop = threading.Event()

    def beside() -> None:
        own = create_engine(streaming.engine.url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
        with own.connect() as connection:
            while not stop.is_set():
                connection.exec_driver_sql("BEGIN")
                complete_new(connection, new(100))
                time.sleep(0.005)  # a commit that a disk or a standby takes
                connection.exec_driver_sql("COMMIT")
                time.sleep(0.02)  # bodies

    other = threading.Thread(target=beside)
    other.start()
    streaming.broker.publish_many(MANY)
    began = time.monotonic()
    try:
        with streaming.consuming():
            streaming.wait_until_handled()
    finally:
        stop.set()
        other.join()
    print(f"\n{MANY} events: {len(runs)} bodies, {time.monotonic() - began:.1f} s")
    assert sorted(streaming.entries()) == sorted(f"a{number}" for number in range(MANY))
    return len(runs)


def test_bodies_of_strangers_batches_run_again_and_again(make_streaming: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runs_beside_another_process(make_streaming("kafka"), monkeypatch) > MANY * 1.5


def test_the_control_on_a_plain_table(make_streaming: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runs_beside_another_process(make_streaming("kafka", apart=True), monkeypatch) == MANY
