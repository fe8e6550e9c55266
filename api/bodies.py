"""The limits of request bodies where no key is needed: on operators' routes."""

from __future__ import annotations

from idempotency.http.asgi import Application, Message, Receive, Scope, Send
from idempotency.http.problems import Refused
from idempotency.http.request import Limits, read

# Of all routes: bytes, decoded, and the media types that are accepted.
BODY_LIMIT = 1024 * 1024
JSON = ("application/json",)


class LimitedBodies:
    """Reads the body of a POST below `path` within the limits, or answers with the problem: 400, 413 or 415."""

    def __init__(self, app: Application, *, path: str) -> None:
        self.app = app
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].startswith(self._path):
            await self.app(scope, receive, send)
            return
        try:
            request = await read(scope, receive, Limits(BODY_LIMIT, JSON))
        except Refused as refused:
            await refused.answer(scope, receive, send)
            return
        if request is None:  # the client has gone
            return
        body: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]

        async def again() -> Message:
            return body.pop() if body else await receive()

        await self.app({**scope, "headers": list(request.headers)}, again, send)
