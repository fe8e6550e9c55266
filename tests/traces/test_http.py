"""A keyed request is in the trace of its client, and so is what its handler enqueues."""

from __future__ import annotations

import httpx
import pytest
from celery import Celery
from sqlalchemy import Engine

from idempotency.application import runtime_of
from idempotency.http.asgi import Receive, Scope, Send
from tests.support import bank as b
from tests.support.edge import Edge, new_key
from tests.support.spans import Spans, id_of, linked, parent_of, said, trace_of

PARENT = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}


@pytest.fixture
def edge(bank: Celery, engine: Engine, spans: Spans) -> Edge:
    return Edge(runtime_of(bank), engine)


async def handler(scope: Scope, receive: Receive, send: Send) -> None:
    """Enqueues by the session of its attempt."""
    attempt = scope["state"]["idempotency"]
    await attempt.run_sync(lambda session: b.deposit.enqueue(session, "a1").task_id)
    await send({"type": "http.response.start", "status": 201, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


def post(edge: Edge, key: str, **headers: str) -> int:
    async def send(client: httpx.AsyncClient) -> int:
        answer = await client.post("/", json={}, headers={"Idempotency-Key": f'"{key}"', **headers})
        return answer.status_code

    return edge.use(handler, send)


def test_a_request_belongs_to_the_trace_in_its_headers(edge: Edge, spans: Spans, bank: Celery) -> None:
    key = new_key()
    assert post(edge, key, **PARENT) == 201
    request = spans.one("keyed request")
    assert (trace_of(request), parent_of(request)) == (int("ab" * 16, 16), int("cd" * 8, 16))
    assert (request.kind.name, said(request, "outcome"), said(request, "task")) == ("INTERNAL", "completed", "http")
    enqueued = spans.one(f"enqueue {bank.conf.task_default_queue}")
    assert parent_of(enqueued) == id_of(spans.one("body"))
    assert {parent_of(span) for span in spans.all() if span.name in ("claim", "body", "commit")} == {id_of(request)}
    assert key not in spans.text()


def test_a_request_belongs_to_the_span_of_the_server_that_it_is_in(edge: Edge, spans: Spans) -> None:
    """As the instrumentation of a web framework opens it, in the request's own context."""

    async def send(client: httpx.AsyncClient) -> None:
        await client.post("/", json={}, headers={"Idempotency-Key": f'"{new_key()}"', **PARENT})

    async def instrumented(scope: Scope, receive: Receive, asgi_send: Send) -> None:
        with spans.tracer.start_as_current_span("POST /"):
            await middleware(scope, receive, asgi_send)

    from asyncio import run

    from tests.support.edge import within

    middleware = edge.middleware(handler)
    run(within(instrumented, send))
    server, request = spans.one("POST /"), spans.one("keyed request")
    assert parent_of(request) == id_of(server)
    assert [link.context.trace_id for link in request.links] == [int("ab" * 16, 16)]
    assert len({trace_of(span) for span in spans.all()}) == 1


def test_a_repeated_request_is_linked_to_the_one_that_was_carried_out(edge: Edge, spans: Spans) -> None:
    key = new_key()
    assert [post(edge, key), post(edge, key)] == [201, 201]
    first, second = spans.named("keyed request")
    assert (said(first, "outcome"), said(second, "outcome")) == ("completed", "duplicate")
    assert linked(second) == [(id_of(first), "other_delivery")]
