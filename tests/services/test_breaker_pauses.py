"""Old attempts that resume, keys that expire, calls that nobody asks about: each test passes while the bug is there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, Row, text
from sqlalchemy.orm import Session

from idempotency import DidNotHappen, Operation, OperationId, PermanentError, StillUnknown, operators, records
from idempotency.operators import Change
from idempotency.providers import ProviderContract
from idempotency.runtime import Runtime
from tests import operations as op
from tests.deliveries import Deliveries
from tests.services.test_conclusions import Provider, code, lost
from tests.services.test_core import age, make_task
from tests.services.test_operators import deliver_row
from tests.services.test_proven_ends import replay, shown

ANN = Change("ann", "ticket 42")
Record = Callable[[str], Row[Any]]
told: list[tuple[str, Operation]] = []


def on_failed(session: Session, operation: Operation, error: PermanentError) -> None:
    told.append((error.code, operation))


@pytest.fixture(autouse=True)
def _nothing_told() -> None:
    told.clear()


@pytest.fixture
def connection(engine: Engine) -> Any:
    with engine.connect() as connection:
        yield connection


def test_an_attempt_that_resumes_after_its_lease_calls_and_charges_again(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attempt 1 begins its effect and is frozen (SIGSTOP, a paused VM) for longer than its lease, before the call. Others
    end the operation as effect_unknown; a person looks at the provider: nothing; resolves, replays: charged under key 2.
    Attempt 1 resumes: check_lease() only reads what the heartbeat has noted, and not the clock, though the lease is over by
    minutes; it calls under key 1. Charged twice. Breaks: who is no holder stops before it calls.
    """
    charged: list[str] = []
    begin = records.begin_effect
    paused: list[int] = []

    def charge(*, idempotency_key: str) -> str:
        charged.append(idempotency_key)
        return f"ch_{len(charged)}"

    def begin_and_freeze(connection_: Connection, claim: Any, *args: Any) -> Any:
        begun = begin(connection_, claim, *args)
        if paused:
            return begun
        paused.append(1)
        (holding,) = Runtime.of(bank).heartbeat._holdings.values()
        holding.renewed_at -= 600.0  # ten minutes pass by the monotonic clock too, ten leases
        holding.since -= 600.0
        connection.execute(text("UPDATE idempotency.records SET locked_until = clock_timestamp() - interval '9 min'"))
        connection.execute(text("UPDATE idempotency.records SET revoked_generation = generation"))
        deliveries.deliver(task, key="k", origin="recover")
        assert code(record("k"))[0] == "effect_unknown"
        assert charged == []  # what the person sees at the provider
        operators.resolve_effect(bank, shown(connection, task), "call", DidNotHappen(), ANN)
        assert replay(bank, connection, deliveries, task).value == "ch_1"
        return begun

    task = make_task(bank, lambda self: self.effect("call", charge), on_failed=on_failed)
    monkeypatch.setattr(records, "begin_effect", begin_and_freeze)
    deliveries.deliver(task, key="k")
    assert (record("k").status, len(charged), len(set(charged))) == ("completed", 2, 2)


class Forgetful:
    """A provider that keeps keys for `keep` seconds and charges once for each key it remembers; a call takes a while."""

    def __init__(self, keep: float) -> None:
        self.keep, self.seen, self.charges, self.losses = keep, {}, 0, 1  # type: ignore[var-annotated]

    def __call__(self, *, idempotency_key: str) -> str:
        if self.charges:
            time.sleep(0.6)  # a slow connect: up to 10 s in tasks/gateway.py
        now = time.monotonic()
        if now - self.seen.get(idempotency_key, -1e9) > self.keep:
            self.seen[idempotency_key] = now
            self.charges += 1
        if self.losses:
            self.losses -= 1
            raise ConnectionError("the reply was lost")
        return "ch_1"


def test_a_call_is_repeated_when_its_key_expires_on_the_way(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record
) -> None:
    """The age of a call is compared with the whole retention of the provider: a repeat that is begun within the last
    seconds (a time-out of the client, a pause) arrives when the key is forgotten, and charges again. Breaks: repeated
    under the same key only for as long as the provider honours it.
    """
    keep = 2.0  # stands for 24 hours
    provider = Forgetful(keep)
    task = make_task(
        bank,
        lambda self: self.effect("call", provider),
        provider=ProviderContract("short", keep, keeps_refusals=True, compares_body=True),
    )
    deliveries.deliver(task, key="k")
    time.sleep(keep - 0.4)
    age(engine, "k")
    assert deliveries.deliver(task, key="k", origin="retry").value == "ch_1"
    assert (record("k").status, provider.charges) == ("completed", 2)


def test_an_operation_completes_over_a_call_that_its_second_attempt_never_asked_about(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record
) -> None:
    """Attempt 1 charges and the reply is lost. Before attempt 2 the order is cancelled, or captured under another key
    (tasks/payments.py returns early then): its body returns without coming to the effect. `completed` with an effect
    begun: no reconcile is asked, nobody is told, resolve refuses, no letter. Breaks: whatever ends an operation, over an
    open effect it ends as effect_unknown. (That a body *catches the error* is said to be its decision; here it does not.)
    """
    provider, asked, cancelled = Provider(lost()), [], []

    def find(*, doubt: Any) -> StillUnknown:
        asked.append(doubt)
        return StillUnknown()

    def body(self: Any) -> Any:
        if cancelled:
            return {"status": "cancelled, nothing charged"}
        return self.effect("call", provider, reconcile=find)

    task = make_task(bank, body, on_failed=on_failed)
    deliveries.deliver(task, key="k")
    cancelled.append(1)
    age(engine, "k")
    assert deliveries.deliver(task, key="k", origin="retry").value == {"status": "cancelled, nothing charged"}
    assert (record("k").status, record("k").effects["call"]["state"]) == ("completed", "begun")
    assert (len(provider.keys), asked, told, op.dead_letters(connection)) == (1, [], [], [])
    with pytest.raises(operators.ChangeRefused, match="can only resolve"):
        operators.resolve_effect(bank, shown(connection, task), "call", DidNotHappen(), ANN)
