"""Events that an earlier round has changed, errors at COMMIT, letters of other code, and outages at a bad moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.engine import make_url

from idempotency import streams
from idempotency.operate.change import Change, Shown
from idempotency.operate.release import release
from idempotency.operate.replay import replay
from idempotency.streams import Handling
from idempotency.streams.declaring import Stream
from idempotency.wire.keys import OperationId
from tests.support import bank, crashing
from tests.support.processes import eventually
from tests.support.proxy import Proxy
from tests.support.streaming import NAME, Handler, Streaming, configure, deposit

CHANGE = Change("ann", "tested", is_verified=True)


def with_tenant(stream: Handling, event: Mapping[str, Any]) -> str:
    stream.session.execute(bank.INSERT, {"account": f"{stream.tenant}/{event['account']}", "amount": 0})
    return deposit(stream, event)


def changing(stream: Handling, event: dict[str, Any]) -> str:
    """As many handlers do: what has come is put into the form that is stored."""
    event["amount"] = event["amount"] * 100
    stream.effect("call", lambda idempotency_key: 1)
    crashing.reach("held")
    stream.session.execute(bank.INSERT, {"account": event["account"], "amount": event["amount"]})
    return ""


@dataclass(frozen=True)
class Own(Handler):
    def declared(self) -> Stream:
        options = {"key": "{event[account]}", **self.options}
        return streams.stream(self.name, source=self.source, **options)(globals()[self.handler])


def own(streaming: Streaming, handler: str, **options: Any) -> Own:
    return Own(streaming.broker.source(), handler=handler, options=options)


def letters(streaming: Streaming) -> list[int]:
    return [row.id for row in streaming.query("SELECT id FROM idempotency.dead_letters ORDER BY id")]


@pytest.mark.long
def test_a_further_round_gets_the_event_as_it_came(rabbit: Streaming) -> None:
    rabbit.broker.publish({"account": "a0", "amount": 3})
    rabbit.plan("held", "hold")
    rabbit.start(own(rabbit, "changing"))
    rabbit.wait_for("held.held")
    configure(rabbit.environment)
    (row,) = rabbit.query("SELECT * FROM idempotency.records WHERE key = 'a0'")
    release(bank.app, Shown(OperationId("default", f"stream.{NAME}", "a0"), "started", row.fence), CHANGE)
    (rabbit.directory / "held.go").touch()
    rabbit.wait_until_handled()
    (entry,) = rabbit.query("SELECT amount FROM entries")
    assert entry.amount == 300


@pytest.mark.long
def test_an_error_at_commit_that_looks_like_a_lost_position_is_the_messages_own(rabbit: Streaming) -> None:
    with rabbit.engine.connect() as connection:
        connection.execute(
            text("""CREATE FUNCTION check_share() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN IF NEW.account = 'bad' THEN PERFORM 100 / (NEW.amount - NEW.amount); END IF; RETURN NULL; END $$""")
        )
        connection.execute(
            text("""CREATE CONSTRAINT TRIGGER shares AFTER INSERT ON entries DEFERRABLE INITIALLY DEFERRED
            FOR EACH ROW EXECUTE FUNCTION check_share()""")
        )
    for account in ("a0", "bad", "a2"):
        rabbit.broker.publish({"account": account})
    process = rabbit.start(max_attempts=1)
    rabbit.wait_until_handled()
    assert rabbit.entries() == ["a0", "a2"]
    assert len(letters(rabbit)) == 1
    assert "stream_partition_lost" not in process.log


@pytest.mark.long
def test_a_reopened_message_is_run_as_its_own_operation_or_not_at_all(rabbit: Streaming) -> None:
    """After a deploy with another tenant, and another one back; and what cannot be run keeps nothing else from it."""
    rabbit.broker.publish({"account": "a0", "how": "permanent unless told", "tenant": "b"})
    rabbit.broker.publish({"account": "a1", "how": "permanent unless told", "tenant": "default"})
    process = rabbit.start(own(rabbit, "with_tenant"))
    rabbit.wait_until_handled()
    assert process.end() == 0
    (rabbit.directory / "told").touch()
    configure(rabbit.environment)
    for letter in letters(rabbit):
        replay(bank.app, letter, CHANGE)
    other = rabbit.start(own(rabbit, "with_tenant", tenant="{event[tenant]}"))
    eventually(lambda: "default/a1" in rabbit.entries(), what=rabbit.logs())
    assert "b/a0" not in rabbit.entries()
    assert other.end() == 0
    rabbit.start(own(rabbit, "with_tenant"))
    eventually(lambda: "default/a0" in rabbit.entries(), what=rabbit.logs())
    assert "b/a0" not in rabbit.entries()


@pytest.mark.long
def test_a_stopped_partition_takes_in_no_more_than_its_limit(make_streaming: Any) -> None:
    streaming = make_streaming("kafka")
    streaming.broker.publish({"account": "bad", "how": "permanent"})
    streaming.broker.publish_many(3000)
    streaming.broker.flush()
    consumer = streaming.consumer(threading.Event(), on_failure="stop", batch=5)
    thread = threading.Thread(target=consumer.run)
    thread.start()
    most = 0
    try:
        eventually(streaming.stopped)
        for _ in range(20):
            time.sleep(0.5)
            most = max([most, *(len(each.at_hand) for each in consumer._holdings.all())])
        limit = consumer._reader._limit
    finally:
        consumer._stop.set()
        thread.join(20)
    assert 0 < most <= 2 * limit


@pytest.mark.long
def test_what_retention_has_overtaken_is_said_although_postgres_was_away(make_streaming: Any) -> None:
    """And what came in the same moment for another partition is handled."""
    streaming = make_streaming("kafka", partitions=2)
    for number in range(10):
        streaming.broker.publish({"account": f"p0-{number}"}, 0)
    streaming.broker.publish({"account": "p1-first"}, 1)
    streaming.broker.flush()
    process = streaming.start()
    streaming.wait_until_handled()
    assert process.end() == 0
    for number in range(50):
        streaming.broker.publish({"account": f"p0-{number + 10}"}, 0)
    streaming.broker.flush()
    streaming.broker.cluster.delete_before(streaming.broker.topic, 0, 40)
    url = make_url(streaming.environment["DATABASE_URL"])
    with Proxy(str(url.host), int(url.port or 5432)) as proxy:
        through = url.set(host="127.0.0.1", port=proxy.port)
        streaming.environment["DATABASE_URL"] = through.render_as_string(hide_password=False)
        consumer = streaming.consumer(threading.Event())
        reader: Any = consumer._make_reader(consumer._holdings)
        consumer._reader = reader
        until = time.monotonic() + 20
        while len(reader._assigned) < 2 and time.monotonic() < until:
            reader.poll(0.0)
            time.sleep(0.001)
        assert len(reader._assigned) == 2
        time.sleep(1)  # the error comes first
        wanted = [f"p1-{number}" for number in range(30)]
        for account in wanted:
            streaming.broker.publish({"account": account}, 1)
        streaming.broker.flush()
        time.sleep(2)
        proxy.refuse()
        proxy.reset()
        thread = threading.Thread(target=consumer.run)
        thread.start()
        time.sleep(3)
        proxy.heal()
        try:
            eventually(lambda: streaming.positions()[1] == 31, timeout=60)
            eventually(lambda: "retention has overtaken it" in streaming.stopped(), timeout=60)
        finally:
            consumer._stop.set()
            thread.join(20)
        assert set(wanted) <= set(streaming.entries())
