"""What a repeated request is answered, by what became of the first."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from idempotency.http import Rule
from idempotency.http.asgi import Receive, Scope, Send
from idempotency.wire import keys
from tests.support.edge import Edge, Handler, new_key

JSON = {"content-type": "application/json"}


def twice(edge: Edge, handler: Handler, key: str, **options: Any) -> tuple[httpx.Response, httpx.Response]:
    async def send(client: httpx.AsyncClient) -> tuple[httpx.Response, httpx.Response]:
        first, second = [await client.post("/pay", headers=JSON | {"idempotency-key": key}) for _ in range(2)]
        return first, second

    return edge.use(handler, send, **options)


# ---------------------------------------------------------------- the stored answer

BODIES = {
    "JSON": b'{"b": 1,  "a": "\xc3\xa9"}',
    "empty": b"",
    "binary": bytes(range(256)),
    "NUL": b"a\0b",
    "falsy": b"0",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_repeated_request_gets_the_first_answer_byte_for_byte(edge: Edge, body: bytes) -> None:
    key, handler = new_key(), Handler(201, body, (b"location", b"/payments/1"), (b"set-cookie", b"s=1"), (b"x-a", b"1"))
    first, second = twice(edge, handler, key)
    assert (first.status_code, first.content, handler.runs, edge.entries(key)) == (201, body, 1, 1)
    assert (second.status_code, second.content) == (201, body)
    assert (first.headers["set-cookie"], first.headers["x-a"]) == ("s=1", "1")
    assert "idempotency-replayed" not in first.headers
    assert dict(second.headers) == {
        "content-type": "application/json",
        "location": "/payments/1",
        "content-length": str(len(body)),
        "idempotency-replayed": "true",
    }
    record: Any = edge.record(key)
    assert (record.task, record.status, record.response_code, record.message) == ("http", "completed", 201, "")
    with edge.engine.connect() as connection:
        kept = connection.execute(
            text("SELECT extract(epoch FROM expires_at - completed_at) FROM idempotency.records WHERE key = :key"),
            {"key": key},
        ).scalar_one()
    assert round(kept) == edge.runtime.settings.retention_http == 24 * 3600  # the clock is read twice


def test_a_replay_repeats_the_headers_that_the_user_names(edge: Edge) -> None:
    handler = Handler(201, b"{}", (b"X-A", b"1"), (b"X-A", b"2"), (b"set-cookie", b"s=1"))
    _, second = twice(edge, handler, new_key(), kept_headers=["x-a", "Set-Cookie"])
    assert second.headers.get_list("x-a") == ["1", "2"]
    assert second.headers["set-cookie"] == "s=1"
    assert "content-type" not in second.headers


@pytest.mark.parametrize(("size", "options"), [(5000, {}), (50, {"response_limit": 100})])
def test_an_answer_too_large_to_keep_is_replayed_without_its_body(
    edge: Edge, size: int, options: dict[str, Any]
) -> None:
    key, handler = new_key(), Handler(201, b"x" * size, (b"location", b"/payments/1"), (b"etag", b'"1"'))
    first, second = twice(edge, handler, key, **options)
    assert (first.status_code, first.content, handler.runs, edge.entries(key)) == (201, b"x" * size, 1, 1)
    assert (second.status_code, second.headers["location"]) == (201, "/payments/1")
    assert second.headers["idempotency-replayed"] == "true"
    assert second.headers["content-type"] == "application/problem+json"
    assert "etag" not in second.headers
    assert second.json()["type"].endswith("body_not_kept")


def test_no_content_stays_without_a_length(edge: Edge) -> None:
    _, second = twice(edge, Handler(204, b""), new_key())
    assert (second.status_code, second.content, "content-length" in second.headers) == (204, b"", False)


# ---------------------------------------------------------------- the rules by status

# status: whether the handler's writes stay, whether its answer does
STATUSES = {
    200: (True, True),
    202: (True, True),
    303: (True, True),
    400: (False, True),
    402: (False, True),
    409: (False, True),
    422: (False, True),
    401: (False, False),
    404: (False, False),
    429: (False, False),
    500: (False, False),
    503: (False, False),
}


@pytest.mark.parametrize(("status", "stays"), STATUSES.items())
def test_the_status_decides_what_is_committed_and_what_is_kept(
    edge: Edge, status: int, stays: tuple[bool, bool]
) -> None:
    key, handler = new_key(), Handler(status)
    committed, kept = stays
    first, second = twice(edge, handler, key)
    assert (first.status_code, first.content) == (second.status_code, second.content) == (status, handler.body)
    assert ("idempotency-replayed" in second.headers) is kept
    assert handler.runs == (1 if kept else 2)
    assert edge.entries(key) == int(committed)
    record: Any = edge.record(key)
    if status in (401, 404, 429):
        assert record is None
    else:
        assert (record.status, record.response_code) == (("completed", status) if kept else ("released", None))
    assert edge.letters(key) == []


def test_a_released_request_is_due_at_once_and_never_ends_by_its_attempts(edge: Edge) -> None:
    key, handler = new_key(), Handler(500)

    async def send(client: httpx.AsyncClient) -> list[int]:
        answers = [await client.post("/pay", headers={"idempotency-key": key}) for _ in range(20)]
        handler.status = 201
        return [
            answer.status_code for answer in [*answers, await client.post("/pay", headers={"idempotency-key": key})]
        ]

    assert edge.use(handler, send) == [500] * 20 + [201]
    assert (edge.entries(key), edge.letters(key)) == (1, [])


def test_server_errors_are_kept_if_the_user_says_so(edge: Edge) -> None:
    key, handler = new_key(), Handler(500)
    _, second = twice(edge, handler, key, server_errors="store")
    assert (second.status_code, second.headers["idempotency-replayed"]) == (500, "true")
    assert (handler.runs, edge.entries(key)) == (1, 0)


def test_the_user_may_decide_what_a_status_means(edge: Edge) -> None:
    key, handler = new_key(), Handler(404)
    twice(edge, handler, key, decide=lambda status: Rule.COMMIT)
    assert (handler.runs, edge.entries(key)) == (1, 1)


class Failing(Handler):
    """Raises after its write, without or after an answer."""

    answers_first = False

    async def answer(self, send: Send) -> None:
        if self.answers_first:
            await super().answer(send)
        raise ValueError("s3cret-Pa55")


@pytest.mark.parametrize("answers_first", [False, True])
def test_an_exception_is_the_servers_and_the_request_may_be_sent_again(edge: Edge, answers_first: bool) -> None:
    key, handler = new_key(), Failing()
    handler.answers_first = answers_first

    async def send(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post("/pay", headers={"idempotency-key": key})

    assert edge.use(handler, send).status_code == 500
    record: Any = edge.record(key)
    assert (record.status, edge.entries(key)) == ("released", 0)
    assert "raised ValueError" in record.error
    assert "s3cret" not in record.error
    assert edge.use(Handler(201), send).status_code == 201
    assert edge.entries(key) == 1


def test_an_answer_over_the_spool_limit_fails_and_is_rolled_back(edge: Edge) -> None:
    key, handler = new_key(), Handler(201, b"x" * 2000)
    first, _ = twice(edge, handler, key, spool_limit=1999)
    record: Any = edge.record(key)
    assert (first.status_code, record.status, edge.entries(key)) == (500, "released", 0)


# ---------------------------------------------------------------- the same request, and others

SAME: dict[str, tuple[dict[str, str], bytes, dict[str, str]]] = {
    "another order and white space": ({}, b'{"b": [1, 2],\n "a": 1}', {}),
    "a quoted key": ({"idempotency-key": '"{key}"'}, b'{"a": 1, "b": [1, 2]}', {}),
    "gzip": ({"content-encoding": "gzip"}, gzip.compress(b'{"a": 1, "b": [1, 2]}'), {}),
    "numbers of the same value": ({}, b'{"a": 1.0, "b": [10e-1, 2.00]}', {}),
    "a slash at the end": ({}, b'{"a": 1, "b": [1, 2]}', {"url": "/pay/"}),
    "a charset": ({"content-type": "application/json; charset=utf-8"}, b'{"a": 1, "b": [1, 2]}', {}),
}
OTHERS: dict[str, tuple[dict[str, str], bytes, dict[str, str]]] = {
    "another body": ({}, b'{"a": 2, "b": [1, 2]}', {}),
    "another order in a list": ({}, b'{"a": 1, "b": [2, 1]}', {}),
    "an object that looks like a number": ({}, b'{"a": {"__type__": "decimal", "__value__": "1"}, "b": [1, 2]}', {}),
    "text for a number": ({}, b'{"a": "1", "b": [1, 2]}', {}),
    "another path": ({}, b'{"a": 1, "b": [1, 2]}', {"url": "/refund"}),
    "another query": ({}, b'{"a": 1, "b": [1, 2]}', {"url": "/pay?wait=1"}),
    "another method": ({}, b'{"a": 1, "b": [1, 2]}', {"method": "PATCH"}),
    "another media type": ({"content-type": "text/plain"}, b'{"a": 1, "b": [1, 2]}', {}),
}


def then(
    edge: Edge, headers: dict[str, str], body: bytes, other: dict[str, str]
) -> tuple[str, Handler, httpx.Response]:
    """A first request, and the answer to another one under its key."""
    key, handler = new_key(), Handler()
    changed = {name: value.format(key=key) for name, value in headers.items()}

    async def send(client: httpx.AsyncClient) -> httpx.Response:
        own = JSON | {"idempotency-key": key}
        await client.post("/pay", headers=own, content=b'{"a": 1, "b": [1, 2]}')
        method, url = other.get("method", "POST"), other.get("url", "/pay")
        return await client.request(method, url, headers=own | changed, content=body)

    return key, handler, edge.use(handler, send)


@pytest.mark.parametrize(("headers", "body", "other"), SAME.values(), ids=SAME)
def test_the_same_request_in_another_form_is_a_repeat(
    edge: Edge, headers: dict[str, str], body: bytes, other: dict[str, str]
) -> None:
    _, handler, answer = then(edge, headers, body, other)
    assert (answer.status_code, answer.headers["idempotency-replayed"], handler.runs) == (201, "true", 1)


@pytest.mark.parametrize(("headers", "body", "other"), OTHERS.values(), ids=OTHERS)
def test_another_request_under_the_same_key_is_refused(
    edge: Edge, headers: dict[str, str], body: bytes, other: dict[str, str]
) -> None:
    key, handler, answer = then(edge, headers, body, other)
    assert (answer.status_code, handler.runs) == (422, 1)
    assert answer.json()["type"].endswith("idempotency_key_reused")
    record: Any = edge.record(key)
    assert (record.status, record.response_code) == ("completed", 201)


def test_numbers_that_a_float_cannot_tell_apart_are_different(edge: Edge) -> None:
    key, handler = new_key(), Handler()

    async def send(client: httpx.AsyncClient) -> list[int]:
        bodies = (b'{"amount": 0.1}', b'{"amount": 0.1000000000000000000001}')
        headers = JSON | {"idempotency-key": key}
        return [(await client.post("/pay", headers=headers, content=body)).status_code for body in bodies]

    assert edge.use(handler, send) == [201, 422]


def test_a_file_that_is_sent_again_is_a_repeat(edge: Edge) -> None:
    key, handler = new_key(), Handler()

    async def send(client: httpx.AsyncClient) -> list[int]:
        sent = [b"the same bytes", b"the same bytes", b"other bytes"]
        return [
            (await client.post("/pay", headers={"idempotency-key": key}, files={"scan": each})).status_code
            for each in sent
        ]

    assert edge.use(handler, send) == [201, 201, 422]
    assert handler.runs == 1


def test_a_new_rule_for_fingerprints_does_not_refuse_a_repeat_from_before(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, new, handler = new_key(), new_key(), Handler()

    async def send(client: httpx.AsyncClient) -> list[int]:
        sent = [(each, amount) for each in (key, new) for amount in (b"5", b"5", b"6")]
        return [
            (await client.post("/pay", headers=JSON | {"idempotency-key": each}, content=amount)).status_code
            for each, amount in sent
        ]

    edge.use(handler, lambda client: client.post("/pay", headers=JSON | {"idempotency-key": key}, content=b"5"))
    monkeypatch.setitem(keys.FINGERPRINT_RULES, "v2", lambda given: f"v2:{hash(keys.canonical_json(given))}")
    assert edge.use(handler, send) == [201, 201, 422, 201, 201, 422]
    records: list[Any] = [edge.record(each) for each in (key, new)]
    assert ([each.fingerprint[:3] for each in records], handler.runs) == (["v1:", "v2:"], 2)


def test_tenants_keys_are_independent(edge: Edge) -> None:
    key, handler = new_key(), Handler()

    async def send(client: httpx.AsyncClient) -> list[tuple[int, bool]]:
        sent = [("a", b"1"), ("b", b"2"), ("b", b"2")]
        answers = [
            await client.post("/pay", headers={"idempotency-key": key, "x-tenant": tenant}, content=body)
            for tenant, body in sent
        ]
        return [(answer.status_code, "idempotency-replayed" in answer.headers) for answer in answers]

    def tenant(scope: Scope) -> str:
        return dict(scope["headers"])[b"x-tenant"].decode()  # type: ignore[no-any-return]

    assert edge.use(handler, send, tenant=tenant) == [(201, False), (201, False), (201, True)]
    assert handler.runs == 2


def test_what_is_not_keyed_passes_through_untouched(edge: Edge) -> None:
    seen: list[tuple[Scope, Receive, Send]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((scope, receive, send))

    async def main() -> None:
        middleware = edge.middleware(app, required=True)

        async def receive() -> Any:
            raise AssertionError("nobody may read")

        async def send(message: Any) -> None:
            raise AssertionError("nobody may answer")

        scopes: list[Scope] = [
            {"type": "http", "method": "GET", "path": "/", "headers": [(b"idempotency-key", b"a")]},
            {"type": "websocket", "path": "/", "headers": []},
            {"type": "lifespan"},
        ]
        for scope in scopes:
            await middleware(scope, receive, send)
        assert all(given == (scope, receive, send) for given, scope in zip(seen, scopes, strict=True))

    asyncio.run(main())
    assert len(seen) == 3
