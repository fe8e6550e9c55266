"""Requests that are refused before anything begins: each names the rule, and none shows the key or the body."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from idempotency.http.asgi import Message
from tests.support.edge import Edge, Handler, new_key

JSON = {"content-type": "application/json"}
SECRET = "s3cret-Pa55"


def post(edge: Edge, handler: Handler, headers: Any, content: bytes = b"{}", **options: Any) -> httpx.Response:
    return edge.use(handler, lambda client: client.post("/pay", headers=headers, content=content), **options)


def records(edge: Edge) -> int:
    with edge.engine.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM idempotency.records")).scalar_one())


def assert_refused(edge: Edge, answer: httpx.Response, handler: Handler, status: int, kind: str, says: str) -> None:
    document = answer.json()
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json")
    assert document["status"] == status
    assert document["type"].endswith(kind)
    assert says in document["detail"]
    assert SECRET not in answer.text
    assert (handler.runs, records(edge)) == (0, 0)


# ---------------------------------------------------------------- keys: rows 1 to 6

KEYS: dict[str, tuple[list[bytes], str]] = {
    "empty": ([b""], "must not be empty"),
    "empty in quotes": ([b'""'], "must not be empty"),
    "blank in quotes": ([b'"  "'], "must not be empty"),
    "blank at its end": ([b'"s3cret-Pa55 "'], "must not begin or end with a blank"),
    "256 characters": ([b"k" * 256], "at most 255 characters, got 256"),
    "a control character": ([b"s3cret-Pa55\x01"], "only printable ASCII, got U+0001 at position 11"),
    "NUL": ([b"a\0b"], "got U+0000 at position 1"),
    "a line break": ([b"a\r\nb"], "got U+000D at position 1"),
    "not ASCII": (["é-s3cret-Pa55".encode()], "only printable ASCII, got U+00C3 at position 0"),
    "two headers": ([b"s3cret-Pa55", b"s3cret-Pa55"], "one header at most, got 2"),
    "a list": ([b"s3cret-Pa55, b"], "a comma at position 11"),
    "a list of quoted": ([b'"a", "b"'], "it goes on at position 3"),
    "parameters": ([b'"a";b=1'], "it goes on at position 3"),
    "no closing quote": ([b'"s3cret-Pa55'], "no quote at its end"),
    "an escaped end": ([b'"s3cret-Pa55\\"'], "no quote at its end"),
    "another escape": ([b'"s3cret-Pa55\\n"'], "at position 12"),
}


@pytest.mark.parametrize(("keys", "says"), KEYS.values(), ids=KEYS)
def test_a_key_that_is_malformed_is_refused(edge: Edge, keys: list[bytes], says: str) -> None:
    handler = Handler()
    answer = post(edge, handler, [(b"Idempotency-Key", value) for value in keys])
    assert_refused(edge, answer, handler, 400, "idempotency_key_invalid", says)


def test_a_request_without_a_key_is_refused_where_one_is_required(edge: Edge) -> None:
    handler = Handler()
    answer = post(edge, handler, JSON, required=lambda scope: scope["path"] == "/pay")
    assert_refused(edge, answer, handler, 400, "idempotency_key_missing", "required for this request")
    assert post(edge, handler, JSON, required=lambda scope: scope["path"] == "/free").status_code == 201
    assert handler.runs == 1


# ---------------------------------------------------------------- bodies: rows 11 and 12

BODIES = {
    "a member twice": (b'{"a": 1, "a": 2}', "a member twice"),
    "NaN": (b'{"a": NaN}', "NaN and infinity are not JSON"),
    "infinity": (b"[-Infinity]", "NaN and infinity are not JSON"),
    "1e999": (b"[1e999]", "a number beyond the range of a float"),
    "an endless exponent": (b"[1e-99999999999999999999]", "an exponent of too many digits"),
    "5000 digits": (b"9" * 5000, "an integer of too many digits"),
    "half a pair": (rb'{"a": "s3cret-Pa55 \ud800"}', "an unpaired surrogate"),
    "half a pair as a name": (rb'{"\udc00": 1}', "an unpaired surrogate"),
    "U+0000": (rb'["s3cret-Pa55 \u0000"]', "U+0000 in a text"),
    "not UTF-8": (b'"s3cret-Pa55 \xff"', "not UTF-8 at byte 13"),
    "not JSON": (b'{"s3cret-Pa55"', "not JSON at character 14"),
    "depth 1000": (b"[" * 1000 + b"]" * 1000, "nested at most 100 deep"),
    "depth 100000": (b"[" * 100_000 + b"]" * 100_000, "nested at most 100 deep"),
}


@pytest.mark.parametrize(("body", "says"), BODIES.values(), ids=BODIES)
def test_json_that_readers_read_differently_is_refused(edge: Edge, body: bytes, says: str) -> None:
    handler = Handler()
    answer = post(edge, handler, JSON | {"idempotency-key": new_key()}, body)
    assert_refused(edge, answer, handler, 400, "body_malformed", says)


def test_an_escaped_backslash_before_u0000_is_no_u0000(edge: Edge) -> None:
    key = new_key()
    answer = post(edge, Handler(), JSON | {"idempotency-key": key}, rb'["\\u0000", "\ud83d\ude00"]')
    assert answer.status_code == 201
    with edge.engine.connect() as connection:
        connection.execute(text("TRUNCATE idempotency.records"))


LIMIT = 1000
BOMB = gzip.compress(b" " * 50_000_000)
CODINGS = {
    "too long by its length": ({}, b" " * (LIMIT + 1), 413, "body_too_large", f"at most {LIMIT} bytes"),
    "a gzip bomb": ({"content-encoding": "gzip"}, BOMB[:LIMIT], 413, "body_too_large", f"at most {LIMIT} bytes"),
    "not gzip": ({"content-encoding": "gzip"}, b"{}", 400, "body_malformed", "not gzip"),
    "half a gzip": ({"content-encoding": "gzip"}, gzip.compress(b"{}")[:-1], 400, "body_malformed", "does not end"),
    "more after gzip": ({"content-encoding": "x-gzip"}, gzip.compress(b"{}") + b"{}", 400, "body_malformed", "not end"),
    "brotli": ({"content-encoding": "br"}, b"{}", 415, "content_encoding", "gzip or none"),
    "gzip twice": ({"content-encoding": "gzip, gzip"}, b"{}", 415, "content_encoding", "gzip or none"),
    "another media type": ({"content-type": "text/xml"}, b"<a/>", 415, "content_type", "application/json"),
}


@pytest.mark.parametrize(("headers", "body", "status", "kind", "says"), CODINGS.values(), ids=CODINGS)
def test_a_body_beyond_the_limits_is_refused(
    edge: Edge, headers: dict[str, str], body: bytes, status: int, kind: str, says: str
) -> None:
    handler = Handler()
    sent = JSON | headers | {"idempotency-key": new_key()}
    answer = post(edge, handler, sent, body, body_limit=LIMIT, media_types={"application/json"})
    assert_refused(edge, answer, handler, status, kind, says)


async def refusal(edge: Edge, length: list[tuple[bytes, bytes]]) -> tuple[int, int]:
    """The status of the answer to a body of 5000 bytes in parts, and how many parts were read."""
    parts, sent = 0, []

    async def receive() -> Message:
        nonlocal parts
        parts += 1
        return {"type": "http.request", "body": b" " * 100, "more_body": parts < 50}

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"idempotency-key", new_key().encode()), *length]
    scope = {"type": "http", "method": "POST", "path": "/pay", "headers": headers}
    await edge.middleware(Handler(), body_limit=LIMIT)(scope, receive, send)
    return sent[0]["status"], parts


@pytest.mark.parametrize(("length", "read"), [([(b"content-length", b"5000")], 0), ([], 11)])
def test_a_body_that_is_too_long_is_not_read_to_its_end(
    edge: Edge, length: list[tuple[bytes, bytes]], read: int
) -> None:
    assert asyncio.run(refusal(edge, length)) == (413, read)
