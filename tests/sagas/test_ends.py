"""What else ends a saga, or may not: a cancel, a dead process, a dead message, the purge."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError

from idempotency import IdempotentTask, OperationFailed, PermanentError, publish
from idempotency.application import runtime_of
from idempotency.errors import CallFailed, InvalidArguments
from idempotency.sagas import compensation, observe, saga, undo
from idempotency.store import claims, saga_reading, sagas
from idempotency.store.answers import error_text
from idempotency.upkeep import maintenance
from idempotency.wire.keys import OperationId
from tests.sagas.application import enter, entering
from tests.sagas.conftest import Stage

CANCELLED = error_text("cancelled", "the customer has changed her mind")


def cancel(stage: Stage, task: str, key: str) -> bool:
    with runtime_of(stage.app).autocommit() as connection:
        return sagas.cancel(connection, OperationId("default", task, key), CANCELLED)


def waiting_saga(stage: Stage) -> Any:
    """A saga that has called a task, and waits for an event."""
    make, void = entering(stage, "make"), entering(stage, "void")

    @saga("waiting", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def waiting(saga: Any, id: str) -> Any:
        saga.call(make, thing=id, undo=void)
        saga.wait_for("picked", match=id, timeout=timedelta(days=5))
        saga.step("close", enter, f"close:{id}")

    return waiting


def test_a_cancelled_saga_is_undone(stage: Stage) -> None:
    handle = stage.enqueue(waiting_saga(stage), "r1")
    stage.run()
    assert cancel(stage, "waiting", "r1")
    assert not cancel(stage, "waiting", "r1")
    stage.run()
    assert (handle.status(), stage.saga("r1").status) == ("failed", "FAILED")
    assert stage.accounts() == ["make:r1", "void:r1"]
    assert stage.letters() == [("waiting", "cancelled", "open")]


def test_a_saga_that_is_cancelled_before_it_begins_does_nothing(stage: Stage) -> None:
    handle = stage.enqueue(waiting_saga(stage), "r1")
    assert cancel(stage, "waiting", "r1")
    stage.run()
    assert (handle.status(), stage.accounts()) == ("failed", [])


@pytest.mark.parametrize("is_late", [False, True])
def test_a_cancel_and_a_forward_step_have_one_order(stage: Stage, is_late: bool) -> None:
    void = entering(stage, "void")

    @saga("racing", key="{id}", app=stage.app)
    def racing(saga: Any, id: str) -> Any:
        saga.step("first", enter, f"first:{id}", undo=void)
        if not is_late:
            cancel(stage, "racing", id)
        saga.step("second", enter, f"second:{id}", undo=void)
        if is_late:
            cancel(stage, "racing", id)
        return "done"

    handle = stage.enqueue(racing, "r1")
    stage.run()
    assert handle.status() == "failed"
    second = ["second:r1"] if is_late else []
    undone = ["void:second:r1"] if is_late else []
    assert stage.accounts() == ["first:r1", *second, *undone, "void:first:r1"]


@pytest.mark.parametrize("has_reached", [True, False])
def test_a_saga_that_kills_every_process_is_undone_or_stops(stage: Stage, has_reached: bool) -> None:
    """It is undone if its code had come to all that is recorded. Otherwise it may be the code that is wrong."""
    handle = stage.enqueue(waiting_saga(stage), "r1")
    stage.run()
    with stage.engine.begin() as connection:
        connection.execute(
            text("""UPDATE idempotency.records SET status = 'started', token = 't', locked_by = 'a|b|c|1|1',
                    locked_until = clock_timestamp() - interval '1 second', available_at = NULL, attempts = 100
                    WHERE key = 'r1'""")
        )
        connection.execute(
            text("UPDATE idempotency.sagas SET reached = :reached"), {"reached": 2 if has_reached else 1}
        )
    assert maintenance.recover(stage.app) == 1
    stage.run()
    if has_reached:
        assert (handle.status(), stage.accounts()) == ("failed", ["make:r1", "void:r1"])
        assert stage.letters() == [("waiting", "attempts_exhausted", "open")]
        return
    assert (stage.saga("r1").status, stage.accounts()) == ("RUNNING", ["make:r1"])
    assert stage.letters() == [("waiting", "saga_mismatch", "open")]
    stage.pass_time(301.0)  # by then there is code that gets there
    stage.run()
    assert stage.letters() == [("waiting", "saga_mismatch", "replayed")]
    stage.publish("picked", {"id": "r1"})
    stage.run()
    assert handle.status() == "completed"


def test_nothing_but_its_own_code_ends_a_saga(stage: Stage) -> None:
    stage.enqueue(waiting_saga(stage), "r1")
    stage.run()
    with pytest.raises(IntegrityError, match="a saga that has not ended"), stage.engine.begin() as connection:
        connection.execute(
            text("""UPDATE idempotency.records SET status = 'failed', available_at = NULL, error = '{}', error_code = 'x',
                    completed_at = clock_timestamp(), expires_at = clock_timestamp() WHERE key = 'r1'""")
        )


@pytest.mark.long
def test_what_a_saga_has_called_outlives_it(stage: Stage) -> None:
    handle = stage.enqueue(waiting_saga(stage), "r1")
    stage.run()
    age = text("""UPDATE idempotency.records SET expires_at = clock_timestamp() - interval '1 day'
                  WHERE expires_at IS NOT NULL""")
    rows = text("UPDATE idempotency.outbox SET published_at = published_at - interval '30 days'")
    with stage.engine.begin() as connection:
        connection.execute(age)
        connection.execute(rows)
    assert maintenance.purge(stage.app) == 0
    stage.publish("picked", {"id": "r1"})
    stage.run()
    assert handle.status() == "completed"
    with stage.engine.begin() as connection:
        connection.execute(age)
        connection.execute(rows)
        connection.execute(text("UPDATE idempotency.records SET kept_until = NULL"))
    assert maintenance.purge(stage.app) == 2
    with stage.engine.connect() as connection:
        counted = connection.execute(text("SELECT count(*) FROM idempotency.saga_steps")).scalar_one()
    assert counted == 0


def test_an_observer_notes_each_step_once(stage: Stage) -> None:
    for step, status in (("placed", "RUNNING"), ("paid", "RUNNING"), ("placed", "RUNNING"), ("done", "COMPLETED")):
        with runtime_of(stage.app).engine.begin() as connection:
            observe(connection, "order_placement", "o1", step, {"step": step}, status=status, app=stage.app)
    row = stage.saga("o1")
    assert (row.status, row.current_step) == ("COMPLETED", "done")
    assert row.context == {step: {"step": step} for step in ("placed", "paid", "done")}
    assert [name for _, name, _ in stage.steps("o1")] == ["placed", "paid", "done"]


def test_an_observer_does_not_write_over_a_saga(stage: Stage) -> None:
    waiting_saga(stage)
    with runtime_of(stage.app).engine.begin() as connection, pytest.raises(InvalidArguments, match="is a saga"):
        observe(connection, "waiting", "r1", "seen", None, app=stage.app)


def test_an_event_of_a_publisher_with_an_old_snapshot_wakes_the_saga_at_the_next_recovery(stage: Stage) -> None:
    handle = stage.enqueue(waiting_saga(stage), "r1")
    with stage.engine.connect().execution_options(isolation_level="REPEATABLE READ") as publisher, publisher.begin():
        publisher.execute(text("SELECT 1 FROM idempotency.records"))
        stage.run()
        publish(publisher, "picked", {"id": "r1"}, app=stage.app)
    assert (stage.run(), handle.status()) == ([], "released")
    maintenance.recover(stage.app)
    stage.run()
    assert handle.status() == "completed"


@pytest.mark.long
def test_a_saga_that_cannot_be_woken_keeps_no_other_asleep_and_is_tried_again(stage: Stage) -> None:
    waiting = waiting_saga(stage)
    handles = {id: stage.enqueue(waiting, id) for id in ("bad", "good")}
    stage.run()
    with stage.engine.connect() as connection:
        connection.execute(
            text("""
            CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not this one'; END $$;
            CREATE TRIGGER refuse BEFORE UPDATE ON idempotency.outbox FOR EACH ROW
            WHEN (NEW.key = 'bad') EXECUTE FUNCTION refuse()""")
        )
    publisher = stage.engine.execution_options(isolation_level="REPEATABLE READ")
    for id in handles:
        with publisher.begin() as connection:
            publish(connection, "picked", {"id": id}, app=stage.app)
    maintenance.recover(stage.app)
    stage.run()
    assert [handles[id].status() for id in ("good", "bad")] == ["completed", "released"]
    with stage.engine.connect() as connection:
        assert connection.execute(text("SELECT sweep, key FROM idempotency.set_aside")).all() == [("signal", "bad")]
        connection.execute(text("DROP TRIGGER refuse ON idempotency.outbox; DROP FUNCTION refuse()"))
        connection.execute(text("UPDATE idempotency.set_aside SET until = now()"))
    maintenance.recover(stage.app)
    stage.run()
    assert handles["bad"].status() == "completed"


def test_an_undo_whose_own_argument_is_called_result_is_refused(stage: Stage) -> None:
    make = entering(stage, "make")

    @stage.app.task(base=IdempotentTask, bind=True, name="takes.result", shared=False)
    def takes_result(self: IdempotentTask, thing: str = "", result: Any = None) -> None: ...

    with pytest.raises(InvalidArguments, match="gets the result of what it undoes as 'result'"):
        undo.checked(takes_result, (), {"thing": "a", "result": "mine"})
    assert undo.checked(takes_result, (), {"thing": "a"}) is not None
    assert undo.checked(make, ("a",), {}) is not None


def test_a_task_that_replaces_itself_is_a_call_that_fails(stage: Stage) -> None:
    make = entering(stage, "make")

    @stage.app.task(base=IdempotentTask, bind=True, key="{thing}", name="replacing", shared=False)
    def replacing(self: IdempotentTask, thing: str) -> None:
        self.replace(make.s(thing).set(idempotency_key="another"))

    @saga("calls.it", key="{id}", app=stage.app)
    def calls_it(saga: Any, id: str) -> Any:
        return saga.call(replacing, thing=id)

    handle = stage.enqueue(calls_it, "r1")
    stage.run()
    with pytest.raises(OperationFailed, match="does not know when what replaces it ends"):
        handle.result()


@pytest.mark.long
def test_a_saga_whose_undoing_meets_an_outage_is_tried_again(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = stage.enqueue(waiting_saga(stage), "r1")
    stage.run()
    cancel(stage, "waiting", "r1")
    with monkeypatch.context() as broken:
        broken.setattr(compensation, "begin", lambda *_: (_ for _ in ()).throw(ConnectionError("away")))
        for _ in range(10):
            stage.run()
            stage.pass_time(60.0)
    assert stage.letters() == [("waiting", "compensation_failed", "open")]
    stage.pass_time(400.0)
    stage.run()
    assert (handle.status(), stage.accounts()) == ("failed", ["make:r1", "void:r1"])


def test_a_saga_that_is_replayed_and_has_not_begun_again_is_cancelled(stage: Stage) -> None:
    @saga("failing", key="{id}", app=stage.app)
    def failing(saga: Any, id: str) -> Any:
        if stage.saga(id).status == "RUNNING":
            raise PermanentError("no", "no")

    handle = stage.enqueue(failing, "r1")
    stage.run()
    stage.replay("failing")
    assert cancel(stage, "failing", "r1")
    assert not cancel(stage, "failing", "r1")
    stage.run()
    assert (handle.status(), stage.saga("r1").status) == ("failed", "FAILED")
    assert stage.letters()[-1] == ("failing", "cancelled", "open")


def test_a_saga_that_is_undone_waits_for_no_event_any_more(stage: Stage) -> None:
    stage.enqueue(waiting_saga(stage), "r1")
    stage.app.tasks["void"].refuses.add("r1")
    stage.run()
    cancel(stage, "waiting", "r1")
    stage.run()
    assert ("wait", "picked", "not_happened") in stage.steps("r1")
    stage.publish("picked", {"id": "r1"})
    assert (stage.run(), stage.saga("r1").status) == ([], "COMPENSATING")
    with stage.engine.connect() as connection:
        assert saga_reading.list_sagas(connection, saga_reading.Filter("bank", waits_for="picked"), limit=1) == []


@pytest.mark.long
def test_a_revoke_of_a_saga_that_waits_lets_it_go_on_now(stage: Stage) -> None:
    handle = stage.enqueue(waiting_saga(stage), "r1")
    stage.run()
    id = OperationId("default", "waiting", "r1")
    with stage.engine.connect() as connection:
        fingerprint = connection.execute(
            text("SELECT fingerprint FROM idempotency.records WHERE key = 'r1'")
        ).scalar_one()
    with runtime_of(stage.app).autocommit() as connection:
        service = runtime_of(stage.app).settings.service
        assert claims.revoke(connection, id, fingerprint, service=service, remembered=False)
    stage.run()
    assert (handle.status(), stage.accounts()) == ("failed", ["make:r1", "void:r1"])
    assert stage.letters() == [("waiting", "revoked", "open")]


@pytest.mark.long
def test_publishers_whose_constraints_are_checked_at_once_do_not_wait_for_each_other(stage: Stage) -> None:
    task = waiting_saga(stage)
    handles = [stage.enqueue(task, id) for id in ("a", "b")]
    stage.run()
    publishers = runtime_of(stage.app).engine
    with publishers.connect() as one, publishers.connect() as other:
        for connection in (one, other):
            connection.execute(text("SET CONSTRAINTS ALL IMMEDIATE"))
            connection.execute(text("SET LOCAL lock_timeout = '5s'"))
        publish(one, "picked", {"id": "a"}, app=stage.app)
        publish(other, "picked", {"id": "b"}, app=stage.app)
        publish(one, "picked", {"id": "b"}, app=stage.app)
        publish(other, "picked", {"id": "a"}, app=stage.app)
        one.commit()
        other.commit()
    maintenance.recover(stage.app)
    stage.run()
    assert [handle.status() for handle in handles] == ["completed", "completed"]


@pytest.mark.long
@pytest.mark.parametrize("is_caught", [True, False])
def test_the_letters_of_failed_calls_are_closed_when_the_saga_ends(stage: Stage, is_caught: bool) -> None:
    make = entering(stage, "make")
    make.refuses.add("r1")

    @saga("calling", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def calling(saga: Any, id: str) -> Any:
        try:
            saga.call(make, thing=id)
        except CallFailed:
            saga.wait_for("picked", match=id, timeout=timedelta(days=1))
            if not is_caught:
                raise

    handle = stage.enqueue(calling, "r1")
    stage.run()
    assert stage.letters() == [("make", "no_make", "open")]
    stage.publish("picked", {"id": "r1"})
    stage.run()
    assert handle.status() == ("completed" if is_caught else "failed")
    own = [] if is_caught else [("calling", "no_make", "open")]
    assert stage.letters() == [("make", "no_make", "discarded"), *own]
    with stage.engine.connect() as connection:
        used_by = connection.execute(text("SELECT used_by FROM idempotency.dead_letters WHERE task = 'make'"))
        assert used_by.scalar_one() == "calling r1"
