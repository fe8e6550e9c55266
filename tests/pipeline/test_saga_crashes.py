"""Real workers, killed at every named moment of sagas that succeed and sagas that are undone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from celery import Celery
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from idempotency import publish
from idempotency.application import runtime_of
from idempotency.relay.relay import Relay
from tests.support import bank as app_module
from tests.support import crashing
from tests.support.outside import OutsideWorld
from tests.support.processes import Processes, eventually

POINTS = (
    "claimed",
    "step.recorded",
    "step.committed",
    "effect.begun",
    "effect.called",
    "effect.recorded",
    "saga.waits",
    "saga.waiting",
    "wait.decided",
    "saga.compensating",
    "finish.written",
    "finish.committed",
)
SAGAS = 8


@pytest.mark.long
def test_sagas_whose_workers_are_killed_at_every_point_act_once_and_are_undone_once(
    bank: Celery,
    processes: Processes,
    relay: Relay,
    outside: OutsideWorld,
    engine: Engine,
    environment: dict[str, str],
) -> None:
    directory = Path(environment["CRASH_DIRECTORY"])
    processes.worker("--concurrency", "2")
    for point in POINTS:
        crashing.plan(directory, point, crashing.KILL_CHILD)
    journeys = [f"j{number}" for number in range(SAGAS)]
    for number, account in enumerate(journeys):
        with Session(runtime_of(bank).engine) as session:
            app_module.journey.enqueue(session, account, outside.url, fails=number % 2 == 1)
            publish(session, "bank.confirmed", {"account": account, "n": number}, app=bank)
            session.commit()
    eventually(lambda: _ended(engine) == SAGAS, timeout=90.0, what="the end of all sagas")
    assert not [point for point in POINTS if not (directory / f"{point}.reached").exists()]

    wanted: Counter[str] = Counter()
    for number, account in enumerate(journeys):
        parts = [f"{account}/{name}" for name in ("open", "one", "two", "three")]
        wanted.update(parts)
        if number % 2 == 1:
            wanted.update(f"{part}/undone" for part in parts)
    with engine.connect() as connection:
        found = Counter(connection.execute(text("SELECT account FROM entries")).scalars())
        backs = {account for account in found if account.endswith("/back")}
        assert found - Counter(backs) == wanted
        assert len(backs) == SAGAS / 2
        statuses = connection.execute(text("SELECT key, status FROM idempotency.saga_instances ORDER BY key")).all()
        open_rows = connection.execute(
            text("SELECT count(*) FROM idempotency.saga_steps WHERE state NOT IN ('done')")
        ).scalar_one()
    assert statuses == [(name, ("COMPLETED", "FAILED")[number % 2]) for number, name in enumerate(journeys)]
    assert open_rows == 0
    assert set(outside.acts.values()) == {1}


def _ended(engine: Engine) -> int:
    with engine.connect() as connection:
        query = "SELECT count(*) FROM idempotency.sagas WHERE status IN ('COMPLETED', 'FAILED')"
        return int(connection.execute(text(query)).scalar_one())
