"""The calls of effects: their functions, arguments, keys and names."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session

from idempotency import DidNotHappen, Happened, IdempotentTask, OperationFailed, StillUnknown
from idempotency.application import runtime_of
from idempotency.operate.cancel import cancel
from idempotency.operate.resolve import resolve_effect
from idempotency.store import effects
from idempotency.upkeep import maintenance
from tests.support import operations as op
from tests.support.deliveries import Deliveries, deliver_row
from tests.support.operations import Record, code, make_due
from tests.support.operators import ANN, replay_and_deliver, shown
from tests.support.tasks import Provider, lost, make_task, on_failed, transactional

# ---------------------------------------------------------------- calls


def undo_without_result(session: Session) -> None: ...


@pytest.mark.parametrize(
    "body",
    [
        lambda self: self.effect("call", lambda: calls.append("called")),
        lambda self: self.effect("call", lambda *, idempotency_key: calls.append("called"), reconcile=lambda: None),
        lambda self: self.step("step", lambda session: calls.append("called"), undo=undo_without_result),
    ],
    ids=["no idempotency_key", "no doubt", "no result"],
)
def test_a_function_that_cannot_be_called_so_is_refused_at_once(
    bank: Celery, deliveries: Deliveries, record: Record, body: Any
) -> None:
    calls.clear()
    assert deliveries.deliver(make_task(bank, body), key="k").state == "FAILURE"
    assert (code(record("k"))[0], record("k").effects, calls) == ("call_refused", {}, [])


calls: list[str] = []


def test_an_attempt_that_resumes_after_its_lease_calls_nothing(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was paused between the beginning of its effect and the call, and its own heartbeat with it."""
    charged: list[str] = []
    begin = effects.begin_effect
    paused: list[int] = []

    def charge(*, idempotency_key: str) -> str:
        charged.append(idempotency_key)
        return f"ch_{len(charged)}"

    def begin_and_freeze(connection_: Connection, claim: Any, *args: Any) -> Any:
        begun = begin(connection_, claim, *args)
        if paused:
            return begun
        paused.append(1)
        (holding,) = runtime_of(bank).heartbeat._holdings.values()
        holding.renewed_at -= 600.0  # ten leases pass
        connection.execute(text("UPDATE idempotency.records SET locked_until = clock_timestamp() - interval '9 min'"))
        connection.execute(text("UPDATE idempotency.records SET revoked_generation = generation"))
        deliveries.deliver(task, key="k", origin="recover")
        assert (code(record("k"))[0], charged) == ("effect_unknown", [])
        resolve_effect(bank, shown(connection, task), "call", DidNotHappen(), ANN)
        assert replay_and_deliver(bank, connection, deliveries, task).value == "ch_1"
        return begun

    task = make_task(bank, lambda self: self.effect("call", charge), on_failed=on_failed)
    monkeypatch.setattr(effects, "begin_effect", begin_and_freeze)
    assert deliveries.deliver(task, key="k").value == "ch_1"
    assert (record("k").status, len(charged)) == ("completed", 1)


def test_a_call_is_not_repeated_when_its_key_could_expire_on_the_way(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record
) -> None:
    provider = Provider(lost())
    task = make_task(bank, lambda self: self.effect("call", provider), on_failed=on_failed)
    deliveries.deliver(task, key="k")
    settings = runtime_of(bank).settings
    earlier = settings.provider_key_retention - settings.longest_run + 1.0
    connection.execute(
        text("""UPDATE idempotency.records SET effects = jsonb_set(effects, '{call,begun_at}',
                to_jsonb((effects -> 'call' ->> 'begun_at')::float8 - :earlier))"""),
        {"earlier": earlier},
    )
    make_due(engine, "k")
    deliveries.deliver(task, key="k", origin="retry")
    assert (code(record("k"))[0], len(provider.keys)) == ("effect_unknown", 1)


def test_what_a_person_has_said_is_remembered_for_its_retention(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record
) -> None:
    provider = Provider(lost())
    task = make_task(bank, lambda self: self.effect("call", provider), max_attempts=1, on_failed=on_failed)
    deliveries.deliver(task, key="k")
    cancel(bank, shown(connection, task), ANN, may_have_happened=True)
    ago = "UPDATE idempotency.records SET expires_at = expires_at - :ago, completed_at = completed_at - :ago"
    connection.execute(text(ago), {"ago": timedelta(days=31)})
    resolve_effect(bank, shown(connection, task), "call", Happened({"charge": "ch_1"}), ANN)
    connection.execute(text("UPDATE idempotency.dead_letters SET status = 'discarded', closed_at = clock_timestamp()"))
    connection.execute(text("DELETE FROM idempotency.outbox"))
    assert maintenance.purge(bank) == 0
    assert isinstance(deliveries.deliver(task, key="k").value, OperationFailed)
    assert len(provider.keys) == 1


def test_a_renamed_parameter_does_not_strand_what_is_between_attempts(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record
) -> None:
    def old(self: Any, account: str) -> None:
        raise ValueError("again")

    task = make_task(bank, old)
    with Session(transactional(engine)) as session, session.begin():
        task.enqueue(session, "a", idempotency_key="k")
    assert deliver_row(deliveries, task, op.outbox(connection)[0]).state == "RETRY"
    make_due(engine, "k")

    def new(self: Any, account_id: str) -> str:
        return account_id

    del bank.tasks[task.name]
    renamed = bank.task(base=IdempotentTask, bind=True, name=task.name, shared=False)(new)
    assert deliver_row(deliveries, renamed, op.outbox(connection)[-1]).value == "a"
    assert record("k").status == "completed"


def keyed(function: Any) -> Any:
    """How a gateway is often made: a wrapper turns the key into a header of the client that it hands in."""

    @functools.wraps(function)
    def call(*args: Any, idempotency_key: str, **kwargs: Any) -> Any:
        return function({"Idempotency-Key": idempotency_key}, *args, **kwargs)

    return call


@keyed
def charge(headers: dict[str, str], amount: int) -> str:
    return f"charged {amount}"


def order(*, idempotency_key: str, **of: str) -> str:
    return f"ordered {of}"


@pytest.mark.parametrize(
    ("call", "arguments", "result"),
    [
        (charge, {"amount": 5}, "charged 5"),
        (order, {"what": "shoes"}, "ordered {'what': 'shoes'}"),
        (order, {"function": "shoes"}, "ordered {'function': 'shoes'}"),
    ],
    ids=["through a decorator", "named what", "named function"],
)
def test_an_effect_takes_every_call_that_its_function_takes(
    bank: Celery, deliveries: Deliveries, call: Any, arguments: dict[str, Any], result: str
) -> None:
    task = make_task(bank, lambda self: self.effect("call", call, **arguments))
    assert deliveries.deliver(task, key="k").value == result


def test_a_signature_that_a_deploy_broke_leaves_the_other_attempts(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record
) -> None:
    """The next release repairs it, and the effect that was begun is completed."""
    provider = Provider(lost())
    reconciles: list[Any] = [lambda doubt: StillUnknown()]
    task = make_task(bank, lambda self: self.effect("call", provider, reconcile=reconciles[-1]))
    for found in (None, lambda in_doubt: StillUnknown()):
        reconciles += [found] if found else []
        assert deliveries.deliver(task, key="k", origin="retry").state == "RETRY"
        make_due(engine, "k")
    reconciles.pop()
    assert deliveries.deliver(task, key="k", origin="retry").value == {"charge": "ch_1"}
    assert (record("k").attempts, len(set(provider.keys))) == (3, 1)


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
