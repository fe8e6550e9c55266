"""Trouble that says nothing about a saga: it means another attempt, and a frozen process holds nothing for ever."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from idempotency import LeaseLost, PermanentError
from idempotency.application import runtime_of
from idempotency.sagas import saga
from idempotency.store import letters, saga_steps, sagas
from idempotency.store.record import idle_ms
from tests.sagas.application import enter, entering
from tests.sagas.conftest import Stage

TROUBLE: list[Exception] = [
    OperationalError("SELECT 1", None, Exception("the connection is lost")),
    PoolTimeout("no connection"),
    SoftTimeLimitExceeded(),
    LeaseLost("another attempt may hold it"),
]


def failing_once(error: Exception) -> Callable[[Any], str]:
    tried: list[int] = []

    def step(session: Any) -> str:
        tried.append(1)
        if len(tried) == 1:
            raise error
        return enter(session, "did it")

    return step


@pytest.mark.few(5)
@pytest.mark.parametrize("error", TROUBLE, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("how", ["replaced", "named as permanent", "both"])
def test_trouble_is_no_reason_to_undo_a_saga(stage: Stage, error: Exception, how: str) -> None:
    void, step = entering(stage, "void"), failing_once(error)
    permanent = () if how == "replaced" else (Exception,)

    @saga("troubled", key="{id}", app=stage.app, max_attempts=3, permanent_errors=permanent)
    def troubled(saga: Any, id: str) -> Any:
        saga.step("open", enter, "open", undo=void)
        try:
            return saga.step("try", step)
        except Exception as met:
            if how == "named as permanent":
                raise
            raise PermanentError("given up", "given_up") from met

    handle = stage.enqueue(troubled, "r1")
    for _ in range(4):
        stage.run()
        stage.pass_time(60.0)
    assert (handle.result(), stage.accounts(), stage.letters()) == ("did it", ["open", "did it"], [])


def test_an_error_named_as_permanent_is_a_refusal_that_the_code_may_catch(stage: Stage) -> None:
    ran: list[str] = []

    def refuse(session: Any) -> None:
        ran.append("refused")
        raise ValueError("not this")

    @saga("refusing", key="{id}", app=stage.app, permanent_errors=(ValueError,))
    def refusing(saga: Any, id: str) -> Any:
        try:
            saga.step("try", refuse)
        except PermanentError as refused:
            saga.sleep(60.0)
            return refused.code

    handle = stage.enqueue(refusing, "r1")
    stage.run()
    stage.pass_time(61.0)
    stage.run()
    assert (handle.result(), ran) == ("ValueError", ["refused"])


def test_who_freezes_with_a_lock_is_disconnected_before_its_lease_is_over(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, str] = {}

    def watch(module: Any, name: str) -> None:
        original = getattr(module, name)

        def watched(connection: Connection, *args: Any, **kwargs: Any) -> Any:
            done = original(connection, *args, **kwargs)
            found[name] = connection.exec_driver_sql(
                "SELECT setting FROM pg_settings WHERE name = 'idle_in_transaction_session_timeout'"
            ).scalar_one()
            return done

        monkeypatch.setattr(module, name, watched)

    for module, names in (
        (saga_steps, ("find_event", "record_with", "decide")),
        (sagas, ("wait", "compensate", "end")),
        (letters, ("store_failure",)),
    ):
        for name in names:
            watch(module, name)
    void = entering(stage, "void")
    void.refuses.add("open")

    @saga("freezing", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def freezing(saga: Any, id: str) -> Any:
        saga.step("open", enter, "open", undo=void)
        saga.wait_for("picked", match=id, timeout=timedelta(days=5))
        if id == "fails":
            raise PermanentError("no", "no")

    for id in ("ends", "fails"):
        stage.enqueue(freezing, id)
        stage.run()
        stage.publish("picked", {"id": id})
        stage.run()
    assert [stage.saga(id).status for id in ("ends", "fails")] == ["COMPLETED", "COMPENSATING"]
    expected = idle_ms(runtime_of(stage.app).settings.lease)
    held = ("find_event", "record_with", "decide", "wait", "compensate", "end")
    assert {name: found[name] for name in held} == dict.fromkeys(held, expected)
    assert found["store_failure"] == expected  # of the saga's letter, the last that was written
