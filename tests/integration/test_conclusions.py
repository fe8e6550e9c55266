"""What an end may conclude after a doubt, a refusal, a takeover or a person's command."""

from __future__ import annotations

import json
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.orm import Session
from typing_extensions import TypedDict

from idempotency import (
    Defer,
    DidNotHappen,
    EffectOutcome,
    EffectUnknown,
    Happened,
    OperationFailed,
    OperationId,
    PermanentError,
    StillUnknown,
    StoredRefusal,
    Unfinished,
)
from idempotency.errors import InvalidResult, OutcomeInDoubt
from idempotency.operate import operators
from idempotency.operate.operators import Change, ChangeRefused
from idempotency.store import records
from idempotency.upkeep import maintenance
from idempotency.wire.message import Message
from idempotency.worker import waiting
from tests.support import operations as op
from tests.support.bank import record_failure
from tests.support.deliveries import Deliveries, deliver_row
from tests.support.operations import Entries, Record, code, deaths, make_due
from tests.support.operators import ANN, shown
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


def unwrite_broken(session: Session, account: str) -> None:
    unwrite(session, account)
    raise ValueError("a bug")


# ---------------------------------------------------------------- an ending belongs to its attempt


@pytest.mark.parametrize("unheard", [0, 3], ids=["answered", "the answer to its claim is lost"])
def test_an_ending_does_not_outlive_its_attempt(
    bank: Celery,
    deliveries: Deliveries,
    engine: Engine,
    record: Record,
    entries: Entries,
    monkeypatch: pytest.MonkeyPatch,
    unheard: int,
) -> None:
    """The first attempt pauses before its step; the second one reserves, and is released after an error."""
    runs, claims = [], []
    claim = records.claim

    def lose_answer(*args: Any, **options: Any) -> records.Answer:
        claims.append(claim(*args, **options))
        if len(claims) == unheard:
            raise OperationalError("the answer was lost", None, Exception())
        return claims[-1]

    monkeypatch.setattr(records, "claim", lose_answer)
    monkeypatch.setattr(waiting, "FIRST_PAUSE", 0.0)

    def reserve(session: Session) -> str:
        if session.execute(text("SELECT count(*) FROM entries WHERE account = 'reserved'")).scalar_one():
            raise PermanentError("nothing left to reserve", "exceeds_captured")
        return write(session, "reserved")

    def body(self: Any) -> str:
        runs.append(record("k").attempts)
        if len(runs) == 1:
            with engine.connect() as connection:
                connection.execute(
                    text("UPDATE idempotency.records SET locked_until = clock_timestamp() - interval '1s'")
                )
            assert deliveries.deliver(task, key="k", origin="recover").state == "RETRY"
            make_due(engine, "k")
        self.step("reserve", reserve)
        if len(runs) == 2:
            raise ValueError("after the step")
        return "paid out"

    task = make_task(bank, body, on_failed=record_failure)
    outcome = deliveries.deliver(task, key="k")
    assert (outcome.value, runs) == ("paid out", [1, 2, 3])
    assert (record("k").status, entries("reserved")) == ("completed", 1)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT * FROM failures")).all() == []


def test_an_ending_whose_commit_was_in_doubt_is_applied_without_the_body(
    bank: Celery, deliveries: Deliveries, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    fail, tries = records.fail, []

    def fail_once(*args: Any, **options: Any) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise OutcomeInDoubt("the answer was lost")
        fail(*args, **options)

    def body(self: Any) -> None:
        runs.append(1)
        raise PermanentError("no", "refused")

    monkeypatch.setattr(records, "fail", fail_once)
    deliveries.deliver(make_task(bank, body, on_failed=on_failed), key="k")
    assert (len(runs), len(tries), record("k").attempts, code(record("k"))) == (1, 2, 1, ("refused", None))


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


def test_the_provider_is_asked_before_a_permanent_error_ends_an_open_effect(
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


def test_a_cancel_over_an_open_effect_is_refused_unless_told_that_it_may_have_happened(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record
) -> None:
    task = make_task(bank, lambda self: self.effect("call", Provider(lost())), on_failed=on_failed)
    deliveries.deliver(task, key="k")
    shown = operators.read(connection, OperationId("default", task.name, "k"))
    with pytest.raises(ChangeRefused, match="effect call has happened or may have"):
        operators.cancel(bank, shown, ANN)
    assert (record("k").status, told) == ("released", [])
    assert isinstance(operators.cancel(bank, shown, ANN, may_have_happened=True), EffectUnknown)
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
    dead = records.Dead(id, row.fingerprint, [], sent.event_id, 1, row.message, row.queue)
    answer = records.give_up(
        connection,
        dead,
        end=records.FailedEnd("rejected", op.ERROR),
        retention=60.0,
        lease=60.0,
    )
    assert isinstance(answer, records.GivenUp)
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
    assert records.begin_effect(connection, held, "call", {"kind": "effect", "state": state}) is not None
    with pytest.raises(IntegrityError, match=constraint):
        records.fail(connection, held, op.FAILED, retention=60.0, lease=60.0)
    records.fail(connection, held, records.FailedEnd("effect_unknown", op.ERROR), retention=60.0, lease=60.0)


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
    operators.replay(bank, letter.id, ANN)
    assert deliver_row(deliveries, task, op.outbox(connection)[-1]).value == {"charge": "ch_1"}
    assert (entries("reserved"), len(set(provider.keys))) == (1, 2)


# ---------------------------------------------------------------- undo


def test_undos_run_in_reverse_order_in_the_failing_transaction(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record, entries: Entries
) -> None:
    refuse = [True]

    def body(self: Any) -> str:
        for name in ("zeta", "beta", "alpha"):
            self.step(name, write, name, undo=unwrite)
        self.step("kept", write, "kept")
        if refuse:
            raise PermanentError("no", "refused")
        return "done"

    task = make_task(bank, body, on_failed=on_failed)
    deliveries.deliver(task, key="k")
    order = connection.execute(text("SELECT account FROM entries WHERE account LIKE 'undone%' ORDER BY id")).scalars()
    assert list(order) == ["undone alpha", "undone beta", "undone zeta"]
    assert (entries("alpha"), entries("kept")) == (0, 1)
    assert set(record("k").effects) == {"kept"}
    assert set(told[0][1].steps) == {"zeta", "beta", "alpha", "kept"}
    # what the end has undone, a replay does again; what it has not, it skips
    refuse.clear()
    (letter,) = op.dead_letters(connection)
    operators.replay(bank, letter.id, ANN)
    assert deliver_row(deliveries, task, op.outbox(connection)[-1]).value == "done"
    assert [entries(name) for name in ("zeta", "beta", "alpha", "kept")] == [1, 1, 1, 1]


def test_a_broken_undo_undoes_nothing_and_leaves_the_end_to_a_person(
    bank: Celery, deliveries: Deliveries, record: Record, entries: Entries
) -> None:
    def body(self: Any) -> None:
        self.step("one", write, "one", undo=unwrite_broken)
        self.step("two", write, "two", undo=unwrite)
        raise PermanentError("no", "refused")

    deliveries.deliver(make_task(bank, body, on_failed=on_failed), key="k")
    assert code(record("k")) == ("unfinished", "refused")
    assert (entries("one"), entries("two"), entries("undone two")) == (1, 1, 0)
    assert (set(record("k").effects), told_codes()) == ({"one", "two"}, ["unfinished"])


def test_no_undo_runs_while_an_effect_is_unknown(
    bank: Celery, deliveries: Deliveries, record: Record, entries: Entries
) -> None:
    def body(self: Any) -> None:
        self.step("reserve", write, "reserved", undo=unwrite)
        try:
            self.effect("call", Provider(lost()))
        except ConnectionError:
            raise PermanentError("gave up", "gave_up") from None

    deliveries.deliver(make_task(bank, body), key="k")
    assert (code(record("k")), entries("reserved")) == (("effect_unknown", "gave_up"), 1)


def test_an_undo_that_no_other_process_could_find_is_refused(
    bank: Celery, deliveries: Deliveries, record: Record, entries: Entries
) -> None:
    task = make_task(bank, lambda self: self.step("reserve", write, "reserved", undo=lambda session, result: None))
    deliveries.deliver(task, key="k")
    assert "undo: must be a function that can be imported by its name" in record("k").error
    assert entries("reserved") == 0


# ---------------------------------------------------------------- a refusal of a repeated call


def test_a_refused_repeat_is_no_proof_about_the_first_call(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record
) -> None:
    provider = Provider(lost(), PermanentError("this API key was revoked", "key_revoked"))
    task = make_task(bank, lambda self: self.effect("call", provider), on_failed=on_failed)
    deliveries.deliver(task, key="k")
    make_due(engine, "k")
    assert isinstance(deliveries.deliver(task, key="k").value, EffectUnknown)
    assert (code(record("k"))[0], record("k").effects["call"]["state"]) == ("effect_unknown", "begun")


def test_a_refusal_that_the_provider_keeps_under_the_key_is_one(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record
) -> None:
    provider = Provider(lost(), StoredRefusal("the card was declined", "card_declined"))
    task = make_task(bank, lambda self: self.effect("call", provider))
    deliveries.deliver(task, key="k")
    make_due(engine, "k")
    deliveries.deliver(task, key="k")
    assert (code(record("k")), record("k").effects["call"]["state"]) == (("card_declined", None), "not_happened")


def test_after_a_refused_repeat_the_provider_is_asked(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record
) -> None:
    provider = Provider(lost(), PermanentError("a parameter is invalid by now", "invalid"))
    answers: list[Any] = [Happened("found"), StillUnknown()]
    task = make_task(bank, lambda self: self.effect("call", provider, reconcile=lambda doubt: answers.pop()))
    deliveries.deliver(task, key="k")
    make_due(engine, "k")
    assert deliveries.deliver(task, key="k").value == "found"


# ---------------------------------------------------------------- eager calls


def test_an_eager_attempts_record_can_be_delivered_to_a_worker(bank: Celery, engine: Engine, record: Record) -> None:
    def body(self: Any) -> None:
        raise Defer(10, "not yet")

    task = make_task(bank, body)
    with pytest.raises(Defer):
        task.apply(idempotency_key="k").get()
    queue = bank.conf.task_default_queue
    assert Message.from_text(record("k").message).destination(bank) == (queue, queue)
    with engine.connect() as connection:
        (row,) = op.outbox(connection)  # the deferral is delivered, should the caller not come back
    assert Message.from_text(row.message).destination(bank) == (queue, queue)


# ---------------------------------------------------------------- a person's word


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
        operators.resolve_effect(bank, shown(connection, unknown), "call", Happened({"id": 1}), ANN)
    assert record("k").effects["call"]["state"] == "begun"
    operators.resolve_effect(bank, shown(connection, unknown), "call", Happened({"charge": "ch_2"}), ANN)
    assert record("k").effects["call"]["state"] == "done"


def test_a_persons_word_can_be_corrected(bank: Celery, connection: Connection, unknown: Any, record: Record) -> None:
    operators.resolve_effect(bank, shown(connection, unknown), "call", DidNotHappen(), ANN)
    operators.resolve_effect(bank, shown(connection, unknown), "call", Happened({"charge": "ch_2"}), ANN)
    assert record("k").effects["call"]["state"] == "done"


def test_a_persons_word_with_end_undoes_what_the_end_had_to_leave(
    bank: Celery, connection: Connection, unknown: Any, record: Record, entries: Entries
) -> None:
    assert entries("reserved") == 1
    operators.resolve_effect(bank, shown(connection, unknown), "call", DidNotHappen(), ANN, end=True)
    assert (code(record("k")), entries("reserved")) == (("gave_up", None), 0)
    assert told_codes() == ["effect_unknown", "gave_up"]
    # corrected afterwards: it has happened after all, so the plain end does not stand
    operators.resolve_effect(bank, shown(connection, unknown), "call", Happened({"charge": "ch_2"}), ANN)
    assert code(record("k"))[0] == "unfinished"


def test_an_end_after_a_refused_repeat_is_told_as_the_refusal(
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
    operators.resolve_effect(bank, shown(connection, task), "call", DidNotHappen(), ANN, end=True)
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
    operators.resolve_effect(bank, shown(connection, task), "call", DidNotHappen(), ANN, end=True)
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
    operators.resolve_effect(bank, shown(connection, task), "call", Happened({"charge": "ch_1"}), ANN, end=True)
    assert (code(record("k")), entries("reversed ch_1")) == (("gave_up", None), 1)
    with pytest.raises(ChangeRefused, match="effect 'call' is compensated"):
        operators.resolve_effect(bank, shown(connection, task), "call", DidNotHappen(), ANN)
    assert record("k").effects["call"]["state"] == "compensated"


def test_a_word_on_what_was_shown_before_another_word_is_refused(
    bank: Celery, connection: Connection, unknown: Any
) -> None:
    seen = shown(connection, unknown)
    operators.resolve_effect(bank, seen, "call", DidNotHappen(), ANN)
    with pytest.raises(ChangeRefused, match="look again"):
        operators.resolve_effect(bank, seen, "call", Happened({"charge": "ch_2"}), ANN)


def test_a_repeated_request_changes_nothing_twice(
    bank: Celery, deliveries: Deliveries, connection: Connection, unknown: Any, record: Record
) -> None:
    seen = shown(connection, unknown)
    request = Change("ann", "ticket 42", "request-1")
    for _ in range(2):
        operators.resolve_effect(bank, seen, "call", DidNotHappen(), request)
    (letter,) = op.dead_letters(connection)
    again = Change("ann", "ticket 42", "request-2")
    assert operators.replay(bank, letter.id, again) == operators.replay(bank, letter.id, again)
    assert (record("k").generation, len(op.outbox(connection))) == (2, 1)
    waiting = shown(connection, unknown)
    for _ in range(2):
        operators.cancel(bank, waiting, Change("ann", "no", "request-3"))
    assert len(connection.execute(text("SELECT FROM idempotency.audit")).all()) == 3
    with pytest.raises(ChangeRefused, match="--request-id: was used before, to cancel"):
        operators.release(bank, waiting, Change("ann", "no", "request-3"))


def test_a_plain_end_is_told_to_duplicates_as_it_is(bank: Celery, deliveries: Deliveries, unknown: Any) -> None:
    outcome = deliveries.deliver(unknown, key="k")
    assert isinstance(outcome.value, OperationFailed)
    assert outcome.value.code == "effect_unknown"


def test_a_refusal_whose_text_holds_nul_is_recorded(bank: Celery, deliveries: Deliveries, record: Record) -> None:
    def refused(*, idempotency_key: str) -> None:
        raise PermanentError("no \0 such card", "no_card")

    deliveries.deliver(make_task(bank, lambda self: self.effect("call", refused)), key="k")
    assert (code(record("k")), record("k").effects["call"]["state"]) == (("no_card", None), "not_happened")
