"""What operators say about an effect, and what they cancel: carried out, corrected, refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context
from sqlalchemy import Connection, Engine, text
from typing_extensions import TypedDict

from idempotency import DidNotHappen, EffectUnknown, Happened, OperationFailed, PermanentError
from idempotency.errors import ChangeRefused, InvalidResult
from idempotency.operate.cancel import cancel
from idempotency.operate.change import Change
from idempotency.operate.release import release
from idempotency.operate.replay import replay
from idempotency.operate.resolve import resolve_effect
from idempotency.wire.headers import REVOKED_HEADER
from idempotency.worker.revocation import revoke_terminated
from tests.support import bank as b
from tests.support import operations as op
from tests.support.deliveries import Deliveries, deliver_row, request_of
from tests.support.operations import Entries, Record, code, make_due
from tests.support.operators import ANN, shown
from tests.support.tasks import (
    Provider,
    enqueued,
    lost,
    make_task,
    on_failed,
    told,
    told_codes,
    unwrite,
    unwrite_with_effects,
    write,
)

# ---------------------------------------------------------------- a word about an effect


class Charge(TypedDict):
    charge: str


@pytest.fixture
def unknown(bank: Celery, deliveries: Deliveries) -> Any:
    """A task whose operation `k` has ended as effect_unknown after a step with an undo."""

    def body(self: Any) -> Any:
        self.step("reserve", write, "reserved", undo=unwrite)
        try:
            return self.effect("call", Provider(lost()))
        except ConnectionError:
            raise PermanentError("gave up", "gave_up") from None

    task = make_task(bank, body, on_failed=on_failed, effect_types={"call": Charge})
    deliveries.deliver(task, key="k")
    return task


def test_a_persons_result_is_checked_before_it_is_stored(
    bank: Celery, connection: Connection, unknown: Any, record: Record
) -> None:
    with pytest.raises(InvalidResult, match="result of 'call': charge: Field required"):
        resolve_effect(bank, shown(connection, unknown), "call", Happened({"id": 1}), ANN)
    assert record("k").effects["call"]["state"] == "begun"
    resolve_effect(bank, shown(connection, unknown), "call", Happened({"charge": "ch_2"}), ANN)
    assert record("k").effects["call"]["state"] == "done"


def test_a_persons_word_can_be_corrected(bank: Celery, connection: Connection, unknown: Any, record: Record) -> None:
    resolve_effect(bank, shown(connection, unknown), "call", DidNotHappen(), ANN)
    resolve_effect(bank, shown(connection, unknown), "call", Happened({"charge": "ch_2"}), ANN)
    assert record("k").effects["call"]["state"] == "done"


def test_a_persons_word_with_end_undoes_what_the_end_had_to_leave(
    bank: Celery, connection: Connection, unknown: Any, record: Record, entries: Entries
) -> None:
    assert entries("reserved") == 1
    resolve_effect(bank, shown(connection, unknown), "call", DidNotHappen(), ANN, end=True)
    assert (code(record("k")), entries("reserved")) == (("gave_up", None), 0)
    assert told_codes() == ["effect_unknown", "gave_up"]
    # corrected afterwards: it has happened after all, so the plain end does not stand
    resolve_effect(bank, shown(connection, unknown), "call", Happened({"charge": "ch_2"}), ANN)
    assert code(record("k"))[0] == "unfinished"


def test_an_end_after_a_refused_repeat_is_reported_as_the_refusal(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record, entries: Entries
) -> None:
    provider = Provider(lost(), PermanentError("this API key was revoked", "key_revoked"))

    def body(self: Any) -> Any:
        self.step("reserve", write, "reserved", undo=unwrite)
        return self.effect("call", provider)

    task = make_task(bank, body, on_failed=on_failed)
    deliveries.deliver(task, key="k")
    make_due(engine, "k")
    deliveries.deliver(task, key="k")
    assert (code(record("k")), entries("reserved")) == (("effect_unknown", "key_revoked"), 1)
    resolve_effect(bank, shown(connection, task), "call", DidNotHappen(), ANN, end=True)
    assert (code(record("k")), entries("reserved")) == (("key_revoked", None), 0)
    assert told_codes() == ["effect_unknown", "key_revoked"]


def test_an_end_of_what_was_only_unknown_is_a_persons_cancel(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record
) -> None:
    def body(self: Any) -> Any:
        try:
            return self.effect("call", Provider(lost()))
        except ConnectionError:
            raise EffectUnknown("the provider's key has expired") from None

    task = make_task(bank, body, on_failed=on_failed)
    deliveries.deliver(task, key="k")
    resolve_effect(bank, shown(connection, task), "call", DidNotHappen(), ANN, end=True)
    assert code(record("k")) == ("cancelled", None)
    assert json.loads(record("k").error)["message"] == ANN.reason
    assert told_codes() == ["effect_unknown", "cancelled"]


def test_a_word_is_not_corrected_once_an_undo_has_answered_for_it(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record, entries: Entries
) -> None:
    def body(self: Any) -> Any:
        self.step("reserve", write, "reserved", undo=unwrite_with_effects)
        try:
            return self.effect("call", Provider(lost()))
        except ConnectionError:
            raise PermanentError("gave up", "gave_up") from None

    task = make_task(bank, body, on_failed=on_failed)
    deliveries.deliver(task, key="k")
    resolve_effect(bank, shown(connection, task), "call", Happened({"charge": "ch_1"}), ANN, end=True)
    assert (code(record("k")), entries("reversed ch_1")) == (("gave_up", None), 1)
    with pytest.raises(ChangeRefused, match="effect 'call' is compensated"):
        resolve_effect(bank, shown(connection, task), "call", DidNotHappen(), ANN)
    assert record("k").effects["call"]["state"] == "compensated"


def test_a_word_on_what_was_shown_before_another_word_is_refused(
    bank: Celery, connection: Connection, unknown: Any
) -> None:
    seen = shown(connection, unknown)
    resolve_effect(bank, seen, "call", DidNotHappen(), ANN)
    with pytest.raises(ChangeRefused, match="look again"):
        resolve_effect(bank, seen, "call", Happened({"charge": "ch_2"}), ANN)


def test_a_repeated_request_changes_nothing_twice(
    bank: Celery, deliveries: Deliveries, connection: Connection, unknown: Any, record: Record
) -> None:
    seen = shown(connection, unknown)
    request = Change("ann", "ticket 42", "request-1")
    for _ in range(2):
        resolve_effect(bank, seen, "call", DidNotHappen(), request)
    (letter,) = op.dead_letters(connection)
    again = Change("ann", "ticket 42", "request-2")
    assert replay(bank, letter.id, again) == replay(bank, letter.id, again)
    assert (record("k").generation, len(op.outbox(connection))) == (2, 1)
    waiting = shown(connection, unknown)
    for _ in range(2):
        cancel(bank, waiting, Change("ann", "no", "request-3"))
    assert len(connection.execute(text("SELECT FROM idempotency.audit")).all()) == 3
    with pytest.raises(ChangeRefused, match="--request-id: was used before, to cancel"):
        release(bank, waiting, Change("ann", "no", "request-3"))


def test_duplicates_get_the_code_of_an_end(bank: Celery, deliveries: Deliveries, unknown: Any) -> None:
    outcome = deliveries.deliver(unknown, key="k")
    assert isinstance(outcome.value, OperationFailed)
    assert outcome.value.code == "effect_unknown"


# ---------------------------------------------------------------- a word, and another one


def test_a_word_about_a_compensated_effect_is_refused(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record, entries: Entries
) -> None:
    provider = Provider(lost())

    def body(self: Any) -> Any:
        self.step("reserve", write, "reserved", undo=unwrite_with_effects)
        return self.effect("call", provider)

    task = make_task(bank, body, max_attempts=1, on_failed=on_failed)
    deliveries.deliver(task, key="k")
    cancel(bank, shown(connection, task), ANN, may_have_happened=True)
    resolve_effect(bank, shown(connection, task), "call", Happened({"charge": "ch_typo"}), ANN, end=True)
    assert (code(record("k"))[0], record("k").effects["call"]["state"]) == ("cancelled", "compensated")
    before = record("k")
    for word in (Happened({"charge": "ch_1"}), DidNotHappen()):
        with pytest.raises(ChangeRefused, match="is compensated"):
            resolve_effect(bank, shown(connection, task), "call", word, ANN)
    assert (record("k"), entries("reversed ch_typo")) == (before, 1)


def expire_key(connection: Connection) -> None:
    """The provider has forgotten the key of the open call, and the next attempt is due."""
    connection.execute(
        text("UPDATE idempotency.records SET effects = jsonb_set(effects, '{call,begun_at}', '1000'::jsonb)")
    )
    connection.execute(
        text(
            "UPDATE idempotency.records SET available_at = clock_timestamp() - interval '1s' WHERE status = 'released'"
        )
    )


def test_an_unknown_end_that_a_person_closes_is_cancelled_and_correctable(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record, entries: Entries
) -> None:
    """The library's own EffectUnknown (the key has expired) has no cause beside it."""

    def body(self: Any) -> Any:
        self.step("reserve", write, "reserved", undo=unwrite)
        return self.effect("call", Provider(lost()))

    task = make_task(bank, body, on_failed=on_failed)
    deliveries.deliver(task, key="k")
    expire_key(connection)
    assert isinstance(deliveries.deliver(task, key="k").value, EffectUnknown)
    resolve_effect(bank, shown(connection, task), "call", DidNotHappen(), ANN, end=True)
    assert (entries("reserved"), code(record("k"))[0], told[-1][0]) == (0, "cancelled", "cancelled")

    resolve_effect(bank, shown(connection, task), "call", Happened({"charge": "ch_1"}), ANN)
    assert (code(record("k")), record("k").effects["call"]["state"]) == (("unfinished", "cancelled"), "done")
    assert (told[-1][0], told[-1][1].effects["call"].state) == ("unfinished", "happened")


def test_a_last_look_that_ends_as_unknown_keeps_its_cause(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record
) -> None:
    task = make_task(bank, lambda self: self.effect("call", Provider(lost())), on_failed=on_failed)
    deliveries.deliver(task, key="k")
    connection.execute(text("UPDATE idempotency.records SET revoked_generation = generation"))
    expire_key(connection)
    deliveries.deliver(task, key="k")
    assert code(record("k")) == ("effect_unknown", "revoked")


# ---------------------------------------------------------------- requests, cancels and revokes


def test_a_request_id_is_refused_for_another_effect_or_another_word(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record
) -> None:
    def body(self: Any) -> None:
        for name in ("one", "two"):
            try:
                self.effect(name, Provider(lost()))
            except ConnectionError:
                continue
        raise PermanentError("gave up", "gave_up")

    task = make_task(bank, body)
    deliveries.deliver(task, key="k")
    request = Change("ann", "ticket 42", "ticket-42")
    for _ in range(2):  # the very same request is carried out once
        resolve_effect(bank, shown(connection, task), "one", DidNotHappen(), request)
    for name, word in (("two", DidNotHappen()), ("one", Happened({"charge": "ch_1"}))):
        with pytest.raises(ChangeRefused, match="--request-id: was used before"):
            resolve_effect(bank, shown(connection, task), name, word, request)
    states = {name: entry["state"] for name, entry in record("k").effects.items()}
    assert states == {"one": "not_happened", "two": "begun"}


def test_a_repeated_cancel_returns_the_code_of_the_first(
    bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    task = make_task(bank, lambda self: self.effect("call", Provider(lost())))
    deliveries.deliver(task, key="k")
    request, seen = Change("ann", "no", "request-1"), shown(connection, task)
    ended = [cancel(bank, seen, request, may_have_happened=True).code for _ in range(2)]
    assert ended == ["effect_unknown", "effect_unknown"]


def test_a_cancel_without_the_task_says_that_on_failed_was_skipped(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record
) -> None:
    """An older CLI during a deploy."""

    def body(self: Any) -> None:
        raise ValueError("again")

    task = make_task(bank, body, on_failed=on_failed)
    deliveries.deliver(task, key="k")
    known = bank.tasks.pop(task.name)
    try:
        cancel(bank, shown(connection, task), ANN, without_task=True)
    finally:
        bank.tasks[task.name] = known
    (letter,) = op.dead_letters(connection)
    assert (record("k").status, code(record("k"))[0], told) == ("failed", "cancelled", [])
    assert letter.reason == "cancelled"
    details = connection.execute(text("SELECT details FROM idempotency.audit")).scalar_one()
    assert "no task of this name is known" in details["on_failed_error"]


def test_a_revoke_remembered_from_before_a_replay_does_not_end_it(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record
) -> None:
    """A duplicate of the ended operation brought the revoke, which changed nothing; the worker keeps the task id."""
    refuse = [True]

    def body(self: Any) -> str:
        if refuse:
            raise PermanentError("no", "refused")
        return "done"

    task = make_task(bank, body)
    deliveries.deliver(task, key="k", task_id="t1")
    deliveries.deliver(task, key="k", task_id="t1", headers={REVOKED_HEADER: True})
    assert code(record("k"))[0] == "refused"
    refuse.clear()
    (letter,) = op.dead_letters(connection)
    replay(bank, letter.id, ANN)
    row = op.outbox(connection)[-1]
    outcome = deliveries.deliver(task, key="k", task_id="t1", origin=row.origin, headers={REVOKED_HEADER: True})
    assert (outcome.value, record("k").status) == ("done", "completed")


def test_revoking_a_duplicate_leaves_an_accepted_operation_alone(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record, entries: Entries
) -> None:
    """Two clicks, two task ids; the second is revoked."""
    for account, accepted in (("one", ["first"]), ("both", ["first", "second"])):
        for id in accepted:
            enqueued(connection, b.deposit, account, task_id=id)
        outcome = deliveries.deliver(b.deposit, account, task_id="second", headers={REVOKED_HEADER: True})
        assert (outcome.state, outcome.value.args, record(account)) == ("IGNORED", ("revoked",), None)
    for row in op.outbox(connection):
        if '"id": "first"' in row.message:
            assert deliver_row(deliveries, b.deposit, row).state == "SUCCESS"
    assert (entries("one"), entries("both")) == (1, 1)


def test_revoking_a_duplicate_leaves_an_operation_between_two_attempts_alone(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record
) -> None:
    def body(self: Any) -> str:
        raise ValueError("again")

    task = make_task(bank, body)
    deliveries.deliver(task, key="k", task_id="first")
    make_due(engine, "k")
    revoked = {REVOKED_HEADER: True}
    assert deliveries.deliver(task, key="k", task_id="second", headers=revoked).state == "IGNORED"
    assert record("k").status == "released"
    deliveries.deliver(task, key="k", task_id="first", headers=revoked, origin="retry")
    assert (record("k").status, code(record("k"))[0]) == ("failed", "revoked")


def terminated(app: Celery, task: Any, id: str, account: str) -> bool:
    """As a worker's main process does it, once it has ended the attempt of this message."""
    return revoke_terminated(task, Context(request_of(app, task, id), args=[account], kwargs={}))


def test_terminating_a_duplicate_leaves_an_operation_between_two_attempts_alone(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record
) -> None:
    """It may wait for its turn in a batch, or for Postgres, when its process is ended."""
    fails = [True]

    def body(self: Any, account: str) -> str:
        if fails:
            raise ValueError("again")
        return account

    task = make_task(bank, body, key="{account}")
    deliveries.deliver(task, "k", task_id="first")
    make_due(engine, "k")
    assert not terminated(bank, task, "second", "k")
    fails.clear()
    assert deliveries.deliver(task, "k", task_id="first", origin="retry").value == "k"
    assert record("k").status == "completed"


def test_a_terminated_message_whose_key_another_call_has_used_comes_back_and_is_kept(
    bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    def body(self: Any, account: str, amount: int = 0) -> str:
        return account

    task = make_task(bank, body, key="{account}")
    deliveries.deliver(task, "k", 1, task_id="first")
    assert terminated(bank, task, "second", "k")
    deliveries.deliver(task, "k", task_id="second", headers={REVOKED_HEADER: True})
    assert [letter.reason for letter in op.dead_letters(connection)] == ["fingerprint_mismatch"]
