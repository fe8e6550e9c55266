"""The session of a keyed request is used off the event loop, by its handler alone, and until its answer."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import HTTPException

from idempotency.errors import InvalidArguments, SessionNotYours
from idempotency.http import RequestAttempt
from idempotency.http.fastapi import AttemptSession, CurrentAttempt
from tests.http.test_handlers import fast, post, with_effects
from tests.support.edge import INSERT, Edge, Handler, new_key


def test_a_statement_on_the_event_loop_is_refused(edge: Edge) -> None:
    """Waiting there for a lock would stop the whole server, and with it the lock's holder."""
    app, key, raised = fast(edge), new_key(), []

    @app.post("/pay")
    async def pay(session: AttemptSession) -> None:
        try:
            session.execute(INSERT, {"account": key})
        except SessionNotYours as error:
            raised.append(str(error))
            raise

    @app.post("/there", status_code=201)
    async def pay_there(session: AttemptSession) -> None:
        await asyncio.to_thread(session.execute, INSERT, {"account": key})

    assert [post(app, new_key(), path)[0].status_code for path in ("/pay", "/there")] == [500, 201]
    assert "await attempt.run_sync(fn)" in raised[0]
    assert edge.entries(key) == 1


def test_what_a_thread_writes_after_the_answer_is_refused(edge: Edge) -> None:
    app, key, go = fast(edge), new_key(), threading.Event()
    threads: list[threading.Thread] = []
    refused: list[str] = []

    @app.post("/pay", status_code=201)
    def pay(attempt: CurrentAttempt) -> None:
        session = attempt.session
        session.execute(INSERT, {"account": attempt.key})

        def later() -> None:
            go.wait(30)
            for use in (
                lambda: session.execute(INSERT, {"account": attempt.key}),
                lambda: attempt.session.execute(INSERT, {"account": attempt.key}),
                lambda: attempt.step("late", lambda session: None),
                lambda: attempt.effect("late", lambda *, idempotency_key: None),
            ):
                try:
                    use()
                except (SessionNotYours, RuntimeError) as error:
                    refused.append(str(error))

        threads.append(threading.Thread(target=later))
        threads[0].start()

    (answer,) = post(app, key)
    go.set()
    threads[0].join(30)
    assert (answer.status_code, edge.entries(key)) == (201, 1)
    assert [" has ended" in said for said in refused] == [True] * 4


def test_a_thread_that_outlives_its_handler_writes_nothing_into_its_refusal(edge: Edge) -> None:
    """`wait_for` gives up on a thread, which goes on with the session while the refusal is being committed."""
    app, key, go, done = fast(edge), new_key(), threading.Event(), threading.Event()

    @app.post("/pay", status_code=201)
    async def pay(attempt: CurrentAttempt) -> None:
        session, writes = attempt.session, attempt._attempt.writes
        roll_back = writes.roll_back

        def slowly() -> None:
            roll_back()
            go.set()  # from here to COMMIT there are some milliseconds; here, as long as it takes
            done.wait(10)

        def write() -> None:
            go.wait(10)  # a slow call
            session.execute(INSERT, {"account": key})
            done.set()

        writes.roll_back = slowly  # type: ignore[method-assign]
        try:
            await asyncio.wait_for(asyncio.to_thread(write), 0.05)
        except TimeoutError:
            raise HTTPException(402, "not in time") from None

    first, second = post(app, key, times=2)
    assert (first.status_code, second.status_code, second.headers["idempotency-replayed"]) == (402, 402, "true")
    assert (done.is_set(), edge.entries(key)) == (True, 0)


def test_functions_that_use_run_may_call_each_other(edge: Edge) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        attempt: RequestAttempt = scope["state"]["idempotency"]
        inner = functools.partial(attempt.run, lambda session: session.execute(INSERT, {"account": attempt.key}))
        await asyncio.to_thread(attempt.run, lambda session: inner())
        await Handler().answer(send)

    key = new_key()

    async def send(client: httpx.AsyncClient) -> int:
        return (await client.post("/pay", headers={"idempotency-key": key}, timeout=30)).status_code

    assert (edge.use(app, send), edge.entries(key)) == (201, 1)


async def save(session: Any) -> None:
    raise AssertionError("nobody awaits it")


async def charge(*, idempotency_key: str) -> None:
    raise AssertionError("nobody awaits it")


class Client:
    async def __call__(self, *, idempotency_key: str) -> None:
        raise AssertionError("nobody awaits it")


@pytest.mark.parametrize(
    "use",
    [
        lambda attempt: attempt.run(save),
        lambda attempt: attempt.run(functools.partial(save)),
        lambda attempt: attempt.step("reserve", save),
        lambda attempt: attempt.effect("charge", charge),
        lambda attempt: attempt.effect("charge", Client()),
    ],
)
def test_an_async_function_is_refused_before_anything_is_begun(
    edge: Edge, use: Callable[[RequestAttempt], object]
) -> None:
    """Called, it would return at once without having done anything, and the answer would be committed."""
    key, raised = new_key(), []

    def work(attempt: RequestAttempt) -> None:
        with pytest.raises(InvalidArguments, match="async") as caught:
            use(attempt)
        raised.append(caught.value)

    (answer,) = post(with_effects(edge, work), key)
    record: Any = edge.record(key)
    assert (answer.status_code, len(raised), record.effects) == (201, 1, {})
