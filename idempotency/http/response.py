"""A response, held back until its operation is committed, and as the record keeps it for replays."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Collection, Mapping
from tempfile import SpooledTemporaryFile
from typing import Any

from ..wire import encoding
from .asgi import Headers, Message, Send
from .problems import Answer, problem

# Up to this many bytes a response is held in memory, and beyond it in a file.
MEMORY = 1024 * 1024
CHUNK = 64 * 1024
# What a replay repeats of the first answer's headers, unless the middleware is told otherwise. Never `set-cookie`: it
# would hand one client's session to anyone who knows the key.
KEPT_HEADERS = frozenset(
    (
        "cache-control",
        "content-disposition",
        "content-language",
        "content-type",
        "etag",
        "last-modified",
        "link",
        "location",
    )
)
# Kept whatever the middleware is told: without it the body cannot be read.
_OF_THE_BODY = "content-encoding"
REPLAYED = (b"idempotency-replayed", b"true")


class ResponseTooLarge(Exception):
    """Raised into the application that sends more than `spool_limit`; its request fails."""


class Buffer:
    """What the application has sent, kept until the commit: the `send` that it is given."""

    def __init__(self, limit: int) -> None:
        self.status = 0
        self.headers: Headers = ()
        self.is_complete = False
        self.is_too_large = False
        self.is_broken = False
        self.ended = asyncio.Event()
        self._limit = limit
        self._size = 0
        self._body = SpooledTemporaryFile(max_size=MEMORY)  # noqa: SIM115 – closed by `send_to` and `close`

    async def send(self, message: Message) -> None:
        """Keep a message of the response. Raises `ResponseTooLarge`."""
        match message["type"]:
            case "http.response.start" if self.status:  # a server would break the connection off
                self.is_broken = True
                raise RuntimeError("the response has started: another one cannot follow it")
            case "http.response.start":
                self.status = message["status"]
                self.headers = tuple((bytes(name).lower(), bytes(value)) for name, value in message.get("headers", ()))
            case "http.response.body" if not self.is_complete and not self.is_broken:
                part = message.get("body", b"")
                self._size += len(part)
                if self._size > self._limit:
                    self.is_too_large = True
                    raise ResponseTooLarge(f"the response: at most {self._limit} bytes on a keyed route")
                self._body.write(part)
                self.is_complete = not message.get("more_body", False)
                if self.is_complete:
                    self.ended.set()

    def body(self, at_most: int) -> bytes | None:
        """The whole body; None if it is longer than this."""
        if self._size > at_most:
            return None
        self._body.seek(0)
        return self._body.read()

    def digest(self) -> str:
        """SHA-256 of the whole body."""
        self._body.seek(0)
        digest = hashlib.sha256()
        while part := self._body.read(CHUNK):
            digest.update(part)
        return digest.hexdigest()

    async def send_to(self, send: Send) -> None:
        """Send what was kept."""
        await send({"type": "http.response.start", "status": self.status, "headers": list(self.headers)})
        self._body.seek(0)
        left, more = self._size, True
        while more:
            part = self._body.read(CHUNK)
            left -= len(part)
            more = left > 0
            await send({"type": "http.response.body", "body": part, "more_body": more})

    def close(self) -> None:
        self._body.close()


def stored(buffer: Buffer, kept: Collection[str], limit: int, most: int) -> dict[str, Any]:
    """A response as its record keeps it: the body only if that makes at most `limit` bytes of JSON, headers if `most`."""
    headers = [
        [text, value.decode("latin-1")]
        for name, value in buffer.headers
        if (text := name.decode("latin-1")) in kept or text == _OF_THE_BODY
    ]
    form: dict[str, Any] = {"status": buffer.status, "headers": headers}
    body = buffer.body(at_most=limit)
    if body is not None and _fits(whole := form | _body(body), limit):
        return whole
    # two answers whose bodies are not kept are the same one only if the bodies are
    without = form | {"body_not_kept": True, "sha256": buffer.digest()}
    return without if _fits(without, most) else without | {"headers": []}


def _fits(form: Mapping[str, Any], limit: int) -> bool:
    return len(encoding.dumps(form)) <= limit


def _body(body: bytes) -> dict[str, str]:
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}


def replay(form: Mapping[str, Any]) -> Answer:
    """The answer that a record keeps, marked as replayed."""
    headers = tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in form["headers"])
    if form.get("body_not_kept"):
        said = problem(
            form["status"],
            "body_not_kept",
            "Done before; the body was not kept",
            "The request was carried out once, with this status. Its response was too large to be kept.",
        )
        about_it = (b"content-type", b"content-encoding", b"etag")
        others = tuple(header for header in headers if header[0] not in about_it)
        return Answer(said.status, (*said.headers, *others, REPLAYED), said.body)
    body = form["body"].encode() if "body" in form else base64.b64decode(form["body_base64"])
    return Answer(form["status"], (*headers, REPLAYED), body)
