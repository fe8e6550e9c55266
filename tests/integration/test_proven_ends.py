"""Ends that a second reader proved wrong, each held to what is right."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session

from idempotency import DidNotHappen, EffectUnknown, Happened, Operation, PermanentError
from idempotency.attempt import attempt
from idempotency.operate import operators
from idempotency.operate.operators import Change, ChangeRefused
from idempotency.wire.message import REVOKED_HEADER
from tests.support import operations as op
from tests.support.deliveries import Deliveries
from tests.support.operations import Entries, Record, code, deaths, make_due, recover_now
from tests.support.operators import ANN, replay, shown
from tests.support.tasks import (
    Provider,
    lost,
    make_task,
    on_failed,
    told,
    told_codes,
    unwrite,
    unwrite_with_effects,
    write,
)


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


# ---------------------------------------------------------------- a call that says itself that it does not know


@pytest.mark.parametrize("how", ["gateway", "nested operation"])
def test_an_effect_that_raises_effect_unknown_stays_open(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record, entries: Entries, how: str
) -> None:
    provider = Provider(lost())

    def gateway(*, idempotency_key: str) -> Any:
        try:
            return provider(idempotency_key=idempotency_key)
        except ConnectionError:
            raise EffectUnknown("the provider did not answer, and cannot be asked") from None

    nested = make_task(bank, lambda self: self.effect("charge", gateway))

    def call(*, idempotency_key: str) -> Any:
        return nested.apply(idempotency_key=idempotency_key, throw=True).get()

    def body(self: Any) -> Any:
        self.step("reserve", write, "reserved", undo=unwrite)
        return self.effect("call", gateway if how == "gateway" else call)

    task = make_task(bank, body, on_failed=on_failed)
    deliveries.deliver(task, key="k")
    assert (code(record("k"))[0], record("k").effects["call"]["state"]) == ("effect_unknown", "begun")
    assert (entries("reserved"), entries("undone reserved")) == (1, 0)
    assert (told[-1][0], told[-1][1].effects["call"].state) == ("effect_unknown", "unknown")
    if how == "gateway":
        assert replay(bank, connection, deliveries, task).value == {"charge": "ch_1"}
        assert len(set(provider.keys)) == 1  # repeated under the same key


# ---------------------------------------------------------------- a person's word, and another one


def test_a_word_about_a_compensated_effect_is_refused(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record, entries: Entries
) -> None:
    provider = Provider(lost())

    def body(self: Any) -> Any:
        self.step("reserve", write, "reserved", undo=unwrite_with_effects)
        return self.effect("call", provider)

    task = make_task(bank, body, max_attempts=1, on_failed=on_failed)
    deliveries.deliver(task, key="k")
    operators.cancel(bank, shown(connection, task), ANN, may_have_happened=True)
    operators.resolve_effect(bank, shown(connection, task), "call", Happened({"charge": "ch_typo"}), ANN, end=True)
    assert (code(record("k"))[0], record("k").effects["call"]["state"]) == ("cancelled", "compensated")
    before = record("k")
    for word in (Happened({"charge": "ch_1"}), DidNotHappen()):
        with pytest.raises(ChangeRefused, match="is compensated"):
            operators.resolve_effect(bank, shown(connection, task), "call", word, ANN)
    assert (record("k"), entries("reversed ch_typo")) == (before, 1)


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
    operators.resolve_effect(bank, shown(connection, task), "call", DidNotHappen(), ANN, end=True)
    assert (entries("reserved"), code(record("k"))[0], told[-1][0]) == (0, "cancelled", "cancelled")

    operators.resolve_effect(bank, shown(connection, task), "call", Happened({"charge": "ch_1"}), ANN)
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


# ---------------------------------------------------------------- an `on_failed` that would stop the end


DEFERRED = """
CREATE TABLE cases (id bigserial PRIMARY KEY, account text);
CREATE TABLE customers (account text PRIMARY KEY);
ALTER TABLE cases ADD CONSTRAINT case_has_a_customer FOREIGN KEY (account) REFERENCES customers
    DEFERRABLE INITIALLY DEFERRED;
"""


def open_case(session: Session, operation: Operation, error: PermanentError) -> None:
    """Its constraint is checked at COMMIT, unless it is asked for before."""
    session.execute(text("INSERT INTO cases (account) VALUES (:key)"), {"key": operation.key})


def roll_back_and_raise(session: Session, operation: Operation, error: PermanentError) -> None:
    """What many applications do with an error in a handler."""
    session.rollback()
    raise ValueError("a bug in on_failed")


@pytest.mark.parametrize("handler", [open_case, roll_back_and_raise])
def test_an_on_failed_that_cannot_commit_does_not_keep_an_operation_open(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record, handler: Any
) -> None:
    connection.execute(text(DEFERRED))
    keys: list[str] = []

    def charge(*, idempotency_key: str) -> str:
        keys.append(idempotency_key)
        raise PermanentError("the card was declined", "card_declined")

    task = make_task(bank, lambda self: self.effect("call", charge), on_failed=handler)
    assert deliveries.deliver(task, key="k").state == "FAILURE"
    assert (record("k").status, code(record("k"))[0], len(keys)) == ("failed", "card_declined", 1)
    assert [letter.reason for letter in op.dead_letters(connection)] == ["on_failed_error"]
    assert connection.execute(text("SELECT count(*) FROM cases")).scalar_one() == 0


def test_a_person_can_cancel_over_an_on_failed_that_rolls_back_and_raises(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record
) -> None:
    def body(self: Any) -> None:
        raise ValueError("again")

    task = make_task(bank, body, on_failed=roll_back_and_raise)
    deliveries.deliver(task, key="k")
    assert operators.cancel(bank, shown(connection, task), ANN).code == "cancelled"
    assert (record("k").status, code(record("k"))[0]) == ("failed", "cancelled")
    assert [letter.reason for letter in op.dead_letters(connection)] == ["on_failed_error"]


# ---------------------------------------------------------------- a recorded refusal


def test_a_refusal_ends_its_generation_even_when_its_worker_died(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next attempt fails with the same code, and calls nothing; a person's replay calls under the next key."""
    keys: list[str] = []

    def charge(*, idempotency_key: str) -> str:
        keys.append(idempotency_key)
        if len(keys) == 1:
            raise PermanentError("the card was declined", "card_declined")
        return "ch_1"

    class Killed(BaseException):
        pass

    def killed(*_: Any, **__: Any) -> None:
        raise Killed  # SIGKILL between the recorded refusal and the failing commit

    task = make_task(bank, lambda self: self.effect("call", charge), on_failed=on_failed)
    with monkeypatch.context() as patch:
        patch.setattr(attempt.Attempt, "fail", killed)
        with pytest.raises(Killed):
            task.apply(idempotency_key="k")
    assert (record("k").status, record("k").effects["call"]["state"]) == ("started", "not_happened")
    recover_now(bank, connection)
    deliveries.deliver(task, key="k", origin="recover")
    assert (code(record("k"))[0], len(keys)) == ("card_declined", 1)
    assert replay(bank, connection, deliveries, task).value == "ch_1"
    assert len(set(keys)) == 2


# ---------------------------------------------------------------- a last look


def test_a_last_look_that_reaches_an_effect_not_begun_ends_as_unfinished(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record
) -> None:
    """A process died between two effects at its last attempt."""
    first, second, runs = Provider(), Provider(), []

    def body(self: Any) -> Any:
        self.effect("first", first)
        if not runs:
            runs.append(1)
            raise ValueError("between the two")
        return self.effect("second", second)

    task = make_task(bank, body, max_attempts=2, on_failed=on_failed)
    deliveries.deliver(task, key="k")
    deaths(engine, "k", 2)
    assert deliveries.deliver(task, key="k", origin="recover").state == "FAILURE"
    assert code(record("k")) == ("unfinished", "attempts_exhausted")
    assert (told_codes(), second.keys) == (["unfinished"], [])
    assert [letter.reason for letter in op.dead_letters(connection)] == ["unfinished"]


# ---------------------------------------------------------------- a replay with other arguments


def test_a_replay_repeats_an_undone_step_that_returns_something_new(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record
) -> None:
    """The undone reservation had another id than the replay's, which is an argument of the refused call."""
    refusals = [PermanentError("the card was declined", "card_declined")]
    called: list[tuple[int, str]] = []

    def reserve(session: Session) -> dict[str, Any]:
        return {"reservation": session.execute(text("SELECT nextval('entries_id_seq')")).scalar_one()}

    def charge(reserved: dict[str, Any], *, idempotency_key: str) -> str:
        called.append((reserved["reservation"], idempotency_key))
        if refusals:
            raise refusals.pop()
        return "ch_1"

    def body(self: Any) -> Any:
        return self.effect("call", charge, self.step("reserve", reserve, undo=unreserve))

    task = make_task(bank, body, on_failed=on_failed)
    deliveries.deliver(task, key="k")
    assert (code(record("k"))[0], set(record("k").effects)) == ("card_declined", {"call"})  # undone, plainly
    assert replay(bank, connection, deliveries, task).value == "ch_1"
    (before, first), (after, second) = called
    assert before != after
    assert first != second


def unreserve(session: Session, reserved: dict[str, Any]) -> None:
    pass


def test_a_refused_parameter_can_be_corrected_and_replayed(
    bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    row = {"currency": "XXX"}
    called: list[tuple[str, str]] = []

    def charge(*, currency: str, idempotency_key: str) -> str:
        called.append((currency, idempotency_key))
        if currency == "XXX":
            raise PermanentError("no such currency", "invalid_currency")
        return "ch_1"

    task = make_task(bank, lambda self: self.effect("call", charge, **row), on_failed=on_failed)
    deliveries.deliver(task, key="k")
    row["currency"] = "EUR"
    assert replay(bank, connection, deliveries, task).value == "ch_1"
    assert [currency for currency, _ in called] == ["XXX", "EUR"]
    assert called[0][1] != called[1][1]


# ---------------------------------------------------------------- operators


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
        operators.resolve_effect(bank, shown(connection, task), "one", DidNotHappen(), request)
    for name, word in (("two", DidNotHappen()), ("one", Happened({"charge": "ch_1"}))):
        with pytest.raises(ChangeRefused, match="--request-id: was used before"):
            operators.resolve_effect(bank, shown(connection, task), name, word, request)
    states = {name: entry["state"] for name, entry in record("k").effects.items()}
    assert states == {"one": "not_happened", "two": "begun"}


def test_a_repeated_cancel_returns_the_code_of_the_first(
    bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    task = make_task(bank, lambda self: self.effect("call", Provider(lost())))
    deliveries.deliver(task, key="k")
    request, seen = Change("ann", "no", "request-1"), shown(connection, task)
    ended = [operators.cancel(bank, seen, request, may_have_happened=True).code for _ in range(2)]
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
        operators.cancel(bank, shown(connection, task), ANN, without_task=True)
    finally:
        bank.tasks[task.name] = known
    (letter,) = op.dead_letters(connection)
    assert (record("k").status, code(record("k"))[0], told) == ("failed", "cancelled", [])
    assert letter.reason == "on_failed_error"
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
    operators.replay(bank, letter.id, ANN)
    row = op.outbox(connection)[-1]
    outcome = deliveries.deliver(task, key="k", task_id="t1", origin=row.origin, headers={REVOKED_HEADER: True})
    assert (outcome.value, record("k").status) == ("done", "completed")


# ---------------------------------------------------------------- a process that dies in each end


def test_an_end_that_skips_on_failed_says_so_in_its_letter(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record
) -> None:
    """Claims lost beyond the last attempt, as after an `on_failed` that kills its process."""

    def body(self: Any) -> None:
        raise ValueError("again")

    task = make_task(bank, body, max_attempts=2, on_failed=on_failed)
    deliveries.deliver(task, key="k")
    deaths(engine, "k", 2 + attempt.ON_FAILED_TRIES, spent_at=3)
    deliveries.deliver(task, key="k", origin="recover")
    assert (code(record("k"))[0], told) == ("attempts_exhausted", [])
    assert [letter.reason for letter in op.dead_letters(connection)] == ["on_failed_error"]


# ---------------------------------------------------------------- one name for a step and an effect


def mark(session: Session) -> str:
    """Without arguments, as the effect: they are no difference between the two."""
    return "marked"


@pytest.mark.parametrize("was", ["step", "effect"])
def test_a_step_and_an_effect_under_one_name_are_a_mismatch(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record, was: str
) -> None:
    """A deploy between two attempts."""
    provider, attempts = Provider(lost()), []

    def body(self: Any) -> Any:
        attempts.append(1)
        if (was == "step") == (len(attempts) == 1):
            self.step("charge", mark)
        else:
            self.effect("charge", provider)
        raise ValueError("again")

    task = make_task(bank, body)
    deliveries.deliver(task, key="k")
    calls = list(provider.keys)
    make_due(engine, "k")
    assert deliveries.deliver(task, key="k").state == "FAILURE"
    expected = ("effect_mismatch", None) if was == "step" else ("effect_unknown", "effect_mismatch")
    assert (code(record("k")), provider.keys) == (expected, calls)
