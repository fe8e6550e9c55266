"""A request that loses its hold of the operation: its handler runs once, and its client is told what was committed."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from idempotency.attempt.runtime import Runtime
from idempotency.http import IdempotencyMiddleware, Rule, by_status
from idempotency.http.fastapi import CurrentAttempt
from idempotency.settings import Settings
from tests.http.test_handlers import post
from tests.support.edge import INSERT, Edge, end_lease, new_key, within


@pytest.mark.long
@pytest.mark.parametrize("uses_session", [False, True])
def test_an_outage_of_a_lease_does_not_run_a_handler_again_within_its_request(
    edge: Edge, edge_database: str, monkeypatch: pytest.MonkeyPatch, uses_session: bool
) -> None:
    """What it did by itself still counts: the record is this attempt's. What it wrote in the session was rolled back."""
    runtime = Runtime(Settings.read({"database_url": edge_database, "lease": 0.4, "heartbeat": 0.1}))
    charged: list[int] = []
    app, key, renew = FastAPI(), new_key(), runtime.heartbeat._renew
    app.add_middleware(IdempotencyMiddleware, runtime=runtime)

    def away(claims: Any) -> Any:
        if len(charged) == 1:
            raise OSError("no route to host")
        return renew(claims)

    monkeypatch.setattr(runtime.heartbeat, "_renew", away)

    @app.post("/pay", status_code=201)
    def pay(attempt: CurrentAttempt) -> dict[str, int]:
        charged.append(1)  # a commit of its own, or a call to a provider
        if uses_session:
            attempt.session.execute(INSERT, {"account": key})
        while len(charged) == 1 and not attempt._attempt._holding.given_up:
            time.sleep(0.02)
        return {"charges": len(charged)}

    (answer,) = post(app, key)
    runs = len(charged)
    (again,) = post(app, key)
    runtime.close()
    assert (answer.status_code, runs) == ((503, 1) if uses_session else (201, 1))
    assert (again.status_code, again.json()) == (201, {"charges": 2 if uses_session else 1})
    assert edge.entries(key) == (1 if uses_session else 0)


def test_the_loser_of_a_takeover_answers_with_what_the_winner_has_committed(edge: Edge) -> None:
    """Also where the record keeps no body: two such answers are not the same one."""
    runs: list[str] = []
    key, paused, go = new_key(), threading.Event(), threading.Event()

    def decide(status: int) -> Rule:
        if len(runs) == 1:  # the first process stops here (SIGSTOP, a long pause of the machine)
            paused.set()
            go.wait(30)
        return by_status(status)

    app = FastAPI()
    app.add_middleware(IdempotencyMiddleware, runtime=edge.runtime, decide=decide)

    @app.post("/import", status_code=201)
    def import_all(attempt: CurrentAttempt) -> dict[str, Any]:
        runs.append(f"batch-{len(runs) + 1}")
        batch = runs[-1]
        attempt.session.execute(INSERT, {"account": f"{key}/{batch}"})
        return {"batch": batch, "rows": ["x" * 100] * 60}  # above `result_limit`

    async def send(client: httpx.AsyncClient) -> list[httpx.Response]:
        headers = {"idempotency-key": key}
        first = asyncio.create_task(client.post("/import", headers=headers))
        await asyncio.to_thread(paused.wait, 30)
        end_lease(edge.engine, key)
        second = await client.post("/import", headers=headers)  # takes over, and commits
        go.set()
        return [await first, second]

    first, second = asyncio.run(within(app, send))
    assert (second.status_code, second.json()["batch"]) == (201, "batch-2")
    assert (first.status_code, first.headers["idempotency-replayed"]) == (201, "true")
    assert first.json()["type"].endswith("body_not_kept")
    assert (edge.entries(f"{key}/batch-1"), edge.entries(f"{key}/batch-2")) == (0, 1)
