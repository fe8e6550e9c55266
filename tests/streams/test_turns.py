"""What one message or one partition does to the others: they have their turns, and what fails is counted."""

from __future__ import annotations

import json
import sys
import threading
import time
from asyncio import CancelledError
from typing import Any

import pytest
from sqlalchemy import text

from idempotency import Defer, PermanentError
from idempotency.operate.cancel import cancel
from idempotency.operate.change import Change, Shown
from idempotency.operate.replay import replay
from idempotency.streams import Handling
from idempotency.streams.consumer import STOPPED_PAUSE
from idempotency.wire.keys import OperationId
from tests.streams.conftest import Make
from tests.support import bank
from tests.support.processes import eventually
from tests.support.streaming import Streaming, insert

CHANGE = Change("ann", "tested", is_verified=True)


def loses_its_transaction(streaming: Streaming, stream: Handling) -> None:
    """As with a body that calls a slow server, behind a pooler that ends idle transactions."""
    backend = stream.session.execute(text("SELECT pg_backend_pid()")).scalar_one()
    with streaming.engine.connect() as another:
        another.execute(text(f"SELECT pg_terminate_backend({backend}, 2000)"))


@pytest.mark.long
@pytest.mark.parametrize("neighbours", [pytest.param(0, marks=pytest.mark.long), 3])
def test_a_handler_that_loses_its_transaction_at_the_end_is_counted_as_any_error(
    rabbit: Streaming, neighbours: int
) -> None:
    ran: list[int] = []

    def handle(stream: Handling, event: Any) -> None:
        insert(stream, event["account"])
        if event["account"] == "slow":
            ran.append(stream.message.offset)
            loses_its_transaction(rabbit, stream)

    rabbit.broker.publish({"account": "slow"})
    accounts = [f"a{number}" for number in range(neighbours)]
    for account in accounts:
        rabbit.broker.publish({"account": account})
    with rabbit.handled_by(handle, max_attempts=2):
        rabbit.wait_until_handled()
    assert len(ran) in (3, 4)  # once or twice together, and two attempts
    assert rabbit.letters() == [("attempts_exhausted", "open")]
    assert rabbit.entries() == accounts


@pytest.mark.long
def test_a_partition_whose_turn_ends_in_an_error_keeps_no_other_from_its_own(make_streaming: Make) -> None:
    """The others come first in the next turn, so that one whose every turn ends so costs them a pause, and no more."""
    streaming = make_streaming("rabbitmq", partitions=2)

    def handle(stream: Handling, event: Any) -> None:
        insert(stream, event["account"])
        if event["account"] == "slow":
            loses_its_transaction(streaming, stream)

    with streaming.handled_by(handle) as consumer:
        together = consumer._together

        def never_counted(partition: Any, prepared: Any) -> None:
            try:
                together(partition, prepared)
            finally:
                partition.alone = range(0)

        consumer._together = never_counted  # type: ignore[method-assign]
        eventually(lambda: len(streaming.positions()) == 2)
        streaming.broker.publish({"account": "slow"}, 0)
        eventually(lambda: streaming.positions()[0] == 0)
        for number in range(3):
            streaming.broker.publish({"account": f"b{number}"}, 1)
        eventually(lambda: streaming.positions()[1] == 3, timeout=20)
        assert streaming.entries() == ["b0", "b1", "b2"]
        assert streaming.positions()[0] == 0


@pytest.mark.long
def test_an_event_that_cannot_be_copied_is_handled_alone_as_it_is_together(rabbit: Streaming) -> None:
    """It is decoded again instead: after the death of a process the next messages are handled one by one."""

    def handle(stream: Handling, event: Any) -> None:
        insert(stream, json.loads(bytes(event))["account"])

    options: dict[str, Any] = {"key": None, "decode": memoryview, "max_attempts": 2, "name": "copied"}
    for number in range(3):
        rabbit.broker.publish({"account": f"a{number}"}, idempotency_key=f"a{number}")
    with rabbit.handled_by(handle, **options):
        rabbit.wait_until_handled()
    silent = "UPDATE idempotency.stream_positions SET owner = 'gone|b|n|7|1', locked_until = now() RETURNING id"
    assert len(rabbit.query(silent)) == 1
    for number in range(3, 6):
        rabbit.broker.publish({"account": f"a{number}"}, idempotency_key=f"a{number}")
    with rabbit.handled_by(handle, **options):
        rabbit.wait_until_handled()
    assert rabbit.entries() == [f"a{number}" for number in range(6)]
    assert rabbit.letters() == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("where", "reason"), [("on_failed", "on_failed_error"), ("key", "invalid_key"), ("decode", "undecodable")]
)
def test_an_exit_beside_the_handler_is_an_error_as_any_other(rabbit: Streaming, where: str, reason: str) -> None:
    def handle(stream: Handling, event: Any) -> None:
        if event["account"] == "bad":
            raise PermanentError("no", "no")
        insert(stream, event["account"])

    def exits(*given: Any) -> Any:
        if "bad" in str(given):
            sys.exit("told to")
        return json.loads(given[0]) if where == "decode" else given[0]["account"]

    rabbit.broker.publish({"account": "bad"})
    rabbit.broker.publish({"account": "a1"})
    options: dict[str, Any] = {where: exits}
    with rabbit.handled_by(handle, **options):
        rabbit.wait_until_handled()
    assert rabbit.letters() == [(reason, "open")]
    assert rabbit.entries() == ["a1"]


def exit_in_undo(session: Any, result: Any) -> None:
    sys.exit("from an undo")


def test_an_exit_in_an_undo_is_an_error_as_any_other(rabbit: Streaming) -> None:
    def handle(stream: Handling, event: Any) -> None:
        if event["account"] != "bad":
            return insert(stream, event["account"])
        stream.step("first", lambda session: 1, undo=exit_in_undo)
        raise PermanentError("no", "no")

    rabbit.broker.publish({"account": "bad"})
    rabbit.broker.publish({"account": "a1"})
    with rabbit.handled_by(handle):
        rabbit.wait_until_handled()
    assert rabbit.letters() == [("unfinished", "open")]
    assert rabbit.entries() == ["a1"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, pytest.param(CancelledError, marks=pytest.mark.long)])
def test_what_a_body_raises_past_except_exception_is_an_error_as_any_other(
    rabbit: Streaming, error: type[BaseException]
) -> None:
    """Streams are handled in threads, where no KeyboardInterrupt is of Ctrl-C."""

    def handle(stream: Handling, event: Any) -> None:
        if event["account"] == "bad":
            raise error
        insert(stream, event["account"])

    rabbit.broker.publish({"account": "bad"})
    rabbit.broker.publish({"account": "a1"})
    with rabbit.handled_by(handle, max_attempts=1):
        rabbit.wait_until_handled()
    assert rabbit.letters() == [("attempts_exhausted", "open")]
    assert rabbit.entries() == ["a1"]


@pytest.mark.long
def test_a_stream_that_stops_at_failures_does_so_whatever_code_the_application_gives_them(rabbit: Streaming) -> None:
    """Also one that we give to messages of other requests, which stop nothing."""
    told = threading.Event()

    def handle(stream: Handling, event: Any) -> None:
        if event["account"] == "bad" and not told.is_set():
            raise PermanentError("the other ledger has this key with other values", "fingerprint_mismatch")
        insert(stream, event["account"])

    rabbit.broker.publish({"account": "bad"})
    rabbit.broker.publish({"account": "a1"})
    with rabbit.handled_by(handle, on_failure="stop"):
        rabbit.wait_until_stopped("offset 0 has failed")
        assert rabbit.entries() == []
        told.set()
        (letter,) = rabbit.query("SELECT id FROM idempotency.dead_letters")
        replay(bank.app, letter.id, CHANGE)
        eventually(lambda: rabbit.entries() == ["bad", "a1"], timeout=15)
    assert rabbit.stopped() == ""


@pytest.mark.long
def test_a_partition_that_waits_for_a_cancelled_attempt_goes_on_at_once(rabbit: Streaming) -> None:
    def handle(stream: Handling, event: Any) -> None:
        if event["account"] == "a0":
            raise Defer(250.0, "later")
        insert(stream, event["account"])

    rabbit.broker.publish({"account": "a0"})
    rabbit.broker.publish({"account": "a1"})
    with rabbit.handled_by(handle, "waits"):
        sought = "SELECT fence FROM idempotency.records WHERE status = 'released'"
        (row,) = eventually(lambda: rabbit.query(sought), timeout=8)
        time.sleep(2.5)  # it has looked once by then
        (seen,) = rabbit.query("SELECT duplicates, attempts FROM idempotency.records")
        assert (seen.duplicates, seen.attempts) == (0, 0)
        cancel(bank.app, Shown(OperationId("default", "stream.waits", "a0"), "released", row.fence), CHANGE)
        eventually(lambda: rabbit.entries() == ["a1"], timeout=8)
    assert rabbit.letters() == [("cancelled", "open")]


@pytest.mark.long
def test_many_replays_leave_each_partition_its_turns(rabbit: Streaming) -> None:
    told = threading.Event()

    def handle(stream: Handling, event: Any) -> None:
        if event["account"].startswith("bad"):
            if not told.is_set():
                raise PermanentError("no", "no")
            time.sleep(0.5)
        insert(stream, event["account"])

    for number in range(6):
        rabbit.broker.publish({"account": f"bad{number}"})
    with rabbit.handled_by(handle):
        eventually(lambda: len(rabbit.letters()) == 6)
        told.set()
        for row in rabbit.query("SELECT id FROM idempotency.dead_letters"):
            replay(bank.app, row.id, CHANGE)
        eventually(rabbit.entries, timeout=15)
        rabbit.broker.publish({"account": "good"})
        eventually(lambda: len(rabbit.entries()) == 7)
    assert "good" in rabbit.entries()[:4]


@pytest.mark.long
def test_what_postgres_refuses_of_one_partition_stops_it_alone_and_says_why(make_streaming: Make) -> None:
    """As docs/cells.md closes a cell for a tenant that moves: it is no outage, and the others go on at full speed."""
    streaming = make_streaming("rabbitmq", partitions=2, apart=True)
    closed = "ALTER TABLE idempotency.records ADD CONSTRAINT acme_has_moved CHECK (tenant <> 'acme') NOT VALID"
    opened = "ALTER TABLE idempotency.records DROP CONSTRAINT acme_has_moved"
    with streaming.engine.connect() as connection:
        connection.execute(text(closed))
    streaming.broker.publish({"account": "a0", "tenant": "acme"})
    streaming.broker.publish({"account": "b0", "tenant": "beta"})
    for number in range(200):
        streaming.broker.publish({"account": f"c{number}", "tenant": "beta"}, 1)
    process = streaming.start(tenant="{event[tenant]}", batch=2)
    streaming.wait_until_stopped("offset 0 cannot be handled: Postgres refuses it: CheckViolation: ")
    # with a pause at each turn, of half a second at least, a hundred turns would take longer
    eventually(lambda: len(streaming.entries()) == 200, timeout=40, what=process.log)
    assert "acme_has_moved" in streaming.stopped()
    assert streaming.letters() == []
    assert "postgres_unavailable" not in process.log
    time.sleep(1.5 * STOPPED_PAUSE)  # it is tried again meanwhile
    assert process.log.count("stream_stopped") == 1
    with streaming.engine.connect() as connection:
        connection.execute(text(opened))
    streaming.wait_until_entered({"a0", "b0"})
    assert streaming.stopped() == ""
