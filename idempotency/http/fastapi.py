"""For FastAPI and Starlette: the attempt's session as a dependency, and problems as their responses."""

from __future__ import annotations

from typing import Annotated

from ..attempt.session import AttemptSession as SessionOfAttempt
from ..errors import MissingKey
from ..extras import extra
from .attempt import RequestAttempt
from .problems import Answer

with extra("http"):
    from fastapi import Depends, Request, Response


async def request_attempt(request: Request) -> RequestAttempt:
    """The attempt of a keyed request. Raises `MissingKey` where the middleware let one without a key pass."""
    found: RequestAttempt | None = getattr(request.state, "idempotency", None)
    if found is None:
        raise MissingKey("this route needs an Idempotency-Key: set required= of IdempotencyMiddleware for it")
    return found


async def _session(attempt: Annotated[RequestAttempt, Depends(request_attempt)]) -> SessionOfAttempt:
    return attempt.session


# `def endpoint(session: AttemptSession)`: what it writes is committed with the answer. In an `async def` endpoint use
# `CurrentAttempt` and `await attempt.run_sync(…)`, so that the event loop stays free.
AttemptSession = Annotated[SessionOfAttempt, Depends(_session)]
CurrentAttempt = Annotated[RequestAttempt, Depends(request_attempt)]


def as_response(answer: Answer) -> Response:
    """A problem, as a response that an endpoint can return."""
    return Response(answer.body, answer.status, {name.decode(): value.decode() for name, value in answer.headers})
