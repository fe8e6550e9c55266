"""What cannot be handled becomes a dead letter, and the stream goes on or stops, as its handler has chosen."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime
from typing import Any

import amqp
import pytest
from sqlalchemy import text

from idempotency import PermanentError
from idempotency.application import close_runtime
from idempotency.errors import ChangeRefused, ReplayRefused
from idempotency.operate.cancel import cancel
from idempotency.operate.change import Change, Shown
from idempotency.operate.discard import approve, request
from idempotency.operate.people import Person
from idempotency.operate.rename import rename_service
from idempotency.operate.replay import replay
from idempotency.operate.seek import seek_stream
from idempotency.store import purge
from idempotency.streams import Handling
from idempotency.streams.message import from_kept
from idempotency.wire.keys import OperationId
from idempotency.wire.limits import HEADERS_COUNT
from tests.support import bank
from tests.support.processes import eventually
from tests.support.streaming import NAME, RabbitBroker, Streaming, configure, insert

# Of what does not depend on the broker: with RabbitMQ, and with Kafka in `make long`.
FEW = pytest.mark.few(1)
CHANGE = Change("ann", "tested", is_verified=True)


def newest(streaming: Streaming) -> int:
    number: int = streaming.query("SELECT max(id) AS id FROM idempotency.dead_letters")[0].id
    return number


def discard(streaming: Streaming, letter: int) -> None:
    configure(streaming.environment)
    with streaming.runtime.engine.begin() as connection:
        request(connection, Person("ann", "operator"), letter, "not needed")
    with streaming.runtime.engine.begin() as connection:
        approve(connection, Person("bob", "admin"), letter, app=bank.app)


@pytest.mark.few(1)
def test_what_is_no_operation_is_kept_whole_and_the_stream_goes_on(streaming: Streaming) -> None:
    publish = streaming.broker.publish
    publish({"account": "a0"})
    publish({"amount": 1})
    publish(b"\xff\x00 no JSON", trace="t1")
    publish(b"[" * 10_000)
    publish({"account": "x" * 300})
    publish({"account": "a0", "other": "value"})
    publish({"account": "bad", "how": "permanent"})
    publish({"account": "a1"})
    streaming.broker.flush()
    streaming.start(max_attempts=1)
    streaming.wait_until_handled()
    assert streaming.entries() == ["a0", "a1"]
    reasons = ["missing_key", "undecodable", "undecodable", "invalid_key", "fingerprint_mismatch", "no_account"]
    assert streaming.letters() == [(reason, "open") for reason in reasons]
    kept = streaming.query("SELECT headers FROM idempotency.dead_letters WHERE reason = 'undecodable' ORDER BY id")[0]
    message = from_kept(kept.headers)
    assert message.value == b"\xff\x00 no JSON"
    assert (message.topic, message.partition, message.offset) == (streaming.broker.topic, 0, 2)
    assert message.header("trace") == "t1"
    configure(streaming.environment)
    for letter in streaming.query("SELECT id FROM idempotency.dead_letters WHERE reason <> 'no_account' ORDER BY id"):
        with pytest.raises(ReplayRefused):
            replay(bank.app, letter.id, CHANGE)
    discard(streaming, newest(streaming) - 5)
    assert streaming.letters()[0] == ("missing_key", "discarded")


def test_a_message_beyond_a_limit_is_not_decoded(rabbit: Streaming) -> None:
    nested: object = "deep"
    for _ in range(40):
        nested = {"n": nested}
    rabbit.broker.publish({"account": "a0"}, deep=nested)
    rabbit.broker.publish({"account": "a1"}, **{f"h{number}": number for number in range(HEADERS_COUNT + 1)})
    rabbit.broker.publish({"account": "a2"})
    rabbit.start()
    rabbit.wait_until_handled()
    assert rabbit.entries() == ["a2"] or rabbit.entries() == ["a0", "a2"]
    assert ("beyond_limit", "open") in rabbit.letters()
    headers = rabbit.query("SELECT headers FROM idempotency.dead_letters WHERE reason = 'beyond_limit' ORDER BY id")[
        -1
    ].headers
    assert json.loads(headers)["stream-message"]["value_bytes"] == len(json.dumps({"account": "a1"}))


@pytest.mark.long
@pytest.mark.parametrize("on_failure", ["continue", "stop"])
def test_of_a_stream_made_anew_each_refused_message_has_its_own_letter(rabbit: Streaming, on_failure: str) -> None:
    """Its offsets come again; a letter of before stands for what was there before."""
    rabbit.broker.publish(b"the first that cannot be decoded")
    rabbit.broker.publish({"account": "a0"})
    process = rabbit.start()
    rabbit.wait_until_handled()
    assert process.end() == 0
    if on_failure == "stop":
        discard(rabbit, newest(rabbit))
    rabbit.broker.recreate()
    rabbit.broker.publish(b"another one, which no letter has")
    rabbit.broker.publish({"account": "a1"})
    configure(rabbit.environment)
    rabbit.handler().declared()
    seek_stream(bank.app, NAME, rabbit.broker.topic, 0, 0, CHANGE)
    rabbit.start(on_failure=on_failure)
    eventually(lambda: len(rabbit.letters()) == 2, what=rabbit.logs())
    (row,) = rabbit.query("SELECT headers FROM idempotency.dead_letters ORDER BY id DESC LIMIT 1")
    assert from_kept(row.headers).value == b"another one, which no letter has"
    if on_failure == "continue":
        eventually(lambda: rabbit.entries() == ["a0", "a1"], what=rabbit.logs())
    else:
        rabbit.wait_until_stopped("offset 0 is refused as undecodable")


@pytest.mark.long
def test_a_renamed_application_stores_a_refused_message_once(rabbit: Streaming) -> None:
    rabbit.broker.publish({"amount": 1})
    rabbit.broker.publish({"account": "a0"})
    process = rabbit.start(on_failure="stop")
    rabbit.wait_until_stopped("offset 0 is refused")
    assert process.end() == 0
    rabbit.environment["SERVICE"] = "ledger"
    configure(rabbit.environment)
    close_runtime(bank.app)
    rename_service(bank.app, "bank", "ledger", CHANGE)
    process = rabbit.start(on_failure="stop")
    eventually(lambda: rabbit.owners()[0] == process.pid, what=process.log)
    eventually(lambda: "stream_stopped" in process.log, what=process.log)
    assert rabbit.letters() == [("missing_key", "open")]
    discard(rabbit, newest(rabbit))
    eventually(lambda: rabbit.entries() == ["a0"], what=process.log)


@FEW
def test_a_key_in_the_header_is_used_where_the_handler_names_none(streaming: Streaming) -> None:
    streaming.broker.publish({"account": "a0"}, idempotency_key="k1")
    streaming.broker.publish({"account": "a0"}, idempotency_key="k1")
    streaming.broker.publish({"account": "a0"}, idempotency_key="k2")
    streaming.broker.publish({"account": "a0"})
    streaming.broker.flush()
    streaming.start(key=None)
    streaming.wait_until_handled()
    assert streaming.entries() == ["a0", "a0"]
    assert streaming.letters() == [("missing_key", "open")]


def test_a_stream_that_stops_waits_until_its_letter_is_replayed(rabbit: Streaming) -> None:
    rabbit.broker.publish({"account": "a0"})
    rabbit.broker.publish({"account": "a1", "how": "permanent unless told"})
    rabbit.broker.publish({"account": "a2"})
    rabbit.start(on_failure="stop")
    eventually(lambda: "offset 1 has failed: replay or discard" in rabbit.stopped(), what=rabbit.logs())
    assert rabbit.entries() == ["a0"]
    (rabbit.directory / "told").touch()
    configure(rabbit.environment)
    replay(bank.app, newest(rabbit), CHANGE)
    rabbit.wait_until_handled()
    assert rabbit.entries() == ["a0", "a1", "a2"]
    assert rabbit.stopped() == ""


@pytest.mark.long
@pytest.mark.parametrize("event", [{"account": "a1", "how": "permanent"}, {"amount": 1}])
def test_a_stream_that_stops_goes_on_once_its_letter_is_discarded(rabbit: Streaming, event: dict[str, str]) -> None:
    rabbit.broker.publish(event)
    rabbit.broker.publish({"account": "a2"})
    process = rabbit.start(on_failure="stop")
    eventually(rabbit.stopped, what=rabbit.logs())
    process.kill()
    rabbit.start(on_failure="stop")  # another process finds the same
    eventually(lambda: rabbit.owners()[0] not in (None, process.pid), what=rabbit.logs())
    discard(rabbit, newest(rabbit))
    rabbit.wait_until_handled()
    assert rabbit.entries() == ["a2"]
    assert [status for _, status in rabbit.letters()] == ["discarded"]


@pytest.mark.long
@FEW
def test_a_letter_that_is_replayed_runs_once_beside_the_stream(streaming: Streaming) -> None:
    streaming.broker.publish({"account": "a0", "how": "permanent unless told"})
    streaming.broker.publish({"account": "a1"})
    streaming.broker.flush()
    streaming.start()
    streaming.start()
    streaming.wait_until_handled()
    assert streaming.entries() == ["a1"]
    (streaming.directory / "told").touch()
    configure(streaming.environment)
    replay(bank.app, newest(streaming), CHANGE)
    eventually(lambda: "a0" in streaming.entries(), what=streaming.logs())
    assert streaming.entries() == ["a1", "a0"]
    (row,) = streaming.query("SELECT status, generation FROM idempotency.records WHERE key = 'a0'")
    assert (row.status, row.generation) == ("completed", 2)


# As py-amqp reads one.
AT = datetime(2026, 1, 1, tzinfo=UTC).replace(tzinfo=None)


@pytest.mark.long
def test_what_is_replayed_has_the_headers_and_the_time_of_what_has_failed(rabbit: Streaming) -> None:
    seen: list[tuple[Any, Any]] = []

    def handle(stream: Handling, event: Any) -> None:
        seen.append((stream.message.header("at"), stream.message.timestamp))
        if not rabbit.letters():
            raise PermanentError("no", "no")

    assert isinstance(rabbit.broker, RabbitBroker)
    published = amqp.Message(b'{"account": "a0"}', timestamp=1_800_000_000, application_headers={"at": AT})
    rabbit.broker._channel.basic_publish(published, routing_key=f"{rabbit.broker.topic}-0")
    with rabbit.handled_by(handle):
        eventually(rabbit.letters)
        before = len(seen)
        replay(bank.app, newest(rabbit), CHANGE)
        eventually(lambda: len(seen) > before, timeout=15)
    assert set(seen) == {(AT, 1_800_000_000.0)}


@pytest.mark.long
def test_a_letter_that_the_present_code_takes_for_another_operation_is_not_replayed(rabbit: Streaming) -> None:
    def handle(stream: Handling, event: Any) -> None:
        if event["account"] == "a0" and len(rabbit.letters()) == 0:
            raise PermanentError("no", "no")
        insert(stream, event["account"])

    rabbit.broker.publish({"account": "a0"})
    with rabbit.handled_by(handle, "keyed"):
        eventually(rabbit.letters)
    letter = newest(rabbit)
    with (
        rabbit.handled_by(handle, "keyed", key="v2-{event[account]}"),
        pytest.raises(ReplayRefused, match=r"its message has another key or tenant; nothing would run it"),
    ):
        replay(bank.app, letter, CHANGE)
    with (
        rabbit.handled_by(handle, "keyed", decode=lambda value: int("no number")),
        pytest.raises(ReplayRefused, match="its message is refused as undecodable"),
    ):
        replay(bank.app, letter, CHANGE)
    assert [status for _, status in rabbit.letters()] == ["open"]
    with rabbit.handled_by(handle, "keyed"):
        replay(bank.app, newest(rabbit), CHANGE)
        eventually(lambda: rabbit.entries() == ["a0"])


def waiting(streaming: Streaming, account: str) -> Shown:
    """An operation that waits for its next attempt, as a person sees it."""
    sought = f"SELECT fence FROM idempotency.records WHERE key = '{account}' AND status = 'released'"
    try:
        (row,) = eventually(lambda: streaming.query(sought), timeout=8)
    except AssertionError:
        raise AssertionError(streaming.logs()[-3000:]) from None
    return Shown(OperationId("default", f"stream.{NAME}", account), "released", row.fence)


def cancelled(streaming: Streaming, shown: Shown) -> int:
    configure(streaming.environment)
    cancel(bank.app, shown, CHANGE)
    return newest(streaming)


@pytest.mark.long
@pytest.mark.parametrize("on_failure", ["continue", "stop"])
def test_what_a_person_cancels_is_replayed_once_from_its_letter(rabbit: Streaming, on_failure: str) -> None:
    rabbit.environment["RETRY_BASE"] = "250"
    rabbit.broker.publish({"account": "a0", "how": "error"})
    rabbit.broker.publish({"account": "a1"})
    rabbit.handler(on_failure=on_failure).declared()
    process = rabbit.start(on_failure=on_failure)
    shown = waiting(rabbit, "a0")
    assert process.end() == 0
    letter = cancelled(rabbit, shown)
    with pytest.raises(ReplayRefused, match="its message is not known yet"):
        replay(bank.app, letter, CHANGE)
    rabbit.start(on_failure=on_failure)
    rabbit.start(on_failure=on_failure)
    if on_failure == "continue":
        rabbit.wait_until_handled()
        assert rabbit.entries() == ["a1"]
    else:
        rabbit.wait_until_stopped("offset 0 has failed")
        assert rabbit.entries() == []
    (rabbit.directory / "tried-a0").write_text("...")
    replay(bank.app, letter, CHANGE)
    eventually(lambda: sorted(rabbit.entries()) == ["a0", "a1"], what=rabbit.logs())
    rabbit.wait_until_handled()
    assert sorted(rabbit.entries()) == ["a0", "a1"]
    assert rabbit.letters() == [("cancelled", "replayed")]


@pytest.mark.long
def test_what_was_opened_again_and_is_cancelled_keeps_its_message(rabbit: Streaming) -> None:
    rabbit.broker.publish({"account": "a0", "how": "permanent unless told"})
    rabbit.handler().declared()
    process = rabbit.start()
    rabbit.wait_until_handled()
    assert process.end() == 0
    configure(rabbit.environment)
    replay(bank.app, newest(rabbit), CHANGE)
    letter = cancelled(rabbit, waiting(rabbit, "a0"))
    (rabbit.directory / "told").touch()
    replay(bank.app, letter, CHANGE)
    rabbit.start()
    eventually(lambda: rabbit.entries() == ["a0"], what=rabbit.logs())
    (row,) = rabbit.query("SELECT status, generation FROM idempotency.records WHERE key = 'a0'")
    assert (row.status, row.generation) == ("completed", 3)


@pytest.mark.long
def test_a_letter_is_kept_until_what_was_opened_again_by_it_has_ended(rabbit: Streaming) -> None:
    """However long no process runs it: nothing else has the message."""
    rabbit.broker.publish({"account": "a0", "how": "permanent unless told"})
    rabbit.handler().declared()
    process = rabbit.start()
    rabbit.wait_until_handled()
    assert process.end() == 0
    configure(rabbit.environment)
    replay(bank.app, newest(rabbit), CHANGE)
    assert purged_after_retention(rabbit) == 0
    (rabbit.directory / "told").touch()
    rabbit.start()
    eventually(lambda: rabbit.entries() == ["a0"], what=rabbit.logs())
    assert purged_after_retention(rabbit) == 1


def purged_after_retention(streaming: Streaming) -> int:
    with streaming.engine.begin() as connection:
        connection.execute(text("UPDATE idempotency.dead_letters SET closed_at = now() - interval '31 days'"))
    with streaming.engine.connect() as connection:
        return purge.letters(connection, "bank", retention=30 * 86400.0, limit=100)[0]


@pytest.mark.long
def test_on_failed_gets_the_event_or_the_cancel_is_refused(rabbit: Streaming) -> None:
    rabbit.environment["RETRY_BASE"] = "250"
    told: list[Any] = []
    rabbit.broker.publish({"account": "a0", "how": "error"})
    process = rabbit.start()
    shown = waiting(rabbit, "a0")
    assert process.end() == 0
    rabbit.handler(on_failed=lambda session, operation, error: told.append(operation.arguments)).declared()
    with pytest.raises(ChangeRefused, match="its on_failed takes the event"):
        cancelled(rabbit, shown)
    rabbit.handler().declared()
    letter = cancelled(rabbit, shown)
    process = rabbit.start()
    rabbit.wait_until_handled()
    assert process.end() == 0
    replay(bank.app, letter, CHANGE)
    rabbit.handler(on_failed=lambda session, operation, error: told.append(operation.arguments)).declared()
    cancelled(rabbit, waiting(rabbit, "a0"))
    assert told == [{"event": {"account": "a0", "how": "error"}}]


def test_an_error_is_retried_and_the_attempts_are_counted(rabbit: Streaming) -> None:
    rabbit.broker.publish({"account": "a0", "how": "error"})
    rabbit.broker.publish({"account": "a1"})
    rabbit.start(max_attempts=2)
    rabbit.wait_until_handled()
    assert rabbit.entries() == ["a0", "a1"]
    (row,) = rabbit.query("SELECT attempts FROM idempotency.records WHERE key = 'a0'")
    assert row.attempts == 2


def test_of_many_tenants_the_last_are_remembered_and_asked_for_in_turns(
    rabbit: Streaming, monkeypatch: pytest.MonkeyPatch
) -> None:
    from idempotency.streams import reopened

    monkeypatch.setattr(reopened, "PAUSE", 0.0)
    remembered = rabbit.consumer(threading.Event())._reopened
    asked: list[tuple[str, ...]] = []
    for number in range(reopened.TENANTS + 1500):
        remembered.note(f"t{number}")
    monkeypatch.setattr(type(rabbit.runtime), "autocommit", recording(type(rabbit.runtime).autocommit, asked))
    for _ in range(reopened.TENANTS // reopened.AT_ONCE):
        remembered.run_next()
    assert max(map(len, asked)) == reopened.AT_ONCE + 1
    assert all(each[0] == "default" for each in asked)
    assert {tenant for each in asked for tenant in each[1:]} == {f"t{number}" for number in range(1500, 2500)}


def recording(original: Any, calls: list[tuple[str, ...]]) -> Any:
    def autocommit(runtime: Any, *tenants: str) -> Any:
        calls.append(tenants)
        return original(runtime, *tenants)

    return autocommit
