"""Streams whose records are in partitions: batches of strangers, upkeep beside slow bodies, and the conversion."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

from idempotency import streams
from idempotency.store import left_alone, partitions
from idempotency.store.inserting import KEYS_AT_ONCE
from idempotency.streams import Handling
from idempotency.streams.declaring import Stream
from tests.partitions.test_claims import found
from tests.partitions.test_locks import complete_new, new
from tests.partitions.test_upkeep import BOUNDS, drop_newest
from tests.streams.conftest import Make
from tests.streams.conftest import kafka_cluster as kafka_cluster
from tests.streams.conftest import make_streaming as make_streaming
from tests.support import operations as op
from tests.support.partitions import into_the_past, put_into_partitions
from tests.support.processes import eventually
from tests.support.purging import past_its_time
from tests.support.streaming import Handler, Streaming, deposit

MANY = 500
OF_RECORDS = """
SELECT count(*) FROM pg_locks l JOIN pg_class c ON c.oid = l.relation
WHERE l.pid = pg_backend_pid() AND (c.relname = 'records' OR c.relnamespace = to_regnamespace('idempotency_partitions'))
"""
runs: list[int] = []


def counted(stream: Handling, event: Mapping[str, Any]) -> str:
    """As a body, notes how many locks of the records its transaction has."""
    runs.append(stream.session.connection().exec_driver_sql(OF_RECORDS).scalar_one())
    return deposit(stream, event)


def slowly(stream: Handling, event: Mapping[str, Any]) -> str:
    time.sleep(0.02)  # 2 s for a batch; up to a third of a lease, 20 s by default, is allowed
    return deposit(stream, event)


@dataclass(frozen=True)
class Counted(Handler):
    def declared(self) -> Stream:
        options = {"key": "{event[account]}", **self.options}
        return streams.stream(self.name, source=self.source, **options)(counted)


@dataclass(frozen=True)
class Slow(Handler):
    def declared(self) -> Stream:
        options = {"key": "{event[account]}", **self.options}
        return streams.stream(self.name, source=self.source, **options)(slowly)


def count_bodies(streaming: Streaming, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process handle it from its beginning, by `counted`, with batches as large as can be."""
    runs.clear()
    handler = Counted(streaming.broker.source(start="earliest"), options={"batch": 10_000})
    monkeypatch.setattr(streaming, "handler", lambda **_: handler)


def wait_for_owners(streaming: Streaming, many: int) -> None:
    """Wait until so many processes have the partitions, one each."""

    def have_them() -> bool:
        owners = streaming.owners().values()
        return len({each for each in owners if each is not None}) == many == len(owners)

    eventually(have_them, timeout=60.0, what=f"{many} owners")


def committed(streaming: Streaming) -> list[int]:
    """How many records each commit has, by the transaction that wrote them."""
    return [row.many for row in streaming.query("SELECT count(*) AS many FROM idempotency.records GROUP BY xmin::text")]


@pytest.mark.long
def test_bodies_run_once_beside_strangers_batches_and_keep_no_partition(
    make_streaming: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    streaming = make_streaming("kafka")
    count_bodies(streaming, monkeypatch)
    stop = threading.Event()

    def beside() -> None:
        own = create_engine(streaming.engine.url, isolation_level="AUTOCOMMIT", poolclass=NullPool)
        with own.connect() as connection:
            while not stop.is_set():
                connection.exec_driver_sql("BEGIN")
                complete_new(connection, new(KEYS_AT_ONCE))
                time.sleep(0.005)  # a commit that a disk or a standby takes
                connection.exec_driver_sql("COMMIT")
                time.sleep(0.02)  # bodies

    other = threading.Thread(target=beside)
    other.start()
    streaming.broker.publish_many(MANY)
    try:
        with streaming.consuming():
            streaming.wait_until_handled()
    finally:
        stop.set()
        other.join()
    assert sorted(streaming.entries()) == sorted(f"a{number}" for number in range(MANY))
    assert runs == [0] * MANY
    assert max(committed(streaming)) <= KEYS_AT_ONCE  # however large a batch may be


def test_a_batch_of_a_plain_table_is_one_commit(make_streaming: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    streaming = make_streaming("kafka", apart=True)
    count_bodies(streaming, monkeypatch)
    streaming.broker.publish_many(MANY)
    with streaming.consuming():
        streaming.wait_until_handled()
    assert max(committed(streaming)) > KEYS_AT_ONCE


@pytest.mark.long
def test_beside_streams_partitions_are_made_and_dropped(make_streaming: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.streaming.LEASE", 30.0)
    streaming = make_streaming("kafka", partitions=3)
    streaming.environment["LEASE"] = "30"
    with create_engine(streaming.engine.url, isolation_level="AUTOCOMMIT", poolclass=NullPool).connect() as connection:
        past_its_time(connection)
        into_the_past(connection)  # a partition that is to be dropped
        newest = drop_newest(connection)  # and one that is to be made
        streaming.broker.publish_many(3 * 400)
        for _ in range(3):
            streaming.start(Slow(streaming.broker.source(start="earliest")))
        wait_for_owners(streaming, 3)

        def is_done() -> bool:
            left_alone.forget()
            partitions.keep_up(connection, op.SERVICE, **BOUNDS)
            names = {each.name for each in found(connection).all}
            return newest in names and "records_before" not in names

        eventually(is_done, timeout=3.0, what="a pass that gets its locks")
        assert not all((position or 0) >= 400 for position in streaming.positions().values())
        streaming.wait_until_handled(timeout=60.0)


@pytest.mark.long
@pytest.mark.parametrize("slow", [False, True])
def test_streams_go_on_while_their_records_are_partitioned(make_streaming: Make, slow: bool) -> None:
    streaming = make_streaming("kafka", partitions=2, apart=True)
    url = streaming.engine.url.render_as_string(hide_password=False)
    many = 400 if slow else 2000
    for _ in range(2):
        if slow:
            streaming.environment["LEASE"] = "30"
            streaming.start(Slow(streaming.broker.source(start="earliest")))
        else:
            streaming.start_from("earliest")
    wait_for_owners(streaming, 2)
    streaming.broker.publish_many(many)
    eventually(lambda: len(streaming.entries()) > 0, what="a first batch")
    converting = threading.Thread(target=put_into_partitions, args=(url,))
    converting.start()
    streaming.broker.publish_many(many, first=many)
    streaming.wait_until_handled(timeout=60)
    converting.join(60)
    assert not converting.is_alive()
    assert sorted(streaming.entries()) == sorted(f"a{n}" for n in range(2 * many))
    kind = "SELECT relkind = 'p' AS is_so FROM pg_class WHERE oid = 'idempotency.records'::regclass"
    assert streaming.query(kind)[0].is_so
