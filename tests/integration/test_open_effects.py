"""What an end may conclude over an effect that has happened or may have, and the last look at it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import IntegrityError

from idempotency import (
    DidNotHappen,
    EffectOutcome,
    EffectUnknown,
    Happened,
    NotSent,
    OperationId,
    PermanentError,
    StillUnknown,
    Undecided,
    Unfinished,
)
from idempotency.errors import ChangeRefused
from idempotency.operate.cancel import cancel
from idempotency.operate.change import read
from idempotency.operate.replay import replay
from idempotency.operate.resolve import resolve_effect
from idempotency.store import effects, ends, undelivered
from idempotency.store.ends import FailedEnd
from idempotency.store.undelivered import GivenUp, UndeliveredMessage
from idempotency.upkeep import maintenance
from tests.support import bank as b
from tests.support import operations as op
from tests.support.deliveries import Deliveries, deliver_row
from tests.support.operations import Entries, Record, code, deaths, make_due
from tests.support.operators import ANN, replay_and_deliver, shown
from tests.support.outside import OutsideWorld
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

# ---------------------------------------------------------------- an open effect


def test_attempts_used_up_over_an_open_effect_end_as_unknown(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record
) -> None:
    provider = Provider(lost(), lost(), lost(), lost())
    task = make_task(bank, lambda self: self.effect("call", provider), max_attempts=2, on_failed=on_failed)
    for _ in range(2):
        assert deliveries.deliver(task, key="k").state == "RETRY"
        make_due(engine, "k")
    assert isinstance(deliveries.deliver(task, key="k").value, EffectUnknown)
    assert code(record("k")) == ("effect_unknown", "attempts_exhausted")
    assert len(provider.keys) == 2  # the last look begins nothing and repeats nothing
    ((said, operation),) = told
    assert (said, operation.effects) == ("effect_unknown", {"call": EffectOutcome("unknown")})


@pytest.mark.parametrize("how", ["errors", "deaths", "revoked"])
def test_a_last_look_that_finds_the_effect_completes_the_operation(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record, entries: Entries, how: str
) -> None:
    provider = Provider(lost(), lost())
    asked = []

    def find(*, doubt: Any) -> Happened | StillUnknown:
        asked.append(doubt)
        return Happened({"charge": "found"}) if len(asked) > (1 if how == "errors" else 0) else StillUnknown()

    def body(self: Any) -> Any:
        charge = self.effect("call", provider, reconcile=find)
        write(self.session, "paid")
        return charge

    task = make_task(bank, body, max_attempts=2, on_failed=on_failed)
    deliveries.deliver(task, key="k")
    match how:
        case "errors":
            make_due(engine, "k")
            deliveries.deliver(task, key="k")
            make_due(engine, "k")
        case "deaths":
            deaths(engine, "k", 2)
        case "revoked":
            make_due(engine, "k")
            with engine.connect() as connection:
                connection.execute(text("UPDATE idempotency.records SET revoked_generation = generation"))
    assert deliveries.deliver(task, key="k", origin="recover").value == {"charge": "found"}
    assert (record("k").status, entries("paid"), told) == ("completed", 1, [])


def test_an_effect_that_happened_in_the_last_attempt_gets_a_last_look(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record, entries: Entries
) -> None:
    provider, failures = Provider(), [ValueError("a deadlock, say")]

    def body(self: Any) -> Any:
        charge = self.effect("call", provider)
        if failures:
            raise failures.pop()
        write(self.session, "paid")
        return charge

    task = make_task(bank, body, max_attempts=1, on_failed=on_failed)
    assert deliveries.deliver(task, key="k").state == "RETRY"
    make_due(engine, "k")
    assert deliveries.deliver(task, key="k").value == {"charge": "ch_1"}
    assert (record("k").status, entries("paid"), told, len(provider.keys)) == ("completed", 1, [], 1)


def test_a_last_look_that_learns_of_nothing_ends_plainly(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record
) -> None:
    provider = Provider(lost(), acts=False)
    answers: list[Any] = [DidNotHappen()]
    task = make_task(
        bank,
        lambda self: self.effect("call", provider, reconcile=lambda doubt: answers.pop()),
        max_attempts=1,
        on_failed=on_failed,
    )
    deliveries.deliver(task, key="k")
    make_due(engine, "k")
    deliveries.deliver(task, key="k")
    assert code(record("k")) == ("attempts_exhausted", None)
    assert (record("k").effects["call"]["state"], record("k").effects["call"]["number"]) == ("not_happened", 1)
    assert told_codes() == ["attempts_exhausted"]


def test_a_last_look_waits_for_a_search_that_lags(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record
) -> None:
    answers: list[Any] = [Happened("found"), StillUnknown(ask_again=30.0)]
    task = make_task(
        bank,
        lambda self: self.effect("call", Provider(lost()), reconcile=lambda doubt: answers.pop()),
        max_attempts=1,
    )
    deliveries.deliver(task, key="k")
    make_due(engine, "k")
    assert deliveries.deliver(task, key="k").state == "RETRY"
    assert record("k").status == "released"
    make_due(engine, "k")
    assert deliveries.deliver(task, key="k").value == "found"


def test_a_body_that_swallows_the_end_of_a_last_look_does_not_complete(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record
) -> None:
    answers: list[Any] = [DidNotHappen()]

    def body(self: Any) -> str:
        try:
            self.effect("call", Provider(lost()), reconcile=lambda doubt: answers.pop())
        except PermanentError:
            return "went on without"
        return "charged"

    task = make_task(bank, body, max_attempts=1)
    deliveries.deliver(task, key="k")
    make_due(engine, "k")
    deliveries.deliver(task, key="k")
    assert code(record("k")) == ("attempts_exhausted", None)


def test_a_last_look_happens_once_when_it_kills_its_process(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record
) -> None:
    runs = []

    def body(self: Any) -> None:
        runs.append(1)
        self.effect("call", Provider(lost()))

    task = make_task(bank, body, max_attempts=1)
    deliveries.deliver(task, key="k")
    deaths(engine, "k", 2, spent_at=2)
    assert isinstance(deliveries.deliver(task, key="k", origin="recover").value, EffectUnknown)
    assert len(runs) == 1


def test_a_permanent_error_over_an_open_effect_asks_the_provider_first(
    bank: Celery, deliveries: Deliveries, record: Record
) -> None:
    def body(self: Any) -> None:
        try:
            self.effect("call", Provider(lost()), reconcile=lambda doubt: Happened("found"))
        except ConnectionError:
            raise PermanentError("gave up", "gave_up") from None

    deliveries.deliver(make_task(bank, body, on_failed=on_failed), key="k")
    assert code(record("k")) == ("unfinished", "gave_up")
    assert told[0][1].effects == {"call": EffectOutcome("happened", "found")}


def test_a_cancel_over_an_open_effect_has_to_say_it_may_have_happened(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record
) -> None:
    task = make_task(bank, lambda self: self.effect("call", Provider(lost())), on_failed=on_failed)
    deliveries.deliver(task, key="k")
    shown = read(connection, OperationId("default", task.name, "k"), op.SERVICE)
    with pytest.raises(ChangeRefused, match="effect call has happened or may have"):
        cancel(bank, shown, ANN)
    assert (record("k").status, told) == ("released", [])
    assert isinstance(cancel(bank, shown, ANN, may_have_happened=True), EffectUnknown)
    assert code(record("k")) == ("effect_unknown", "cancelled")
    assert told_codes() == ["effect_unknown"]


def test_the_dead_letter_consumer_ends_an_open_effect_as_unknown(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record
) -> None:
    task = make_task(bank, lambda self: self.effect("call", Provider(lost())), on_failed=on_failed)
    deliveries.deliver(task, key="k")
    row = record("k")
    (sent,) = op.outbox(connection)  # its only delivery is the dead one
    connection.execute(text("UPDATE idempotency.outbox SET status = 'published', published_at = clock_timestamp()"))
    id = OperationId("default", task.name, "k")
    dead = UndeliveredMessage(id, op.SERVICE, row.fingerprint, [], sent.message_id, 1, row.message, row.queue)
    answer = undelivered.give_up(
        connection,
        dead,
        end=FailedEnd("rejected", op.ERROR),
        retention=60.0,
        lease=60.0,
    )
    assert isinstance(answer, GivenUp)
    assert record("k").error_code == "effect_unknown"
    assert answer.effects["call"]["state"] == "begun"


def test_the_sweep_ends_an_open_effect_as_unknown(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record
) -> None:
    task = make_task(bank, lambda self: self.effect("call", Provider(lost())))
    deliveries.deliver(task, key="k")
    deaths(engine, "k", 100, spent_at=6)
    assert maintenance.recover(bank) == 1
    assert record("k").error_code == "effect_unknown"


@pytest.mark.parametrize(
    ("state", "constraint"),
    [("begun", "failed_over_an_open_effect"), ("done", "failed_over_an_effect_that_happened")],
)
def test_no_statement_at_all_fails_an_operation_plainly_over_an_effect(
    bank: Celery, connection: Connection, state: str, constraint: str
) -> None:
    held = op.started(connection)
    assert effects.begin_effect(connection, held, "call", {"kind": "effect", "state": state}) is not None
    with pytest.raises(IntegrityError, match=constraint):
        ends.fail(connection, held, op.FAILED, retention=60.0, lease=60.0)
    ends.fail(connection, held, FailedEnd("effect_unknown", op.ERROR), retention=60.0, lease=60.0)


# ---------------------------------------------------------------- an effect that happened


def test_an_operation_that_cannot_finish_after_an_effect_is_unfinished(
    bank: Celery, deliveries: Deliveries, record: Record, entries: Entries
) -> None:
    def body(self: Any) -> None:
        self.step("reserve", write, "reserved", undo=unwrite)
        self.effect("call", Provider())
        raise PermanentError("the account is closed", "account_closed")

    assert isinstance(deliveries.deliver(make_task(bank, body, on_failed=on_failed), key="k").value, Unfinished)
    assert code(record("k")) == ("unfinished", "account_closed")
    assert "'call'" in json.loads(record("k").error)["message"]
    assert entries("reserved") == 1  # what the effect used stays used
    ((said, operation),) = told
    assert (said, operation.steps) == ("unfinished", {"reserve": "reserved"})
    assert operation.effects == {"call": EffectOutcome("happened", {"charge": "ch_1"})}


def test_an_undo_that_accepts_effects_answers_for_them(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record, entries: Entries
) -> None:
    provider = Provider()
    broken = [True]

    def body(self: Any) -> Any:
        self.step("reserve", write, "reserved", undo=unwrite_with_effects)
        charge = self.effect("call", provider)
        if broken:
            raise PermanentError("the account is closed", "account_closed")
        return charge

    task = make_task(bank, body, on_failed=on_failed)
    deliveries.deliver(task, key="k")
    assert code(record("k")) == ("account_closed", None)
    assert (entries("reserved"), entries("undone reserved"), entries("reversed ch_1")) == (0, 1, 1)
    assert record("k").effects["call"]["state"] == "compensated"
    # a replay does again what was undone: the step, and the effect under its next key
    broken.clear()
    (letter,) = op.dead_letters(connection)
    replay(bank, letter.id, ANN)
    assert deliver_row(deliveries, task, op.outbox(connection)[-1]).value == {"charge": "ch_1"}
    assert (entries("reserved"), len(set(provider.keys))) == (1, 2)


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
        assert replay_and_deliver(bank, connection, deliveries, task).value == {"charge": "ch_1"}
        assert len(set(provider.keys)) == 1  # repeated under the same key


# ---------------------------------------------------------------- a last look


def test_a_last_look_that_reaches_an_effect_not_begun_ends_as_unfinished(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record
) -> None:
    """A process died between two effects at its last attempt."""
    first, second = Provider(), Provider()
    runs: list[int] = []

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


def test_what_the_last_look_met_is_kept_and_to_wait_for_a_provider_is_no_error(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record
) -> None:
    """Whoever decides about the money has to see why the provider's answer could not be read."""
    provider = Provider(Undecided(60.0, "the bank decides"))

    def find(*, doubt: Any) -> Any:
        raise AttributeError("'Intent' object has no attribute 'message'")

    task = make_task(bank, lambda self: self.effect("call", provider, reconcile=find), max_attempts=2)
    deliveries.deliver(task, key="k")
    assert record("k").first_error is None
    for _ in range(3):
        make_due(engine, "k")
        deliveries.deliver(task, key="k", origin="retry")
    assert code(record("k")) == ("effect_unknown", "attempts_exhausted")
    assert "no result after 2 attempts; the last look met AttributeError: 'Intent' object" in record("k").error
    assert "AttributeError" in record("k").first_error


# ---------------------------------------------------------------- an effect passed over


@pytest.mark.parametrize("used_up", [False, True])
def test_an_operation_does_not_complete_over_a_call_that_it_passed_over(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record, used_up: bool
) -> None:
    """Attempt 1 called and the reply is lost; before attempt 2 the order is cancelled, so that its body returns early."""
    provider = Provider(lost())
    cancelled: list[Any] = []

    def body(self: Any) -> Any:
        if cancelled:
            return {"status": "cancelled, nothing charged"}
        return self.effect("call", provider, reconcile=lambda doubt: StillUnknown())

    task = make_task(bank, body, on_failed=on_failed, max_attempts=1 if used_up else 5)
    deliveries.deliver(task, key="k")
    cancelled.append(1)
    make_due(engine, "k")
    assert deliveries.deliver(task, key="k", origin="retry").state == "FAILURE"
    assert code(record("k")) == ("effect_unknown", "attempts_exhausted" if used_up else None)
    assert (told_codes(), len(op.dead_letters(connection))) == (["effect_unknown"], 1)
    resolve_effect(bank, shown(connection, task), "call", DidNotHappen(), ANN)
    assert replay_and_deliver(bank, connection, deliveries, task).value == {"status": "cancelled, nothing charged"}


# ---------------------------------------------------------------- effects that an attempt does not come to, or that were never called


def test_no_operation_completes_over_a_charge_that_its_body_passed_over(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record, outside: OutsideWorld
) -> None:
    """A deploy renames an effect between two attempts: it is called under another key, and a person is told of both."""
    names = iter(["capture", "charge"])

    def body(self: Any, account: str, url: str) -> Any:
        name = next(names)
        answer = self.effect(name, b.call, url)
        if name == "capture":
            raise ValueError("the commit failed")
        self.session.execute(b.INSERT, {"account": account, "amount": answer["amount"]})
        return answer

    task = make_task(bank, body, key="{account}", on_failed=b.record_failure)
    id = OperationId("default", task.name, "a1")
    deliveries.deliver(task, "a1", outside.url)
    op.age(connection, id, available_at=-1)
    assert deliveries.deliver(task, "a1", outside.url, origin="retry").state == "FAILURE"
    assert (record("a1").status, record("a1").error_code) == ("failed", "unfinished")
    assert {name: entry["state"] for name, entry in record("a1").effects.items()} == {
        "capture": "done",
        "charge": "done",
    }
    assert sorted(outside.acts.values()) == [1, 1]  # a name is part of the key: a deploy must keep it
    (letter,) = op.dead_letters(connection)
    assert (letter.reason, "'capture'" in letter.last_error) == ("unfinished", True)


def test_an_operation_that_denies_its_charge_is_unfinished(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record, outside: OutsideWorld
) -> None:
    """Attempt 1 charges and its commit fails; the order is cancelled; attempt 2 returns early."""
    cancelled: list[int] = []

    def body(self: Any, account: str, url: str) -> Any:
        if cancelled:
            return {"status": "cancelled, nothing charged"}
        self.effect("capture", b.call, url)
        raise ValueError("the commit failed")

    task = make_task(bank, body, key="{account}", on_failed=b.record_failure)
    deliveries.deliver(task, "a1", outside.url)
    cancelled.append(1)
    op.age(connection, OperationId("default", task.name, "a1"), available_at=-1)
    assert deliveries.deliver(task, "a1", outside.url, origin="retry").state == "FAILURE"
    assert (record("a1").error_code, record("a1").effects["capture"]["state"]) == ("unfinished", "done")
    assert sum(outside.acts.values()) == 1
    assert [letter.reason for letter in op.dead_letters(connection)] == ["unfinished"]


def test_a_call_that_was_never_made_leaves_nothing_unknown(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An open circuit: the effect is begun before its function can say that nothing was sent."""
    task, id = bank.tasks[b.transfer.name], OperationId("default", b.transfer.name, "a1")

    keys_used: list[str] = []

    def circuit_open(url: str, *, idempotency_key: str) -> Any:
        keys_used.append(idempotency_key)
        raise NotSent(5.0, "circuit open")

    monkeypatch.setattr(b, "call", circuit_open)
    deliveries.deliver(task, "a1", "http://127.0.0.1:1")
    op.age(connection, id, opened_at=-13 * 3600)
    for _ in range(10):
        if record("a1").status == "failed":
            break
        op.age(connection, id, available_at=-1)
        deliveries.deliver(task, "a1", "http://127.0.0.1:1", origin="retry")
    assert (record("a1").status, record("a1").error_code) == ("failed", "attempts_exhausted")
    assert connection.execute(text("SELECT code FROM failures")).scalars().all() == ["attempts_exhausted"]
    assert len(keys_used) > 1
    assert len(set(keys_used)) == 1  # nothing was sent under it
