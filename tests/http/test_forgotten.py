"""Answers that say nothing about the operation: the key stays free, for another request or for another person."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import Depends, HTTPException, Request
from fastapi.security import HTTPBasic, HTTPBasicCredentials
from sqlalchemy import text

from idempotency.http import Rule
from idempotency.http.fastapi import AttemptSession, CurrentAttempt
from tests.http.test_handlers import fast, post
from tests.support.edge import INSERT, Edge, Handler, new_key, within

Client = httpx.AsyncClient
FREE = (301, 307, 308, 401, 403, 404, 405, 407, 411, 412, 413, 415, 417, 428, 429)


@pytest.mark.parametrize("status", FREE)
def test_a_key_answered_so_is_free_for_another_request(edge: Edge, status: int) -> None:
    key, handler = new_key(), Handler(status)

    async def send(client: Client) -> list[int]:
        headers = {"idempotency-key": key}
        first = await client.post("/pay", headers=headers, content=b"1")
        assert (edge.record(key), edge.entries(key)) == (None, 0)
        handler.status = 201
        return [first.status_code, (await client.post("/pay", headers=headers, content=b"2")).status_code]

    assert edge.use(handler, send) == [status, 201]
    assert edge.entries(key) == 1


def test_a_stranger_who_is_answered_401_does_not_take_the_key_from_its_owner(edge: Edge) -> None:
    app, key = fast(edge, required=True), new_key()

    def who(credentials: HTTPBasicCredentials = Depends(HTTPBasic())) -> str:  # noqa: B008
        return credentials.username

    @app.post("/pay", status_code=201)
    def pay(session: AttemptSession, attempt: CurrentAttempt, user: str = Depends(who)) -> None:
        session.execute(INSERT, {"account": attempt.key})

    async def send(client: Client) -> list[int]:
        headers = {"idempotency-key": key}
        stranger = await client.post("/pay", headers=headers, json={"amount": 1})
        owner = await client.post("/pay", headers=headers, json={"amount": 2}, auth=("alice", "a"))
        return [stranger.status_code, owner.status_code]

    assert asyncio.run(within(app, send)) == [401, 201]
    assert edge.entries(key) == 1


def test_a_client_that_follows_a_redirect_is_answered_and_so_is_its_repeat(edge: Edge) -> None:
    """FastAPI answers `/pay/` by a redirect to `/pay`, with the same method, body and headers."""
    app, key, runs = fast(edge), new_key(), []

    @app.post("/pay", status_code=201)
    def pay() -> None:
        runs.append(1)

    async def send(client: Client) -> list[tuple[int, bool]]:
        headers = {"idempotency-key": key}
        answers = [await client.post("/pay/", headers=headers, follow_redirects=True) for _ in range(2)]
        return [(answer.status_code, "idempotency-replayed" in answer.headers) for answer in answers]

    assert asyncio.run(within(app, send)) == [(201, False), (201, True)]
    assert runs == [1]


# ---------------------------------------------------------------- answers that ask to be sent again

AGAIN: dict[str, tuple[int, dict[str, Any], str | None]] = {
    "an upstream's 409": (409, {}, None),
    "422": (422, {}, None),
    "an outage where errors are kept": (503, {"server_errors": "store"}, "released"),
    "accepted, to be asked for later": (202, {}, "completed"),
    "a redirect to the result": (303, {}, "completed"),
    "what the user has decided": (409, {"decide": lambda status: Rule.REFUSE}, "completed"),
}


@pytest.mark.parametrize(("status", "options", "kept"), AGAIN.values(), ids=AGAIN)
def test_an_error_that_asks_to_be_sent_again_is_not_kept(
    edge: Edge, status: int, options: dict[str, Any], kept: str | None
) -> None:
    key = new_key()
    (answer,) = post(edge.middleware(Handler(status, b"{}", (b"retry-after", b"1")), **options), key)
    assert (answer.status_code, answer.headers["retry-after"]) == (status, "1")
    record: Any = edge.record(key)
    assert (None if record is None else record.status) == kept


def test_the_middleware_in_itself_carries_a_request_out_once(edge: Edge) -> None:
    """On the application and on one mounted in it, as happens when both are written to stand alone."""
    inner, outer, key, handler = fast(edge), fast(edge), new_key(), Handler()
    inner.mount("/", handler)
    outer.mount("/v1", inner)
    first, second = post(outer, key, "/v1/pay", times=2)
    assert (first.status_code, second.status_code, second.headers["idempotency-replayed"]) == (201, 201, "true")
    assert (handler.runs, edge.entries(key)) == (1, 1)


def test_a_client_that_meets_the_precondition_is_carried_out(edge: Edge) -> None:
    app, key = fast(edge), new_key()

    @app.patch("/orders/1")
    async def change(request: Request) -> dict[str, str]:
        if request.headers.get("if-match") != '"2"':
            raise HTTPException(412, "changed meanwhile")
        return {"version": "3"}

    async def send(client: Client) -> list[int]:
        headers = [{"idempotency-key": key, "if-match": tag} for tag in ('"1"', '"2"')]
        return [(await client.patch("/orders/1", headers=each, json={})).status_code for each in headers]

    assert asyncio.run(within(app, send)) == [412, 200]


# ---------------------------------------------------------------- what is recorded binds the key


def test_a_step_binds_the_key_whatever_is_answered_after_it(edge: Edge) -> None:
    app, key = fast(edge), new_key()

    @app.post("/pay")
    def pay(attempt: CurrentAttempt) -> None:
        attempt.step("reserve", lambda session: session.execute(INSERT, {"account": attempt.key}).rowcount)
        raise HTTPException(404)

    async def send(client: Client) -> list[int]:
        headers = {"idempotency-key": key}
        return [(await client.post("/pay", headers=headers, content=body)).status_code for body in (b"1", b"2", b"1")]

    assert asyncio.run(within(app, send)) == [404, 422, 404]
    record: Any = edge.record(key)
    assert (record.status, edge.entries(key)) == ("released", 1)


def test_an_earlier_failure_without_a_record_of_anything_does_not_bind_the_key(edge: Edge) -> None:
    key, handler = new_key(), Handler(500)

    async def send(client: Client) -> None:
        await client.post("/pay", headers={"idempotency-key": key})
        record: Any = edge.record(key)
        assert record.status == "released"
        handler.status = 404
        await client.post("/pay", headers={"idempotency-key": key})

    edge.use(handler, send)
    assert edge.record(key) is None


def test_a_holder_that_was_taken_over_forgets_nothing(edge: Edge) -> None:
    """Another request holds the operation by now: this one finds out, and is told that it is being carried out."""
    key = new_key()

    class Slow(Handler):
        async def answer(self, send: Any) -> None:
            with edge.engine.connect() as connection:
                connection.execute(
                    text("UPDATE idempotency.records SET fence = fence + 1, token = 'another' WHERE key = :key"),
                    {"key": key},
                )
            await super().answer(send)

    (answer,) = post(edge.middleware(Slow(404)), key)
    record: Any = edge.record(key)
    assert (answer.status_code, record.status, record.token) == (409, "started", "another")
