"""Answers of the middleware itself: problem details for HTTP (RFC 9457)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .asgi import Headers, Receive, Scope, Send

MEDIA_TYPE = b"application/problem+json"
# What the type of a problem begins with; the short name that follows is what programs compare.
TYPES = "urn:idempotency:problem:"
# Statuses that have no body, and so no length.
WITHOUT_BODY = (204, 304)


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole response in memory, as an ASGI application that sends it."""

    status: int
    headers: Headers
    body: bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        length = () if self.status in WITHOUT_BODY else ((b"content-length", b"%d" % len(self.body)),)
        await send({"type": "http.response.start", "status": self.status, "headers": [*self.headers, *length]})
        await send({"type": "http.response.body", "body": self.body})


class Refused(Exception):
    """The request is answered with this problem, and nothing was begun."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.status)
        self.answer = answer


def problem(
    status: int,
    type: str,
    title: str,
    detail: str,
    *,
    headers: Headers = (),
    retry_after: int | None = None,
    **members: Any,
) -> Answer:
    """Answer with a problem document (RFC 9457).

    `type` is a short name, like `idempotency_key_missing`, or a whole URI. `retry_after`: seconds, for the header
    `Retry-After`. `members` are added to the document as they are.
    """
    uri = type if ":" in type else f"{TYPES}{type}"
    document = {"type": uri, "title": title, "status": status, "detail": detail, **members}
    retry = () if retry_after is None else ((b"retry-after", b"%d" % retry_after),)
    content = (b"content-type", MEDIA_TYPE)
    return Answer(status, (content, *retry, *headers), json.dumps(document).encode())


def refused(status: int, type: str, title: str, detail: str, *, headers: Headers = ()) -> Refused:
    """An exception that answers with a problem document."""
    return Refused(problem(status, type, title, detail, headers=headers))
