"""What is concluded of a stop that is over, a publisher, an observer or a dead message; and what grows."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from idempotency import (
    Defer,
    DidNotHappen,
    EffectUnknown,
    Happened,
    IdempotentTask,
    OperationId,
    PermanentError,
    publish,
)
from idempotency.application import runtime_of
from idempotency.errors import ChangeRefused, OperationNotFound
from idempotency.operate import saga as operate
from idempotency.operate.cancel import cancel
from idempotency.operate.change import Change
from idempotency.operate.replay import replay
from idempotency.operate.resolve import resolve_effect, resolve_effect_of_saga
from idempotency.sagas import call, observe, saga
from idempotency.store import outbox
from idempotency.store.answers import error_text
from idempotency.upkeep import maintenance
from tests.sagas.application import enter, entering
from tests.sagas.conftest import Stage
from tests.sagas.test_people import id_of, letter_of, shown
from tests.support.commands import Run, runner
from tests.support.operators import ANN


def test_an_effect_that_is_being_asked_about_is_not_resolved_because_of_an_earlier_stop(stage: Stage) -> None:
    """Its code did not fit, a person cancelled it, and now it runs: what had stopped it says nothing any more."""
    void, mode, charged = entering(stage, "void"), ["lost"], []

    def charge(thing: str, *, idempotency_key: str) -> str:
        if mode[0] == "lost":
            raise RuntimeError("no answer")
        charged.append(idempotency_key)  # at the provider; its answer is on the way
        with contextlib.suppress(ChangeRefused):
            resolve_effect_of_saga(stage.app, id_of(parent), "charge", DidNotHappen(), ANN)
        return "ch_1"

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        if mode[0] == "other code":
            saga.step("other", enter, "other")
        saga.effect("charge", charge, "x", reconcile=asked, undo=void)

    def asked(thing: str, *, doubt: Any) -> Any:
        charge(thing, idempotency_key=doubt.idempotency_key) if mode[0] == "fits" else None
        return Happened("ch_1")

    handle = stage.enqueue(parent, "r1")
    stage.deliver()
    mode[0] = "other code"
    stage.pass_time(3600)
    stage.run()
    assert ("parent", "saga_mismatch", "open") in stage.letters()
    mode[0] = "fits"
    operate.cancel_saga(stage.app, id_of(parent), ANN)
    stage.run()
    for _ in range(5):
        stage.pass_time(3600)
        stage.run()
    assert (handle.status(), stage.accounts()) == ("failed", ["void:x"])


@pytest.mark.long
def test_the_purge_says_that_more_events_are_to_be_deleted(stage: Stage) -> None:
    """Otherwise it deletes 10,000 each time, and the table grows for ever where more come."""
    with stage.engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO idempotency.saga_events (tenant, service, event_type, match, event_id, event, signalled, received_at) "
                "SELECT 'default', 'bank', 'picked', 'id=r', n::text, '{}', true, now() - interval '90 days' FROM generate_series(1, 25000) n"
            )
        )
    for _ in range(5):
        if not maintenance.purge_once(stage.app, limit=1_000_000).more:
            break
    with stage.engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM idempotency.saga_events")).scalar_one() == 0


@pytest.mark.long
@pytest.mark.parametrize("status", ["COMPLETED", "RUNNING"])  # RUNNING: its end was never seen
def test_the_purge_says_that_more_observed_processes_are_to_be_deleted(stage: Stage, status: str) -> None:
    with stage.engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO idempotency.sagas (tenant, task, key, service, observed, entity_id, status, accepted_at, updated_at) "
                "SELECT 'default', 'placing', n::text, 'bank', true, n::text, :status, 'infinity', now() - interval '900 days' "
                "FROM generate_series(1, 2500) n"
            ),
            {"status": status},
        )
    for _ in range(5):
        if not maintenance.purge_once(stage.app, limit=1_000_000).more:
            break
    with stage.engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM idempotency.sagas")).scalar_one() == 0


def waiting_of(stage: Stage) -> Any:
    @saga("waiting", key="{id}", events={"picked": "{order}", "packed": "{order}"}, app=stage.app)
    def waiting(saga: Any, id: str, order: str) -> Any:
        first = saga.wait_for("packed", match=order, timeout=timedelta(days=5))
        second = saga.wait_for("picked", match=order, timeout=timedelta(days=5))
        return [first is not None, second is not None]

    return waiting


def test_a_signal_ahead_that_is_repeated_under_its_request_is_made_once(stage: Stage) -> None:
    waiting = waiting_of(stage)
    stage.enqueue(waiting, "r1", "o1")
    stage.run()
    once = Change("ann", "the driver rang", "request-1")
    first = operate.signal_saga(stage.app, id_of(waiting), "picked", {}, once, match="o1")
    again = operate.signal_saga(stage.app, id_of(waiting), "picked", {}, once, match="o1")
    assert first == again


def test_one_saga_that_cannot_be_woken_does_not_stop_the_publisher_nor_the_others(stage: Stage) -> None:
    waiting = waiting_of(stage)
    stage.enqueue(waiting, "bad", "o1"), stage.enqueue(waiting, "good", "o1")
    stage.run()
    with stage.engine.begin() as connection:
        connection.execute(
            text("ALTER TABLE idempotency.sagas ADD CONSTRAINT bad CHECK (key <> 'bad' OR signals = 0) NOT VALID")
        )
    try:
        stage.publish("packed", {"order": "o1"})
        for _ in range(2):
            maintenance.recover(stage.app)
            stage.run()
        assert [state for kind, name, state in stage.steps("good")] == ["done", "begun"]
    finally:
        with stage.engine.begin() as connection:
            connection.execute(text("ALTER TABLE idempotency.sagas DROP CONSTRAINT bad"))


def test_a_call_whose_undo_of_steps_failed_keeps_its_letter(stage: Stage) -> None:
    """As `unfinished` by a broken undo and a broken on_failed: what it has left is on nobody's list."""
    charged = []

    def charge(*, idempotency_key: str) -> str:
        charged.append(idempotency_key)
        return "ch_1"

    def broken(session: Any, operation: Any, error: Any) -> None:
        raise ValueError("a defect")

    @stage.app.task(base=IdempotentTask, bind=True, name="charging", key=None, shared=False, on_failed=broken)
    def charging(self: IdempotentTask) -> None:
        self.effect("charge", charge)
        raise PermanentError("no", "no")

    stage.goes_on_without(charging)
    assert [status for task, _, status in stage.letters() if task == "charging"] == ["open"]


def test_a_saga_that_is_found_by_its_key_is_the_one_that_was_accepted(stage: Stage) -> None:
    """An observer has noted something under the same key (the order's id, say)."""
    waiting = waiting_of(stage)
    with runtime_of(stage.app).engine.begin() as connection:
        observe(connection, "placing", "r1", "seen", None, status="RUNNING", app=stage.app)
    stage.enqueue(waiting, "r1", "o1")
    with runtime_of(stage.app).autocommit() as connection:
        assert operate.find(stage.app, connection, "r1") == id_of(waiting)


@pytest.mark.parametrize("begun", [True, False])
def test_an_observed_operation_can_be_cancelled(stage: Stage, begun: bool) -> None:
    @stage.app.task(base=IdempotentTask, bind=True, name="placing", key="{id}", shared=False)
    def placing(self: IdempotentTask, id: str) -> None:
        raise Defer(3600.0, "later")

    with runtime_of(stage.app).engine.begin() as connection:
        observe(connection, "placing", "r1", "seen", None, status="RUNNING", app=stage.app)
    handle = stage.enqueue(placing, "r1")
    if begun:
        stage.run()
    cancel(stage.app, shown(stage, id_of(placing)), ANN)
    assert handle.status() == "failed"


def test_a_call_in_doubt_that_is_found_before_the_saga_has_used_it_counts(stage: Stage) -> None:
    """Its gather waits for another call yet, so nothing has gone on from its failure."""

    def unknown(*, idempotency_key: str) -> str:
        raise EffectUnknown("no answer")

    @stage.app.task(
        base=IdempotentTask, bind=True, name="charging", key=None, shared=False, effect_types={"charge": str}
    )
    def charging(self: IdempotentTask) -> str:
        self.effect("charge", unknown)
        return enter(self.session, "posted")

    make, void = entering(stage, "make"), entering(stage, "void")

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        saga.gather(call(charging), call(make, thing="a", undo=void))

    handle = stage.enqueue(parent, "r1")
    stage.deliver()
    with stage.engine.begin() as connection:
        later = "UPDATE idempotency.outbox SET available_at = now() + interval '1 hour' WHERE task = 'make'"
        connection.execute(text(later))
    stage.run()
    with stage.engine.connect() as connection:
        key = connection.execute(text("SELECT key FROM idempotency.records WHERE task = 'charging'")).scalar_one()
    resolve_effect(stage.app, shown(stage, id_of(charging, key)), "charge", Happened("ch_1"), ANN)
    replay(stage.app, letter_of(stage, charging), ANN)
    stage.run()
    assert stage.accounts() == ["posted"]
    stage.pass_time(3601)
    stage.run()
    assert (handle.status(), stage.accounts()) == ("completed", ["posted", "make:a"])


def test_an_external_event_that_cannot_be_published_is_no_operation_to_cancel(stage: Stage) -> None:

    with runtime_of(stage.app).engine.begin() as connection:
        publish(connection, "order.paid", {"a": 1}, exchange="events", app=stage.app)
    with stage.engine.begin() as connection:
        reserve = "UPDATE idempotency.outbox SET relayed_until = now() + interval '1 minute' RETURNING *"
        row = connection.execute(text(reserve)).one()
        outbox.give_up(connection, row, error_text("unpublishable", "no such exchange"), service="bank")
    with pytest.raises((ChangeRefused, OperationNotFound)):
        cancel(stage.app, shown(stage, OperationId(row.tenant, row.task, row.key)), ANN, without_task=True)


@pytest.fixture
def run(stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(monkeypatch, capsys)


def test_the_effect_of_an_observed_operation_is_resolved_by_command(stage: Stage, run: Run) -> None:
    def unknown(*, idempotency_key: str) -> str:
        raise EffectUnknown("no answer")

    @stage.app.task(base=IdempotentTask, bind=True, name="placing", key="{id}", shared=False)
    def placing(self: IdempotentTask, id: str) -> None:
        self.effect("charge", unknown)

    with runtime_of(stage.app).engine.begin() as connection:
        observe(connection, "placing", "r1", "seen", None, status="RUNNING", app=stage.app)
    stage.enqueue(placing, "r1")
    stage.run()
    answer = run("effects", "resolve", "r1", "charge", "--not-happened", "--reason", "asked", "--task", "placing")
    assert (answer.status, answer.error) == (0, "")


def test_a_called_saga_whose_first_message_has_died_is_ended_by_what_the_refusal_names(stage: Stage) -> None:
    """`discard` says: replay the letter, or cancel the operation first."""
    void = entering(stage, "void")

    @saga("child", key=None, app=stage.app)
    def child(saga: Any, id: str) -> Any:
        saga.sleep(60.0)

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        saga.step("open", enter, "open", undo=void)
        saga.call(child, id)

    handle = stage.enqueue(parent, "r1")
    stage.deliver()
    operate.cancel_saga(stage.app, id_of(parent), ANN)
    with stage.engine.connect() as connection:
        slower = "UPDATE idempotency.outbox SET available_at = now() + interval '5 seconds' WHERE task = 'child'"
        connection.execute(text(slower))
    stage.deliver()
    stage.message_dies("child")
    with stage.engine.connect() as connection:
        key = connection.execute(text("SELECT key FROM idempotency.outbox WHERE task = 'child'")).scalar_one()
    try:
        cancel(stage.app, shown(stage, id_of(child, key)), ANN)
    except ChangeRefused:
        operate.cancel_saga(stage.app, id_of(child, key), ANN)
    stage.run()
    assert (handle.status(), stage.accounts()) == ("failed", ["open", "void:open"])


def test_a_dead_message_of_a_waiting_saga_whose_time_is_over_is_replayed_at_once(stage: Stage) -> None:
    @saga("waiting", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def waiting(saga: Any, id: str) -> Any:
        return saga.wait_for("picked", match=id, timeout=60.0) is not None

    handle = stage.enqueue(waiting, "r1")
    stage.run()
    stage.pass_time(61.0)
    stage.message_dies("waiting")
    replay(stage.app, letter_of(stage, waiting), ANN)
    stage.publish("picked", {"id": "r1"})
    stage.run()
    assert handle.result() is True
    assert [status for *_, status in stage.letters()] == ["replayed"]
