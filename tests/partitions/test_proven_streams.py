"""Batches of a stream in partitions share 4,096 locks with everybody. Each test asserts the bad outcome."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.pool import NullPool

from idempotency import streams
from idempotency.store import batches, partitions
from idempotency.streams import Handling
from idempotency.streams.declaring import Stream
from tests.partitions.test_claims import found
from tests.partitions.test_proven_upkeep import complete_new, new
from tests.streams.conftest import Make
from tests.streams.conftest import kafka_cluster as kafka_cluster
from tests.streams.conftest import make_streaming as make_streaming
from tests.support import operations as op
from tests.support.partitions import into_the_past
from tests.support.processes import eventually
from tests.support.purging import past_its_time
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
    monkeypatch.setattr(
        streaming, "handler", lambda **options: Counted(streaming.broker.source(start="earliest"), options=options)
    )
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


def slowly(stream: Handling, event: Mapping[str, Any]) -> str:
    time.sleep(0.02)  # 2 s for a batch; up to a third of a lease, 20 s by default, is allowed
    return deposit(stream, event)


@dataclass(frozen=True)
class Slow(Handler):
    def declared(self) -> Stream:
        options = {"key": "{event[account]}", **self.options}
        return streams.stream(self.name, source=self.source, **options)(slowly)


def test_beside_streams_no_partition_is_made_or_dropped(make_streaming: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """`handle_together` reads the records first, and so holds all partitions while its bodies run; upkeep waits 200 ms."""
    monkeypatch.setattr("tests.support.streaming.LEASE", 30.0)
    streaming = make_streaming("kafka", partitions=3)
    streaming.environment["LEASE"] = "30"
    with create_engine(streaming.engine.url, isolation_level="AUTOCOMMIT", poolclass=NullPool).connect() as connection:
        past_its_time(connection)
        into_the_past(connection)  # a partition that is to be dropped
        ends = sorted(each.ends_at for each in found(connection).all if each.ends_at)
        newest = next(each for each in found(connection).all if each.ends_at == ends[-1])
        connection.exec_driver_sql(f"DROP TABLE idempotency_partitions.{newest.name}")  # and one that is to be made
        streaming.broker.publish_many(3 * 700)
        for _ in range(3):
            streaming.start(Slow(streaming.broker.source(start="earliest")))
        eventually(
            lambda: (
                all(each is not None for each in streaming.owners().values())
                and len(streaming.owners()) == 3
                and len(set(streaming.owners().values())) == 3
            ),
            timeout=20.0,
            what="three owners",
        )
        outcomes = []
        for _ in range(10):
            partitions._waiting.clear()
            before = {each.name for each in found(connection).all}
            partitions.keep_up(connection, op.SERVICE, retention=3600.0, horizon=60.0, limit=1000)
            outcomes.append({each.name for each in found(connection).all} == before)
            time.sleep(0.5)
            assert not all((position or 0) >= 700 for position in streaming.positions().values())
        print(f"\npasses that did nothing: {outcomes}")
        assert sum(outcomes) >= 8
        streaming.wait_until_handled(timeout=60.0)
        partitions._waiting.clear()  # the control: without them, one pass does both
        partitions.keep_up(connection, op.SERVICE, retention=3600.0, horizon=60.0, limit=1000)
        names = {each.name for each in found(connection).all}
        assert "records_before" not in names
        assert newest.name in names


def test_two_consumers_whose_batches_overlap_keep_upkeep_out_for_ever(engine: Engine, connection: Connection) -> None:
    """The same without a broker: there is always one that has read the records and goes on for more than 200 ms."""
    past_its_time(connection)
    into_the_past(connection)
    ends = sorted(each.ends_at for each in found(connection).all if each.ends_at)
    newest = next(each for each in found(connection).all if each.ends_at == ends[-1])
    connection.exec_driver_sql(f"DROP TABLE idempotency_partitions.{newest.name}")
    stop, begun = threading.Event(), threading.Event()

    def overlapping() -> None:
        with engine.connect() as one, engine.connect() as other:
            for each in itertools.cycle((one, other)):
                each.exec_driver_sql("BEGIN")
                batches.known(each, new(1), service=op.SERVICE)  # as `handle_together` begins
                time.sleep(0.3)
                before = other if each is one else one
                before.exec_driver_sql("ROLLBACK" if begun.is_set() else "SELECT 1")
                begun.set()
                if stop.is_set():
                    each.exec_driver_sql("ROLLBACK")
                    return

    consumers = threading.Thread(target=overlapping)
    consumers.start()
    begun.wait()
    try:
        for _ in range(15):
            partitions._waiting.clear()
            partitions.keep_up(connection, op.SERVICE, retention=3600.0, horizon=60.0, limit=1000)
            names = {each.name for each in found(connection).all}
            assert "records_before" in names
            assert newest.name not in names
            time.sleep(0.13)
    finally:
        stop.set()
        consumers.join()
    partitions.keep_up(connection, op.SERVICE, retention=3600.0, horizon=60.0, limit=1000)  # the control
    names = {each.name for each in found(connection).all}
    assert "records_before" not in names
    assert newest.name in names
