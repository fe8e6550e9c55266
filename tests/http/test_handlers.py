"""What a handler of a keyed request may rely on: its session, the free event loop, effects, and clients that go."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, HTTPException
from sqlalchemy import text

from idempotency.errors import PermanentError
from idempotency.http import IdempotencyMiddleware, RequestAttempt
from idempotency.http.asgi import Message, Receive, Scope, Send
from idempotency.http.fastapi import AttemptSession, CurrentAttempt, as_response
from idempotency.http.problems import problem
from tests.support.edge import INSERT, Edge, Handler, new_key, within

Client = httpx.AsyncClient


def fast(edge: Edge, **options: Any) -> FastAPI:
    app = FastAPI()
    app.add_middleware(IdempotencyMiddleware, runtime=edge.runtime, **options)
    return app


def post(app: Any, key: str, path: str = "/pay", times: int = 1) -> list[httpx.Response]:
    async def send(client: Client) -> list[httpx.Response]:
        return [await client.post(path, headers={"idempotency-key": key}) for _ in range(times)]

    return asyncio.run(within(app, send))


# ---------------------------------------------------------------- the session


def test_handlers_of_both_kinds_write_in_the_records_commit(edge: Edge) -> None:
    app = fast(edge)

    @app.post("/sync", status_code=201)
    def pay(session: AttemptSession, attempt: CurrentAttempt, fail: bool = False) -> dict[str, str]:
        session.execute(INSERT, {"account": attempt.key})
        if fail:
            raise HTTPException(402, "declined")
        return {"thread": threading.current_thread().name}

    @app.post("/async", status_code=201)
    async def apay(attempt: CurrentAttempt, fail: bool = False) -> dict[str, str]:
        await attempt.run_sync(lambda session: session.execute(INSERT, {"account": attempt.key}))
        if fail:
            raise HTTPException(402, "declined")
        return {"thread": await attempt.run_sync(lambda _: threading.current_thread().name)}

    for path in ("/sync", "/async"):
        for query, status, rows in (("", 201, 1), ("?fail=true", 402, 0)):
            key = new_key()
            first, second = post(app, key, path + query, times=2)
            assert (first.status_code, second.status_code, second.content) == (status, status, first.content)
            assert edge.entries(key) == rows
            record: Any = edge.record(key)
            assert (record.status, record.response_code) == ("completed", status)
    assert post(app, new_key(), "/async")[0].json()["thread"].startswith("idempotency-http")


def test_an_error_that_only_the_flush_finds_is_the_handlers_own(edge: Edge) -> None:
    app, key = fast(edge), new_key()
    with edge.engine.connect() as connection:
        connection.execute(text("CREATE TABLE coins (id int PRIMARY KEY)"))
        connection.execute(text("INSERT INTO coins VALUES (1)"))

    @app.post("/pay")
    def pay(session: AttemptSession, attempt: CurrentAttempt) -> None:
        from sqlalchemy import Column, Integer
        from sqlalchemy.orm import declarative_base

        class Coin(declarative_base()):
            __tablename__ = "coins"
            id = Column(Integer, primary_key=True)

        session.execute(INSERT, {"account": attempt.key})
        session.add(Coin(id=1))

    (answer,) = post(app, key)
    record: Any = edge.record(key)
    assert (answer.status_code, record.status, edge.entries(key)) == (500, "released", 0)
    assert "raised IntegrityError" in record.error


def test_a_handler_without_the_session_is_claimed_run_and_finished_around(edge: Edge) -> None:
    app, key, runs = fast(edge), new_key(), []

    @app.post("/pay")
    async def pay() -> dict[str, int]:
        runs.append(1)
        return {"runs": len(runs)}

    first, second = post(app, key, times=2)
    assert first.json() == second.json() == {"runs": 1}


def test_a_request_that_has_ended_lends_its_session_no_more(edge: Edge) -> None:
    app, kept = fast(edge), []

    @app.post("/pay")
    async def pay(attempt: CurrentAttempt) -> None:
        kept.append(attempt)

    post(app, new_key())
    (attempt,) = kept
    with pytest.raises(RuntimeError, match="the request has ended"):
        attempt.run(lambda session: None)


def test_a_route_whose_dependency_finds_no_key_says_what_to_set(edge: Edge) -> None:
    app = fast(edge)

    @app.post("/pay")
    def pay(session: AttemptSession) -> None: ...

    async def send(client: Client) -> None:
        await client.post("/pay")

    transport = httpx.ASGITransport(app)

    async def main() -> None:
        async with Client(transport=transport, base_url="http://edge") as client:
            await send(client)

    with pytest.raises(Exception, match="set required= of IdempotencyMiddleware"):
        asyncio.run(main())


def test_a_problem_can_be_returned_by_an_endpoint(edge: Edge) -> None:
    app = fast(edge)

    @app.post("/pay")
    def pay() -> Any:
        return as_response(problem(409, "out_of_stock", "Out of stock", "sku 1: none left", sku=1))

    first, second = post(app, new_key(), times=2)
    assert (second.status_code, second.headers["content-type"]) == (409, "application/problem+json")
    assert first.json() == second.json()
    assert second.json()["sku"] == 1


# ---------------------------------------------------------------- the event loop


async def while_one_is_held(
    edge: Edge, hold: Callable[[threading.Event, threading.Event], Callable[[Any], object]]
) -> list[int]:
    """Statuses of requests sent while the first one's session call waits: the others', then the first one's."""
    entered, go = threading.Event(), threading.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        attempt: RequestAttempt = scope["state"]["idempotency"]
        if attempt.key.endswith("held"):
            await attempt.run_sync(hold(entered, go))
        await Handler().answer(send)

    async def send(client: Client) -> list[int]:
        held = new_key() + "-held"
        first = asyncio.create_task(client.post("/pay", headers={"idempotency-key": held}))
        await asyncio.to_thread(entered.wait, 30)
        other = await client.post("/pay", headers={"idempotency-key": new_key()})
        same = await client.post("/pay", headers={"idempotency-key": held})
        assert same.headers["retry-after"] == "1"
        assert same.json()["type"].endswith("request_in_progress")
        go.set()
        return [other.status_code, same.status_code, (await first).status_code]

    return await within(edge.middleware(app), send)


def test_a_slow_call_of_the_session_delays_no_other_request(edge: Edge) -> None:
    def hold(entered: threading.Event, go: threading.Event) -> Callable[[Any], object]:
        def wait(session: Any) -> None:
            session.execute(text("SELECT 1"))
            entered.set()
            assert go.wait(30)

        return wait

    assert asyncio.run(while_one_is_held(edge, hold)) == [201, 409, 201]


def test_a_slow_claim_delays_no_other_request(edge: Edge) -> None:
    """Its record is locked: the claim waits in Postgres until the lock is gone."""
    key = new_key()
    post(edge.middleware(Handler(500)), key)
    with edge.engine.connect() as locker:
        locker.execute(text("BEGIN"))
        locker.execute(text("SELECT FROM idempotency.records WHERE key = :key FOR UPDATE"), {"key": key})

        async def send(client: Client) -> tuple[int, int]:
            slow = asyncio.create_task(client.post("/pay", headers={"idempotency-key": key}))
            other = await client.post("/pay", headers={"idempotency-key": new_key()})
            assert not slow.done()
            await asyncio.to_thread(locker.execute, text("ROLLBACK"))
            return other.status_code, (await slow).status_code

        assert edge.use(Handler(), send) == (201, 201)


def test_requests_beyond_the_threads_wait_and_are_then_refused(edge: Edge) -> None:
    entered, go, key = asyncio.Event(), asyncio.Event(), new_key()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        entered.set()
        await go.wait()
        await Handler().answer(send)

    async def send(client: Client) -> list[Any]:
        first = asyncio.create_task(client.post("/pay", headers={"idempotency-key": key}))
        await entered.wait()
        refused = await client.post("/pay", headers={"idempotency-key": new_key()})
        go.set()
        return [refused.status_code, refused.headers["retry-after"], (await first).status_code]

    assert edge.use(app, send, concurrency=1, patience=0.05) == [503, "1", 201]


# ---------------------------------------------------------------- clients


def scope_of(key: str) -> Scope:
    headers = [(b"idempotency-key", key.encode())]
    return {
        "type": "http",
        "method": "POST",
        "path": "/pay",
        "headers": headers,
        "extensions": {"http.response.push": {}},
    }


def test_a_client_that_goes_does_not_stop_what_was_begun(edge: Edge) -> None:
    """The server cancels the request's task, and the handler goes on to its commit."""
    key = new_key()

    async def main() -> None:
        entered, go, seen = asyncio.Event(), asyncio.Event(), []

        class Slow(Handler):
            async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
                seen.append(scope["extensions"])
                entered.set()
                await go.wait()
                await super().__call__(scope, receive, send)
                seen.append(await receive())

        messages: list[Message] = [{"type": "http.request", "body": b"1", "more_body": False}]

        async def receive() -> Message:
            return messages.pop() if messages else {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            raise AssertionError("the client has gone")

        middleware = edge.middleware(Slow())
        request = asyncio.create_task(middleware(scope_of(key), receive, send))
        await entered.wait()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        go.set()
        answer = await within(edge.middleware(Slow()), lambda client: until_answered(client, key))
        assert (answer.status_code, answer.headers["idempotency-replayed"]) == (201, "true")
        assert seen == [{}, {"type": "http.disconnect"}]

    asyncio.run(main())
    assert edge.entries(key) == 1


async def until_answered(client: Client, key: str) -> httpx.Response:
    async with asyncio.timeout(30):
        while True:
            answer = await client.post("/pay", headers={"idempotency-key": key}, content=b"1")
            if answer.status_code != 409:
                return answer
            await asyncio.sleep(0.01)


def test_a_client_that_goes_before_the_end_of_its_body_begins_nothing(edge: Edge) -> None:
    key, handler = new_key(), Handler()

    async def main() -> None:
        messages: list[Message] = [
            {"type": "http.disconnect"},
            {"type": "http.request", "body": b"{", "more_body": True},
        ]

        async def receive() -> Message:
            return messages.pop()

        async def send(message: Message) -> None:
            raise AssertionError("the client has gone")

        await edge.middleware(handler)(scope_of(key), receive, send)

    asyncio.run(main())
    assert (handler.runs, edge.record(key)) == (0, None)


# ---------------------------------------------------------------- effects and steps


class Provider:
    """Counts calls by key; `fails`: how many calls end without an answer."""

    def __init__(self, fails: int = 0) -> None:
        self.fails = fails
        self.keys: list[str] = []

    def charge(self, amount: int, *, idempotency_key: str) -> dict[str, int]:
        self.keys.append(idempotency_key)
        if len(self.keys) <= self.fails:
            raise TimeoutError("no answer")
        return {"charged": amount}

    def refuse(self, *, idempotency_key: str) -> None:
        raise PermanentError("declined", "card_declined")


def with_effects(edge: Edge, work: Callable[[RequestAttempt], Any]) -> FastAPI:
    app = fast(edge)

    @app.post("/pay", status_code=201)
    def pay(attempt: CurrentAttempt) -> Any:
        return work(attempt)

    return app


def test_an_effect_is_not_repeated_by_the_next_request(edge: Edge) -> None:
    key, provider, failures = new_key(), Provider(), [ValueError("after the charge")]

    def work(attempt: RequestAttempt) -> Any:
        attempt.step("reserve", lambda session: session.execute(INSERT, {"account": attempt.key}).rowcount)
        charged = attempt.effect("charge", provider.charge, 5)
        if failures:
            raise failures.pop()
        return charged

    first, second, third = post(with_effects(edge, work), key, times=3)
    assert [first.status_code, second.status_code, third.status_code] == [500, 201, 201]
    assert second.json() == third.json() == {"charged": 5}
    assert (len(provider.keys), edge.entries(key)) == (1, 1)


def test_a_refusal_over_an_open_effect_is_no_answer(edge: Edge) -> None:
    """The handler takes a lost answer for a refusal: the next request repeats the call under its key."""
    key, provider = new_key(), Provider(fails=1)

    def work(attempt: RequestAttempt) -> Any:
        try:
            return attempt.effect("charge", provider.charge, 5)
        except TimeoutError:
            raise HTTPException(402, "declined") from None

    first, second = post(with_effects(edge, work), key, times=2)
    assert (first.status_code, second.status_code, second.json()) == (503, 201, {"charged": 5})
    assert provider.keys == [provider.keys[0]] * 2


def test_a_refusal_after_an_effect_is_left_to_a_person(edge: Edge) -> None:
    key, provider = new_key(), Provider()

    def work(attempt: RequestAttempt) -> Any:
        attempt.effect("charge", provider.charge, 5)
        raise HTTPException(402, "declined")

    first, second = post(with_effects(edge, work), key, times=2)
    assert (first.status_code, first.json()["code"]) == (500, "unfinished")
    assert (second.status_code, second.json()) == (500, first.json())
    record: Any = edge.record(key)
    assert (record.status, record.error_code, edge.letters(key)) == ("failed", "unfinished", ["unfinished"])
    assert len(provider.keys) == 1


def test_a_refused_effect_is_a_plain_answer(edge: Edge) -> None:
    key, provider = new_key(), Provider()

    def work(attempt: RequestAttempt) -> Any:
        try:
            attempt.effect("charge", provider.refuse)
        except PermanentError:
            raise HTTPException(402, "declined") from None

    first, second = post(with_effects(edge, work), key, times=2)
    assert (first.status_code, second.status_code, edge.letters(key)) == (402, 402, [])


def test_a_refusal_that_the_handler_lets_out_is_raised_again_without_another_call(edge: Edge) -> None:
    key, calls = new_key(), []

    def refuse(*, idempotency_key: str) -> None:
        calls.append(idempotency_key)
        raise PermanentError("declined", "card_declined")

    answers = post(with_effects(edge, lambda attempt: attempt.effect("charge", refuse)), key, times=3)
    assert ([each.status_code for each in answers], len(calls)) == ([500] * 3, 1)
    record: Any = edge.record(key)
    assert (record.status, record.attempts) == ("released", 3)


def test_an_effect_whose_outcome_stays_unknown_is_left_to_a_person(edge: Edge) -> None:
    """Its provider has forgotten the key: whatever the handler answers, the operation ends as effect_unknown."""
    key, provider = new_key(), Provider(fails=1)

    def work(attempt: RequestAttempt) -> Any:
        try:
            return attempt.effect("charge", provider.charge, 5)
        except Exception as error:
            raise HTTPException(500, "internal error") from error

    app = with_effects(edge, work)
    (first,) = post(app, key)
    with edge.engine.connect() as connection:
        connection.execute(
            text("""UPDATE idempotency.records SET effects =
                 jsonb_set(effects, '{charge,begun_at}', to_jsonb((effects #>> '{charge,begun_at}')::float8 - 86400))
                 WHERE key = :key"""),
            {"key": key},
        )
    second, third = post(app, key, times=2)
    assert (first.status_code, second.status_code, second.json()["code"]) == (500, 500, "effect_unknown")
    assert (third.json(), edge.letters(key), len(provider.keys)) == (second.json(), ["effect_unknown"], 1)
