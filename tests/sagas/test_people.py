"""What people change of sagas: once, with an audit row, and never so that something is undone twice."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from idempotency import DidNotHappen, EffectUnknown, Happened, IdempotentTask, OperationId, PermanentError
from idempotency.application import runtime_of
from idempotency.errors import ChangeRefused, DiscardRefused, InvalidResult, OperationNotFound, ReplayRefused
from idempotency.operate import discard
from idempotency.operate import saga as operate
from idempotency.operate.archive import archive
from idempotency.operate.cancel import cancel
from idempotency.operate.change import Change, Shown, read
from idempotency.operate.people import Person
from idempotency.operate.replay import NotConfirmed, replay, to_confirm
from idempotency.operate.resolve import resolve_effect, resolve_effect_of_saga
from idempotency.sagas import observe, saga
from idempotency.store import saga_steps
from idempotency.upkeep import maintenance
from tests.sagas.application import enter, entering
from tests.sagas.conftest import Stage
from tests.support.operations import deaths
from tests.support.operators import ANN, act


def id_of(task: Any, key: str = "r1") -> OperationId:
    return OperationId("default", task.name, key)


def audited(stage: Stage) -> list[tuple[str, str, str]]:
    """Who did what to which operation, in order."""
    with stage.engine.connect() as connection:
        rows = connection.execute(text("SELECT actor, action, task FROM idempotency.audit ORDER BY id"))
        return [(row.actor, row.action, row.task) for row in rows]


def letter_of(stage: Stage, task: Any, key: str | None = None) -> int:
    """The only open dead letter of a task, or of one of its operations."""
    with stage.engine.connect() as connection:
        query = text("""SELECT id FROM idempotency.dead_letters
                        WHERE task = :task AND status = 'open' AND key = coalesce(:key, key)""")
        return int(connection.execute(query, {"task": task.name, "key": key}).scalar_one())


def shown(stage: Stage, id: OperationId) -> Shown:
    with runtime_of(stage.app).autocommit() as connection:
        return read(connection, id, runtime_of(stage.app).settings.service)


@pytest.fixture
def things(stage: Stage) -> tuple[Any, Any]:
    return entering(stage, "make"), entering(stage, "void")


@pytest.fixture
def waiting(stage: Stage, things: tuple[Any, Any]) -> Any:
    """A saga that makes a thing, waits five days for two events, and returns what they said."""
    make, void = things

    @saga("waiting", key="{id}", events={"picked": "{id}", "checked": "{id}"}, app=stage.app)
    def waiting(saga: Any, id: str) -> Any:
        saga.call(make, thing=id, undo=void)
        events = [saga.wait_for(type, match=id, timeout=timedelta(days=5)) for type in ("picked", "checked")]
        return [event and (event["data"], event.get("person")) for event in events]

    return waiting


@pytest.fixture
def stuck(stage: Stage, things: tuple[Any, Any]) -> Any:
    """A saga of three calls, of which the third fails, and the undo of the second; `void.refuses` says for how long."""
    make, void = things
    make.refuses.add("bad")
    void.refuses.add("b")

    @saga("stuck", key="{id}", app=stage.app)
    def stuck(saga: Any, id: str) -> Any:
        for thing in ("a", "b", "bad"):
            saga.call(make, thing=thing, undo=void)

    stuck.make, stuck.void = make, void
    return stuck


# ---------------------------------------------------------------- cancel


def test_a_cancelled_saga_is_undone_and_fails_as_cancelled(stage: Stage, waiting: Any) -> None:
    handle = stage.enqueue(waiting, "r1")
    stage.run()
    operate.cancel_saga(stage.app, id_of(waiting), ANN)
    stage.run()
    assert (handle.status(), stage.saga("r1").status) == ("failed", "FAILED")
    assert stage.accounts() == ["make:r1", "void:r1"]
    assert stage.letters() == [("waiting", "cancelled", "open")]
    assert audited(stage) == [("ann", "saga_cancel", "waiting")]


def test_a_saga_that_has_not_begun_is_cancelled_without_having_run(stage: Stage, waiting: Any) -> None:
    handle = stage.enqueue(waiting, "r1")
    operate.cancel_saga(stage.app, id_of(waiting), ANN)
    stage.run()
    assert (handle.status(), stage.saga("r1").status, stage.accounts()) == ("failed", "FAILED", [])


def test_a_saga_that_runs_records_nothing_more_and_is_undone(stage: Stage) -> None:
    @stage.app.task(base=IdempotentTask, bind=True, name="leave", shared=False)
    def leave(self: IdempotentTask, account: str) -> str:
        return enter(self.session, f"leave {account}")

    @saga("running", key="{id}", app=stage.app)
    def running(saga: Any, id: str) -> Any:
        saga.step("first", enter, "first", undo=leave)
        operate.cancel_saga(stage.app, id_of(running, id), ANN)
        saga.step("second", enter, "second", undo=leave)

    handle = stage.enqueue(running, "r1")
    stage.run()
    assert (handle.status(), stage.accounts()) == ("failed", ["first", "leave first"])


@pytest.mark.long
@pytest.mark.parametrize("has_begun", [True, False])
def test_a_replayed_saga_that_has_not_begun_is_cancelled(stage: Stage, has_begun: bool) -> None:
    refused = [has_begun]

    def ship(session: Any) -> None:
        if refused.pop():
            raise PermanentError("no address", "no_address")
        enter(session, "ship")

    @saga("late", key="{id}", app=stage.app)
    def late(saga: Any, id: str) -> Any:
        saga.step("ship", ship)

    handle = stage.enqueue(late, "r1")
    if has_begun:
        stage.run()
    else:
        stage.message_dies("late")
    assert handle.status() == "failed"
    refused[:] = [False]
    stage.replay("late")
    operate.cancel_saga(stage.app, id_of(late), ANN)
    stage.run()
    assert (handle.status(), stage.saga("r1").status, stage.accounts()) == ("failed", "FAILED", [])


@pytest.mark.long
def test_what_has_ended_or_is_being_undone_is_not_cancelled(stage: Stage, stuck: Any, waiting: Any) -> None:
    stage.enqueue(stuck, "r1")
    stage.run()
    with pytest.raises(ChangeRefused, match="stuck r1: is being undone already, because of no_make"):
        operate.cancel_saga(stage.app, id_of(stuck), ANN)
    stuck.void.refuses.clear()
    operate.retry_saga(stage.app, id_of(stuck), ANN)
    stage.run()
    before = audited(stage)
    with pytest.raises(ChangeRefused, match="stuck r1: has failed; there is nothing left to cancel"):
        operate.cancel_saga(stage.app, id_of(stuck), ANN)
    with pytest.raises(OperationNotFound):
        operate.cancel_saga(stage.app, id_of(waiting, "nothing"), ANN)
    assert audited(stage) == before


def test_what_an_observer_notes_is_for_reading_only(stage: Stage) -> None:
    with runtime_of(stage.app).engine.begin() as connection:
        observe(connection, "order_placement", "o1", "paid", {"amount": 1}, app=stage.app)
    id = OperationId("default", "order_placement", "o1")
    with pytest.raises(OperationNotFound):
        operate.cancel_saga(stage.app, id, ANN)
    with pytest.raises(OperationNotFound):
        operate.signal_saga(stage.app, id, "picked", {}, ANN, match="o1")
    assert stage.saga("o1").status == "RUNNING"


def test_the_command_for_operations_does_not_cancel_a_saga(stage: Stage, waiting: Any) -> None:
    stage.enqueue(waiting, "r1")
    for _ in range(2):  # before it has begun, and after
        with pytest.raises(ChangeRefused, match="is a saga, which has to be undone first: idempotency saga cancel"):
            cancel(stage.app, shown(stage, id_of(waiting)), ANN)
        stage.run()
    assert stage.saga("r1").status == "RUNNING"


def test_a_change_repeated_under_its_request_is_made_once(stage: Stage, waiting: Any) -> None:
    stage.enqueue(waiting, "r1")
    stage.run()
    once = replace(ANN, request_id="once")
    first = operate.signal_saga(stage.app, id_of(waiting), "picked", {"n": 1}, once)
    assert operate.signal_saga(stage.app, id_of(waiting), "picked", {"n": 1}, once) == first
    with pytest.raises(ChangeRefused, match="used before"):
        operate.signal_saga(stage.app, id_of(waiting), "picked", {"n": 2}, once)
    stage.run()
    for _ in range(2):
        operate.cancel_saga(stage.app, id_of(waiting), replace(ANN, request_id="cancel"))
    assert [action for _, action, _ in audited(stage)] == ["saga_signal", "saga_cancel"]


# ---------------------------------------------------------------- signal


@pytest.mark.long
def test_a_signal_ends_the_wait_of_its_saga_and_of_no_other(stage: Stage, waiting: Any) -> None:
    @saga("other", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def other(saga: Any, id: str) -> Any:
        return saga.wait_for("picked", match=id, timeout=timedelta(days=5))

    handle, elsewhere = stage.enqueue(waiting, "r1"), stage.enqueue(other, "r1")
    stage.run()
    given = operate.signal_saga(stage.app, id_of(waiting), "picked", {"n": 1}, ANN)
    assert (given.match, given.is_awaited) == ("id=r1", True)
    stage.run()
    stage.publish("checked", {"id": "r1", "n": 2})
    stage.run()
    assert handle.result() == [[{"n": 1}, "ann"], [{"id": "r1", "n": 2}, None]]
    assert elsewhere.status() == "released"
    assert audited(stage) == [("ann", "saga_signal", "waiting")]


def test_a_signal_may_be_sent_ahead_of_its_wait(stage: Stage, waiting: Any) -> None:
    handle = stage.enqueue(waiting, "r1")
    stage.run()
    given = operate.signal_saga(stage.app, id_of(waiting), "checked", None, ANN, match="r1")
    assert not given.is_awaited
    assert stage.run() == []
    stage.publish("picked", {"id": "r1"})
    stage.run()
    assert handle.result() == [[{"id": "r1"}, None], [None, "ann"]]


def test_an_event_that_a_saga_does_not_wait_for_is_refused(stage: Stage, waiting: Any) -> None:
    stage.enqueue(waiting, "r1")
    with pytest.raises(ChangeRefused, match="has not begun"):
        operate.signal_saga(stage.app, id_of(waiting), "picked", {}, ANN)
    stage.run()
    for event_type, match, why in [
        ("checked", None, "waiting r1: waits for picked; send checked ahead with --match"),
        ("lost", None, "never waits for lost; its code names: checked, picked"),
        ("lost", "r1", "never waits for lost; its code names: checked, picked"),
    ]:
        with pytest.raises(ChangeRefused, match=why):
            operate.signal_saga(stage.app, id_of(waiting), event_type, {}, ANN, match=match)
    operate.cancel_saga(stage.app, id_of(waiting), ANN)
    with pytest.raises(ChangeRefused, match="is COMPENSATING; it waits for no event"):
        operate.signal_saga(stage.app, id_of(waiting), "picked", {}, ANN)
    with stage.engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM idempotency.saga_events")).scalar_one() == 0


def test_a_signal_that_comes_as_the_wait_ends_is_refused(
    stage: Stage, waiting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.enqueue(waiting, "r1")
    stage.run()
    keep_event = saga_steps.keep_event

    def time_out_first(*args: Any, **options: Any) -> None:
        stage.pass_time(5 * 86400.0 + 1)
        stage.run()
        keep_event(*args, **options)

    monkeypatch.setattr(saga_steps, "keep_event", time_out_first)
    with pytest.raises(ChangeRefused, match="its wait for picked has ended at this moment; look again"):
        operate.signal_saga(stage.app, id_of(waiting), "picked", {}, ANN)
    assert audited(stage) == []
    assert stage.steps("r1")[1:] == [("wait", "picked", "timed_out"), ("wait", "checked", "begun")]


# ---------------------------------------------------------------- a saga that has stopped


def test_a_retry_replays_the_undo_that_has_failed(stage: Stage, stuck: Any) -> None:
    handle = stage.enqueue(stuck, "r1")
    stage.run()
    stuck.void.refuses.clear()
    retried = operate.retry_saga(stage.app, id_of(stuck), ANN)
    assert (len(retried.letters), retried.waits_for) == (1, ["undo make#2"])
    again = operate.retry_saga(stage.app, id_of(stuck), ANN)
    assert (again.letters, again.waits_for) == ({}, ["undo make#2"])
    stage.run()
    assert (handle.status(), stage.saga("r1").status) == ("failed", "FAILED")
    assert stage.accounts() == ["make:a", "make:b", "void:b", "void:a"]
    assert audited(stage) == [
        ("ann", "replay", "void"),
        ("ann", "saga_retry", "stuck"),
        ("ann", "saga_retry", "stuck"),
    ]


@pytest.mark.long
def test_an_undo_that_fails_again_keeps_the_saga_stopped(stage: Stage, stuck: Any) -> None:
    handle = stage.enqueue(stuck, "r1")
    stage.run()
    for _ in range(2):
        operate.retry_saga(stage.app, id_of(stuck), ANN)
        stage.run()
    assert (handle.status(), stage.saga("r1").status) == ("released", "COMPENSATING")
    stuck.void.refuses.clear()
    operate.retry_saga(stage.app, id_of(stuck), ANN)
    stage.run()
    assert (handle.status(), stage.accounts()) == ("failed", ["make:a", "make:b", "void:b", "void:a"])


@pytest.mark.long
def test_what_was_undone_by_hand_is_not_undone_again(stage: Stage, stuck: Any) -> None:
    handle = stage.enqueue(stuck, "r1")
    stage.run()
    letter = letter_of(stage, stuck.void)
    with pytest.raises(ChangeRefused, match="has nothing called 'make#3' to undo; it has: make, make#2"):
        operate.mark_undone(stage.app, id_of(stuck), "make#3", ANN)
    operate.mark_undone(stage.app, id_of(stuck), "make#2", ANN)
    stuck.void.refuses.clear()
    stage.run()
    with pytest.raises(ReplayRefused):
        replay(stage.app, letter, ANN)
    assert (handle.status(), stage.accounts()) == ("failed", ["make:a", "make:b", "void:a"])
    assert audited(stage) == [("ann", "saga_undone", "stuck")]
    with pytest.raises(ChangeRefused):
        operate.mark_undone(stage.app, id_of(stuck), "make#2", ANN)


@pytest.mark.long
def test_an_undo_whose_task_is_gone_can_be_made_by_hand(stage: Stage, stuck: Any) -> None:
    handle = stage.enqueue(stuck, "r1")
    void = stage.app.tasks.pop("void")
    stage.run()
    assert ("stuck", "compensation_failed", "open") in stage.letters()
    operate.mark_undone(stage.app, id_of(stuck), "make#2", ANN)
    stage.app.tasks["void"] = void
    stage.run()
    assert (handle.status(), stage.accounts()) == ("failed", ["make:a", "make:b", "void:a"])


def test_a_saga_whose_code_did_not_fit_goes_on_at_once(stage: Stage) -> None:
    make = entering(stage, "make")
    code = ["one"]

    @saga("changing", key="{id}", app=stage.app)
    def changing(saga: Any, id: str) -> Any:
        saga.step(code[0], enter, code[0])
        saga.sleep(timedelta(hours=1))
        return saga.call(make, thing=id)

    handle = stage.enqueue(changing, "r1")
    stage.run()
    with pytest.raises(ChangeRefused, match="is RUNNING and has not stopped"):
        operate.retry_saga(stage.app, id_of(changing), ANN)
    code[:] = ["two"]
    stage.pass_time(3601.0)
    stage.run()
    code[:] = ["one"]
    assert stage.run() == []
    replay(stage.app, letter_of(stage, changing), ANN)  # the same as a retry
    stage.run()
    assert (handle.result(), stage.accounts()) == ("make:r1", ["one", "make:r1"])
    assert stage.letters() == [("changing", "saga_mismatch", "replayed")]
    assert audited(stage) == [("ann", "replay", "changing")]


@pytest.mark.long
def test_a_letter_of_a_stopped_saga_replays_its_undo(stage: Stage, stuck: Any) -> None:
    handle = stage.enqueue(stuck, "r1")
    stage.run()
    stuck.void.refuses.clear()
    replay(stage.app, letter_of(stage, stuck), ANN)
    stage.run()
    assert (handle.status(), stage.accounts()) == ("failed", ["make:a", "make:b", "void:b", "void:a"])


def test_a_call_whose_failure_a_saga_has_used_is_not_replayed(stage: Stage, stuck: Any) -> None:
    stage.enqueue(stuck, "r1")
    stage.run()
    stuck.make.refuses.clear()
    with pytest.raises(ReplayRefused, match="the saga stuck r1 has called this and gone on from its failure"):
        replay(stage.app, letter_of(stage, stuck.make), ANN)
    assert stage.run() == []
    assert stage.accounts() == ["make:a", "make:b"]


def test_the_letter_of_a_stopped_saga_is_not_discarded(stage: Stage, stuck: Any) -> None:
    stage.enqueue(stuck, "r1")
    stage.run()
    ann, ben = Person("ann", "admin"), Person("ben", "admin")
    with pytest.raises(DiscardRefused, match="the saga stuck r1 has stopped; see to it by `saga retry`"):
        act(stage.app, discard.request, ann, letter_of(stage, stuck), "not needed")
    # nor if it stopped after it was asked for
    with stage.engine.connect() as connection:
        letter = {"letter": letter_of(stage, stuck)}
        asked = "INSERT INTO idempotency.discards (letter, requested_by, reason) VALUES (:letter, 'ann', 'not needed')"
        connection.execute(text(asked), letter)
    # and without waiting for it, when the saga is about to close it and holds its record
    going_on = stage.engine.execution_options(isolation_level="READ COMMITTED")
    with going_on.begin() as connection:
        connection.execute(text("SELECT FROM idempotency.dead_letters FOR UPDATE"))
        with pytest.raises(DiscardRefused, match="has stopped"):
            act(stage.app, discard.approve, ben, letter_of(stage, stuck))
    assert ("stuck", "compensation_failed", "open") in stage.letters()


def test_a_saga_whose_code_does_not_fit_can_be_cancelled(stage: Stage) -> None:
    leave = entering(stage, "leave")
    code = ["one"]

    @saga("misfit", key="{id}", app=stage.app)
    def misfit(saga: Any, id: str) -> Any:
        saga.call(leave, thing=code[0], undo=leave)
        saga.sleep(timedelta(hours=1))

    handle = stage.enqueue(misfit, "r1")
    stage.run()
    code[:] = ["two"]
    stage.pass_time(3601.0)
    stage.run()
    assert stage.letters() == [("misfit", "saga_mismatch", "open")]
    operate.cancel_saga(stage.app, id_of(misfit), ANN)
    stage.run()
    assert (handle.status(), stage.accounts()) == ("failed", ["leave:one", "leave:one"])
    assert stage.letters() == [("misfit", "saga_mismatch", "replayed"), ("misfit", "cancelled", "open")]


# ---------------------------------------------------------------- an effect of unknown outcome


@pytest.fixture
def charging(stage: Stage) -> Any:
    """A saga whose charge has no known outcome."""
    refund = entering(stage, "refund")

    def charge(thing: str, *, idempotency_key: str) -> str:
        raise EffectUnknown("no answer")

    @saga("charging", key="{id}", app=stage.app, max_attempts=1, effect_types={"charge": str})
    def charging(saga: Any, id: str) -> Any:
        saga.step("open", enter, f"open:{id}")
        saga.effect("charge", charge, thing=id, undo=refund)

    return charging


@pytest.mark.long
@pytest.mark.parametrize(("word", "undone"), [(Happened("ch_1"), ["refund:r1"]), (DidNotHappen(), [])])
def test_a_person_says_what_became_of_an_effect_and_the_saga_goes_on(
    stage: Stage, charging: Any, word: Happened | DidNotHappen, undone: list[str]
) -> None:
    handle = stage.enqueue(charging, "r1")
    stage.run()
    assert stage.letters() == [("charging", "effect_unknown", "open")]
    if isinstance(word, Happened):
        with pytest.raises(InvalidResult, match="result of 'charge'"):
            resolve_effect_of_saga(stage.app, id_of(charging), "charge", Happened(1), ANN)
    with pytest.raises(ChangeRefused, match="has no effect 'open' of unknown outcome; it has: charge"):
        resolve_effect_of_saga(stage.app, id_of(charging), "open", word, ANN)
    resolve_effect_of_saga(stage.app, id_of(charging), "charge", word, Change("ann", "asked them"))
    stage.run()
    assert (handle.status(), stage.accounts()) == ("failed", ["open:r1", *undone])
    # as for other operations: nothing but the unknown effect had ended it
    assert stage.letters() == [("charging", "effect_unknown", "replayed"), ("charging", "resolved", "open")]
    assert audited(stage) == [("ann", "resolve", "charging")]


def test_an_effect_that_may_still_be_on_its_way_is_not_resolved(stage: Stage) -> None:
    refund = entering(stage, "refund")

    def charge(thing: str, *, idempotency_key: str) -> str:
        operate.cancel_saga(stage.app, id_of(charging), ANN)
        with pytest.raises(ChangeRefused, match="is COMPENSATING and has not stopped"):
            resolve_effect_of_saga(stage.app, id_of(charging), "charge", DidNotHappen(), ANN)
        return "ch_1"

    @saga("charging", key="{id}", app=stage.app)
    def charging(saga: Any, id: str) -> Any:
        saga.effect("charge", charge, thing=id, undo=refund)

    handle = stage.enqueue(charging, "r1")
    stage.run()
    assert (handle.status(), stage.accounts()) == ("failed", ["refund:r1"])


@pytest.mark.long
@pytest.mark.parametrize("why", ["undo is gone", "undoing kills its processes"])
def test_a_saga_that_stops_for_another_reason_leaves_no_letter_of_the_first(
    stage: Stage, charging: Any, why: str
) -> None:
    handle = stage.enqueue(charging, "r1")
    stage.run()
    refund = stage.app.tasks.pop("refund")
    resolve_effect_of_saga(stage.app, id_of(charging), "charge", Happened("ch_1"), ANN)
    if why == "undo is gone":
        stage.run()
    else:
        deaths(stage.engine, "r1", 100)
        maintenance.recover(stage.app)
    assert stage.letters() == [("charging", "effect_unknown", "replayed"), ("charging", "compensation_failed", "open")]
    stage.app.tasks["refund"] = refund
    operate.retry_saga(stage.app, id_of(charging), ANN)
    stage.run()
    assert (handle.status(), stage.accounts()) == ("failed", ["open:r1", "refund:r1"])
    assert [status for _, _, status in stage.letters()] == ["replayed", "replayed", "open"]


@pytest.mark.parametrize("is_by_hand", [False, True])
def test_a_call_that_may_have_left_something_outside_is_seen_to_before_the_saga_ends(
    stage: Stage, is_by_hand: bool
) -> None:
    def charge(*, idempotency_key: str) -> None:
        raise EffectUnknown("no answer")

    @stage.app.task(base=IdempotentTask, bind=True, name="charge", max_attempts=1, shared=False)
    def charging(self: IdempotentTask) -> None:
        self.effect("charge", charge)

    @saga("calling", key="{id}", app=stage.app)
    def calling(saga: Any, id: str) -> Any:
        saga.call(charging)

    handle = stage.enqueue(calling, "r1")
    stage.run()
    assert (handle.status(), stage.letters()[-1]) == ("released", ("calling", "compensation_failed", "open"))
    if is_by_hand:
        operate.mark_undone(stage.app, id_of(calling), "charge", ANN)
    else:
        with stage.engine.connect() as connection:
            key = connection.execute(text("SELECT key FROM idempotency.records WHERE task = 'charge'")).scalar_one()
        resolve_effect(stage.app, shown(stage, id_of(charging, key)), "charge", DidNotHappen(), ANN, end=True)
    stage.run()
    assert (handle.status(), stage.saga("r1").status) == ("failed", "FAILED")


def test_a_signal_ahead_by_a_process_without_the_saga_is_refused(stage: Stage) -> None:
    @saga("waiting", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def waiting(saga: Any, id: str) -> Any:
        saga.sleep(60.0)
        return saga.wait_for("picked", match=id, timeout=timedelta(days=5)) is not None

    handle = stage.enqueue(waiting, "r1")
    stage.run()
    task = stage.app.tasks.pop("waiting")
    with pytest.raises(ChangeRefused, match="does not know the saga"):
        operate.signal_saga(stage.app, id_of(task), "picked", {}, ANN, match="r1")
    stage.app.tasks["waiting"] = task
    operate.signal_saga(stage.app, id_of(task), "picked", {}, ANN, match="r1")
    stage.pass_time(61.0)
    stage.run()
    assert handle.result() is True


def to_confirm_of(stage: Stage, letter: int) -> list[Any]:
    with runtime_of(stage.app).autocommit() as connection:
        return to_confirm(connection, [letter])


@pytest.mark.long
def test_the_letter_of_a_stopped_saga_asks_about_its_declined_undo(stage: Stage, stuck: Any) -> None:
    handle = stage.enqueue(stuck, "r1")
    stage.run()
    undo, of_saga = letter_of(stage, stuck.void), letter_of(stage, stuck)
    assert [each.was for each in to_confirm_of(stage, undo)] == ["declined"]
    with pytest.raises(NotConfirmed):
        replay(stage.app, undo, ANN, confirmed=())
    shown = to_confirm_of(stage, of_saga)
    assert [each.was for each in shown] == ["declined"]
    with pytest.raises(NotConfirmed):
        replay(stage.app, of_saga, ANN, confirmed=())
    stuck.void.refuses.clear()
    replay(stage.app, of_saga, ANN, confirmed=shown)
    stage.run()
    assert stage.accounts() == ["make:a", "make:b", "void:b", "void:a"]
    assert handle.status() == "failed"


@pytest.mark.long
def test_the_letter_of_an_undo_that_a_saga_needs_is_not_archived(stage: Stage, stuck: Any) -> None:
    stage.enqueue(stuck, "r1")
    stage.run()
    undo = letter_of(stage, stuck.void)
    for letter, why in ((undo, "cannot be undone without it"), (letter_of(stage, stuck), "has stopped")):
        with pytest.raises(ChangeRefused, match=why):
            archive(stage.app, letter, ANN)
    stuck.void.refuses.clear()
    replay(stage.app, undo, ANN)
    stage.run()
    assert stage.accounts() == ["make:a", "make:b", "void:b", "void:a"]
