"""Proofs of a breaker: what people and sweeps do to sagas. Each asserts the good outcome."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import kombu
import pytest
from sqlalchemy import text

from idempotency import EffectUnknown
from idempotency.application import runtime_of
from idempotency.attempt.effects import Happened
from idempotency.errors import DiscardRefused
from idempotency.letters import storing
from idempotency.operate import discard
from idempotency.operate import saga as operate
from idempotency.operate.people import Person
from idempotency.operate.replay import replay
from idempotency.operate.resolve import resolve_effect_of_saga
from idempotency.sagas import saga
from idempotency.store import outbox, saga_reading
from idempotency.upkeep import maintenance
from idempotency.wire.message import Message
from tests.sagas.application import enter, entering
from tests.sagas.conftest import Stage
from tests.sagas.test_people import id_of, letter_of
from tests.support.operators import ANN, act

_TAKE = text("""
UPDATE idempotency.outbox SET status = 'published', published_at = clock_timestamp()
WHERE id = (SELECT min(id) FROM idempotency.outbox WHERE status = 'pending' AND task = :task) RETURNING *
""")


def dies(stage: Stage, task: str) -> None:
    """No worker took the message of a task for longer than the grace: it is in the dead-letter queue."""
    with stage.engine.connect() as connection:
        row = connection.execute(_TAKE, {"task": task}).one()
    message = Message.from_text(row.message).marked(origin=row.origin, outbox_id=row.message_id)
    death = [{"queue": stage.app.conf.task_default_queue, "reason": "rejected"}]
    storing.store(
        stage.app,
        kombu.Message(
            body=message.body,
            headers={**message.headers, "x-death": death},
            content_type="application/json",
            content_encoding="utf-8",
            properties={},
            delivery_info={"exchange": "", "routing_key": ""},
            accept={"application/json"},
        ),
    )


@pytest.mark.parametrize("has_row", [True])
def test_a_call_that_is_given_up_does_not_leave_its_saga_waiting_unseen(stage: Stage, has_row: bool) -> None:
    """The message of a call could not be published; two people discard its letter. The saga has to hear of it, or they."""
    make, void = entering(stage, "make"), entering(stage, "void")

    @saga("parent", key="{id}", app=stage.app)
    def parent(saga: Any, id: str) -> Any:
        saga.call(make, thing="a", undo=void)
        saga.call(make, thing="b", undo=void)

    handle = stage.enqueue(parent, "r1")
    for _ in range(3):  # as far as the second call
        stage.deliver()
    with stage.engine.begin() as connection:
        row = connection.execute(
            text("SELECT * FROM idempotency.outbox WHERE status = 'pending' AND task = 'make'")
        ).one()
        connection.execute(
            text(
                "UPDATE idempotency.outbox SET status = 'pending', relayed_until = now() + interval '1 minute' WHERE id = :id"
            ),
            {"id": row.id},
        )
        outbox.give_up(connection, row, json.dumps({"code": "unpublishable", "message": "too large"}), service="bank")
    assert ("make", "unpublishable", "open") in stage.letters(), stage.letters()
    letter = letter_of(stage, make)
    try:
        act(stage.app, discard.request, Person("ann", "operator"), letter, "no longer wanted")
        act(stage.app, discard.approve, Person("bob", "admin"), letter)
    except DiscardRefused:
        return
    stage.run()
    with runtime_of(stage.app).autocommit() as connection:
        listed = saga_reading.list_sagas(connection, saga_reading.Filter("bank", stopped=True), limit=10)
    # undone, or failed, or at least listed as stopped
    assert handle.status() != "released" or listed, (stage.steps("r1"), stage.letters())


def test_a_person_may_discard_no_dead_message_of_a_called_saga_that_was_cancelled(stage: Stage) -> None:
    """The parent cancels its child before it begins; the child's message dies; its letter is discarded."""
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
    with stage.engine.begin() as connection:  # its workers are slower
        connection.execute(
            text("UPDATE idempotency.outbox SET available_at = now() + interval '5 seconds' WHERE task = 'child'")
        )
    stage.deliver()  # the parent waits for its child to end
    dies(stage, "child")
    letters = stage.letters()
    assert letters, "it was put back"
    letter = letter_of(stage, child)
    try:
        act(stage.app, discard.request, Person("ann", "operator"), letter, "gone")
        act(stage.app, discard.approve, Person("bob", "admin"), letter)
    except DiscardRefused:
        replay(stage.app, letter, ANN)
    stage.pass_time(60.0)
    stage.run()
    assert handle.status() == "failed", (stage.steps("r1"), stage.letters(), letters)
    assert stage.accounts() == ["open", "void:open"]


def test_a_resolved_effects_letter_is_closed_if_the_undoing_then_kills_its_processes(stage: Stage) -> None:
    refund = entering(stage, "refund")

    def charge(thing: str, *, idempotency_key: str) -> str:
        raise EffectUnknown("no answer")

    @saga("charging", key="{id}", app=stage.app, max_attempts=1)
    def charging(saga: Any, id: str) -> Any:
        saga.effect("charge", charge, thing=id, undo=refund)

    handle = stage.enqueue(charging, "r1")
    stage.run()
    resolve_effect_of_saga(stage.app, id_of(charging), "charge", Happened("ch_1"), ANN)
    with stage.engine.begin() as connection:
        connection.execute(
            text("""UPDATE idempotency.records SET status = 'started', token = 't', locked_by = 'a|b|c|1|1',
                    locked_until = clock_timestamp() - interval '1 second', available_at = NULL, attempts = 100
                    WHERE key = 'r1'""")
        )
    maintenance.recover(stage.app)
    operate.retry_saga(stage.app, id_of(charging), ANN)
    stage.run()
    assert (handle.status(), stage.accounts()) == ("failed", ["refund:r1"])
    assert [reason for _, reason, status in stage.letters() if status == "open"] == ["cancelled"], stage.letters()


def test_the_list_does_not_name_what_is_no_longer_waited_for(stage: Stage) -> None:
    @saga("waiting", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def waiting(saga: Any, id: str) -> Any:
        saga.wait_for("picked", match=id, timeout=timedelta(days=5))

    handle = stage.enqueue(waiting, "r1")
    stage.run()
    operate.cancel_saga(stage.app, id_of(waiting), ANN)
    stage.run()
    assert handle.status() == "failed"
    with runtime_of(stage.app).autocommit() as connection:
        listed = saga_reading.list_sagas(connection, saga_reading.Filter("bank", waits_for="picked"), limit=10)
    assert [row.status for row in listed] == []
