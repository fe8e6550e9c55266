"""What a person finds of calls in doubt, what a replay may do then, and what else a cancel, a deploy or one bad row leave behind."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text

from idempotency import Defer, DidNotHappen, EffectUnknown, Happened, IdempotentTask, PermanentError
from idempotency.application import runtime_of
from idempotency.errors import CallFailed, ChangeRefused, ReplayRefused
from idempotency.operate import saga as operate
from idempotency.operate.cancel import cancel
from idempotency.operate.replay import replay
from idempotency.operate.resolve import resolve_effect
from idempotency.sagas import call, observe, saga
from idempotency.store import forgetting, outbox
from idempotency.store.answers import error_text
from idempotency.upkeep import maintenance
from tests.sagas.application import enter, entering
from tests.sagas.conftest import Stage
from tests.sagas.test_letters import is_unpublishable
from tests.sagas.test_people import id_of, letter_of, shown
from tests.support.operators import ANN


def unknown(*, idempotency_key: str) -> str:
    raise EffectUnknown("no answer")


def key_of(stage: Stage, task: str) -> str:
    with stage.engine.connect() as connection:
        return str(
            connection.execute(text("SELECT key FROM idempotency.records WHERE task = :t"), {"t": task}).scalar_one()
        )


def charging_of(stage: Stage, **options: Any) -> Any:
    @stage.app.task(
        base=IdempotentTask, bind=True, name="charging", key=None, shared=False, effect_types={"charge": str}, **options
    )
    def charging(self: IdempotentTask) -> None:
        self.effect("charge", unknown)
        enter(self.session, "posted")

    return charging


def test_the_letter_of_a_call_in_doubt_stays_open_though_its_on_failed_is_broken(stage: Stage) -> None:
    def broken(session: Any, operation: Any, error: Any) -> None:
        raise ValueError("a defect")

    charging = charging_of(stage, on_failed=broken)

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        try:
            saga.call(charging)
        except CallFailed:
            saga.step("instead", enter, "instead")

    handle = stage.enqueue(parent, "r1")
    stage.run()
    assert handle.status() == "completed"
    assert [status for task, _, status in stage.letters() if task == "charging"] == ["open"]


@pytest.mark.long
@pytest.mark.parametrize("how", ["end", "replay"])
def test_a_failure_that_the_code_has_caught_stays_what_it_was_for_the_code(stage: Stage, how: str) -> None:
    """A person sees to the call in doubt while its saga, which has gone on from it, waits for something else."""

    @stage.app.task(
        base=IdempotentTask, bind=True, name="charging", key=None, shared=False, effect_types={"charge": str}
    )
    def charging(self: IdempotentTask) -> None:
        self.effect("charge", unknown)
        raise PermanentError("the account is closed", "closed")

    @saga("parent", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        try:
            saga.call(charging)
        except CallFailed as failed:
            if failed.code == "effect_unknown":
                saga.step("open a case", enter, "case")
            else:
                saga.step("instead", enter, "instead")
        saga.wait_for("picked", match=id, timeout=timedelta(days=5))

    handle = stage.enqueue(parent, "r1")
    stage.run()
    assert stage.accounts() == ["case"]
    id = id_of(charging, key_of(stage, "charging"))
    if how == "end":
        resolve_effect(stage.app, shown(stage, id), "charge", DidNotHappen(), ANN, end=True)
    else:
        resolve_effect(stage.app, shown(stage, id), "charge", Happened("ch_1"), ANN)
        replay(stage.app, letter_of(stage, charging), ANN)
    stage.run()
    assert [reason for task, reason, status in stage.letters() if task == "parent"] == []
    stage.publish("picked", {"id": "r1"})
    stage.run()
    assert (handle.status(), stage.accounts()) == ("completed", ["case"])


def test_a_call_in_doubt_is_not_finished_behind_a_saga_that_is_being_undone(stage: Stage) -> None:
    """It has stopped for exactly this call, and would be undone without it."""
    charging = charging_of(stage)

    @stage.app.task(base=IdempotentTask, bind=True, name="uncharge", key=None, shared=False)
    def uncharge(self: IdempotentTask) -> None:
        enter(self.session, "uncharged")

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        saga.call(charging, undo=uncharge)

    handle = stage.enqueue(parent, "r1")
    stage.run()
    assert stage.letters() == [("charging", "effect_unknown", "open"), ("parent", "compensation_failed", "open")]
    id = id_of(charging, key_of(stage, "charging"))
    resolve_effect(stage.app, shown(stage, id), "charge", Happened("ch_1"), ANN)
    replay(stage.app, letter_of(stage, charging), ANN)
    stage.run()
    assert (handle.status(), stage.accounts()) == ("failed", ["posted", "uncharged"])


@pytest.mark.long
def test_what_was_undone_by_hand_is_not_finished_by_a_replay(stage: Stage) -> None:
    charging = charging_of(stage)

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        saga.call(charging)

    handle = stage.enqueue(parent, "r1")
    stage.run()
    letter = letter_of(stage, charging)
    operate.mark_undone(stage.app, id_of(parent), "charging", ANN)
    stage.run()
    assert handle.status() == "failed"
    id = id_of(charging, key_of(stage, "charging"))
    resolve_effect(stage.app, shown(stage, id), "charge", Happened("ch_1"), ANN)
    with pytest.raises(ReplayRefused):
        replay(stage.app, letter, ANN)


def test_a_replay_of_a_call_that_happened_calls_nothing_new(stage: Stage) -> None:
    """docs/states.md: the replay then calls nothing, and finishes the task's own books."""
    shipped = []

    def ship(*, idempotency_key: str) -> str:
        shipped.append(idempotency_key)
        return "s"

    @stage.app.task(
        base=IdempotentTask, bind=True, name="charging", key=None, shared=False, effect_types={"charge": str}
    )
    def charging(self: IdempotentTask) -> None:
        self.effect("charge", unknown)
        self.effect("ship", ship)

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        try:
            saga.call(charging)
        except CallFailed:
            saga.step("instead", enter, "instead")

    stage.enqueue(parent, "r1")
    stage.run()
    id = id_of(charging, key_of(stage, "charging"))
    resolve_effect(stage.app, shown(stage, id), "charge", Happened("ch_1"), ANN)
    replay(stage.app, letter_of(stage, charging), ANN)
    stage.run()
    assert shipped == []


@pytest.mark.long
def test_a_called_saga_whose_unfinished_call_was_undone_by_hand_is_undone(stage: Stage) -> None:
    """All that is left of it is undone, so its caller is not stopped for it again."""
    charged = []

    def charge(*, idempotency_key: str) -> str:
        charged.append(idempotency_key)
        return "ch_1"

    @stage.app.task(base=IdempotentTask, bind=True, name="charging", key=None, shared=False)
    def charging(self: IdempotentTask) -> None:
        self.effect("charge", charge)
        raise PermanentError("no", "no")

    @saga("child", key=None, app=stage.app)
    def child(saga: Any) -> Any:
        saga.call(charging)

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        saga.call(child)

    handle = stage.enqueue(parent, "r1")
    stage.run()
    child_key = stage.saga_of("child").key
    assert ("child", "compensation_failed", "open") in stage.letters()
    operate.mark_undone(stage.app, id_of(child, child_key), "charging", ANN)
    stage.run()
    assert stage.saga_of("child").status == "FAILED"
    assert [letter for letter in stage.letters() if letter[0] == "parent" and letter[1] == "compensation_failed"] == []
    assert handle.status() == "failed"


def test_a_cancel_is_heeded_by_an_attempt_that_defers(stage: Stage) -> None:
    void = entering(stage, "void")

    def too_early(session: Any) -> None:
        operate.cancel_saga(stage.app, id_of(parent), ANN)  # a person, while this runs
        raise Defer(86_000.0, "tomorrow")

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        saga.step("one", enter, "one", undo=void)
        saga.step("two", too_early)

    handle = stage.enqueue(parent, "r1")
    stage.run()
    assert (handle.status(), stage.accounts()) == ("failed", ["one", "void:one"])


def test_an_event_is_kept_as_long_as_its_own_application_says(stage: Stage) -> None:
    """Of two applications of a database, the other keeps events for a day, this one for thirty."""

    @saga("waiting", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def waiting(saga: Any, id: str) -> Any:
        return saga.wait_for("picked", match=id, timeout=timedelta(days=5)) is not None

    handle = stage.enqueue(waiting, "r1")  # its queue is long: it begins later
    stage.publish("picked", {"id": "r1"})
    with stage.engine.begin() as connection:
        for statement in (
            "UPDATE idempotency.saga_events SET received_at = received_at - interval '2 days'",
            "UPDATE idempotency.outbox SET created_at = created_at - interval '2 days'",
        ):
            connection.execute(text(statement))
        # what the other application's relay does
        forgetting.events(connection, "other", retention=86400.0, limit=1000)
    stage.run()
    assert handle.status() == "completed"


def test_an_undo_that_was_cancelled_unpublished_and_replayed_leaves_no_letter(stage: Stage) -> None:
    void = entering(stage, "void")

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        saga.step("one", enter, "one", undo=void)
        raise PermanentError("no", "no")

    handle = stage.enqueue(parent, "r1")
    for _ in range(2):
        stage.deliver()
    id = is_unpublishable(stage, void)
    cancel(stage.app, shown(stage, id), ANN)
    stage.run()
    operate.retry_saga(stage.app, id_of(parent), ANN)
    stage.run()
    assert (handle.status(), stage.accounts()) == ("failed", ["one", "void:one"])
    assert [letter for letter in stage.letters() if letter[2] == "open"] == [("parent", "no", "open")]


def test_a_replayed_saga_whose_message_cannot_be_published_can_be_ended(stage: Stage) -> None:
    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        raise PermanentError("no", "no")

    handle = stage.enqueue(parent, "r1")
    stage.run()
    replay(stage.app, letter_of(stage, parent), ANN)
    refused = []
    for _ in range(2):
        unpublishable(stage, parent)
        for command in (
            lambda stage: cancel(stage.app, shown(stage, id_of(parent)), ANN),
            lambda stage: operate.cancel_saga(stage.app, id_of(parent), ANN),
        ):
            try:
                command(stage)
            except ChangeRefused as error:
                refused.append(str(error))
    unpublishable(stage, parent)
    assert handle.status() == "failed", "\n".join(refused)


def unpublishable(stage: Stage, task: Any) -> None:
    """The broker takes no message of a task any more."""
    reserve = """UPDATE idempotency.outbox SET relayed_until = now() + interval '1 minute'
                 WHERE task = :task AND status = 'pending' RETURNING *"""
    with stage.engine.begin() as connection:
        for row in connection.execute(text(reserve), {"task": task.name}).all():
            outbox.give_up(connection, row, error_text("unpublishable", "too large"), service="bank")


def test_a_saga_that_has_not_begun_is_cancelled_though_it_was_observed(stage: Stage) -> None:
    @saga("waiting", key="{id}", app=stage.app)
    def waiting(saga: Any, id: str) -> Any:
        saga.step("one", enter, "one")

    stage.app.tasks.pop("waiting")
    with runtime_of(stage.app).engine.begin() as connection:
        observe(connection, "waiting", "r1", "seen", None, status="RUNNING", app=stage.app)
    stage.app.tasks["waiting"] = waiting
    handle = stage.enqueue(waiting, "r1")
    operate.cancel_saga(stage.app, id_of(waiting), ANN)
    stage.run()
    assert (handle.status(), stage.accounts()) == ("failed", [])


@pytest.mark.long
def test_a_saga_is_undone_though_a_deploy_has_changed_its_arguments(stage: Stage) -> None:
    """docs/operating.md: or cancel it; undoing needs no code of the saga."""
    void = entering(stage, "void")

    @saga("parent", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        saga.step("one", enter, "one", undo=void)
        saga.wait_for("picked", match=id, timeout=timedelta(days=5))

    handle = stage.enqueue(parent, "r1")
    stage.run()
    stage.app.tasks.pop("parent")

    @saga("parent", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def parent_now(saga: Any, id: str, reason: str) -> Any: ...

    operate.cancel_saga(stage.app, id_of(parent), ANN)
    stage.run()
    assert (handle.status(), stage.accounts()) == ("failed", ["one", "void:one"])


def test_an_observer_does_not_fail_by_an_operation_that_took_its_name(stage: Stage) -> None:
    """It noted the process first; of the other application's saga it knows nothing."""

    @saga("placing", key="{id}", app=stage.app)
    def placing(saga: Any, id: str) -> Any:
        saga.sleep(60.0)

    stage.app.tasks.pop("placing")
    for step in ("a", "b"):
        with runtime_of(stage.app).engine.begin() as connection:
            observe(connection, "placing", "r1", step, None, status="RUNNING", app=stage.app)
        if step == "a":
            stage.app.tasks["placing"] = placing
            stage.enqueue(placing, "r1")
            stage.run()
            stage.app.tasks.pop("placing")


def test_a_task_that_was_cancelled_unpublished_leaves_one_letter(stage: Stage) -> None:
    make = entering(stage, "make")
    stage.enqueue(make, "a", idempotency_key="k1")
    id = is_unpublishable(stage, make)
    cancel(stage.app, shown(stage, id), ANN)
    assert [reason for _, reason, status in stage.letters() if status == "open"] == ["cancelled"]


@pytest.mark.long
def test_what_one_saga_cannot_be_woken_for_keeps_no_other_asleep(stage: Stage) -> None:
    """Many events of one saga that Postgres refuses to wake, and then one of another saga."""

    @saga("waiting", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def waiting(saga: Any, id: str) -> Any:
        return saga.wait_for("picked", match=id, timeout=timedelta(days=5)) is not None

    _, good = stage.enqueue(waiting, "bad"), stage.enqueue(waiting, "good")
    stage.run()
    with stage.engine.begin() as connection:
        connection.execute(
            text("ALTER TABLE idempotency.sagas ADD CONSTRAINT bad CHECK (key <> 'bad' OR signals = 0) NOT VALID")
        )
    events = """INSERT INTO idempotency.saga_events (tenant, service, event_type, match, event_id, event)
                SELECT 'default', 'bank', 'picked', :match, n::text, '{}' FROM generate_series(1, :number) n"""
    for match, number in (("id=bad", 10_000), ("id=good", 1)):
        with stage.engine.connect().execution_options(isolation_level="REPEATABLE READ") as connection:
            connection.execute(text(events), {"match": match, "number": number})
            connection.commit()
    try:
        for _ in range(3):
            maintenance.recover(stage.app)
        stage.run()
        assert good.status() == "completed"
    finally:
        with stage.engine.begin() as connection:
            connection.execute(text("ALTER TABLE idempotency.sagas DROP CONSTRAINT bad"))


@pytest.mark.long
@pytest.mark.parametrize("caught", [True, False])
def test_a_person_resolves_a_failed_call_while_the_others_of_a_gather_run(stage: Stage, caught: bool) -> None:
    @stage.app.task(base=IdempotentTask, bind=True, name="charging", key=None, shared=False)
    def charging(self: IdempotentTask) -> None:
        self.effect("charge", unknown)

    make = entering(stage, "make")

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        try:
            saga.gather(call(charging), call(make, thing="a"))
        except CallFailed as failed:
            if not caught:
                raise
            saga.step("said", enter, failed.code)

    handle = stage.enqueue(parent, "r1")
    stage.deliver()
    with stage.engine.connect() as connection:
        connection.execute(
            text("UPDATE idempotency.outbox SET available_at = now() + interval '1 hour' WHERE task = 'make'")
        )
        connection.commit()
    stage.run()
    with stage.engine.connect() as connection:
        key = connection.execute(text("SELECT key FROM idempotency.records WHERE task = 'charging'")).scalar_one()
    resolve_effect(stage.app, shown(stage, id_of(charging, key)), "charge", DidNotHappen(), ANN, end=True)
    stage.pass_time(3600)
    stage.run()
    assert handle.status() == ("completed" if caught else "failed")
