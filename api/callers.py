"""Authentication: a tenant's API key, checked before anything else is done with the request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from hashlib import sha256

from anyio import CapacityLimiter, to_thread
from sqlalchemy.exc import SQLAlchemyError

from idempotency.attempt.runtime import Runtime
from idempotency.http.asgi import Application, Receive, Scope, Send
from idempotency.http.problems import Answer, Refused, problem
from idempotency.http.recent import Recent
from idempotency.store import tenants
from idempotency.store.tenants import Caller

from .problems import failure, unauthenticated

# The scope that each route needs. Other routes are not for tenants.
WRITES = {
    "/payments": "payments:write",
    "/refunds": "refunds:write",
    "/orders": "orders:write",
    "/returns": "returns:write",
}
OPERATIONS = "/operations/"
READS = "operations:read"
# Seconds for which a valid key is not checked again. A revoked key works for that long at most.
CACHED = 3.0
# Keys that are remembered. A forgotten one is checked again.
REMEMBERED = 10_000
# Keys that are checked at once. Guesses cost a statement each, and must not take all threads and connections.
ASKED_AT_ONCE = 4

UNAUTHENTICATED = unauthenticated(
    "API key missing or not valid", "Authorization: Bearer with an API key; `idempotency api-key create` makes one"
)


class Callers:
    """Finds the tenant of an API key, off the event loop. Refused keys are not remembered."""

    def __init__(self, runtime: Callable[[], Runtime]) -> None:
        self._runtime = runtime
        self._known: Recent[bytes, tuple[Caller, float]] = Recent(REMEMBERED)
        self._asking = CapacityLimiter(ASKED_AT_ONCE)

    async def of(self, key: str) -> Caller | None:
        """The caller whose key this is; None if it is not valid. Raises `SQLAlchemyError`."""
        digest = sha256(key.encode()).digest()
        caller, until = self._known.get(digest, (None, 0.0))
        if caller is not None and time.monotonic() < until:
            return caller
        caller = await to_thread.run_sync(self._ask, key, limiter=self._asking)
        if caller is None:
            self._known.pop(digest, None)
        else:
            self._known[digest] = (caller, time.monotonic() + CACHED)
        return caller

    def _ask(self, key: str) -> Caller | None:
        with self._runtime().autocommit() as connection:
            return tenants.authenticate(connection, key)


class Authentication:
    """Puts the `Caller` of a tenant's request into `request.state.caller`, or answers 401, 403 or 503."""

    def __init__(self, app: Application, *, callers: Callers) -> None:
        self.app = app
        self._callers = callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        needed = scope_needed(scope)
        found = None if needed is None else await self._caller(scope, needed)
        if isinstance(found, Answer):
            await found(scope, receive, send)
            return
        scope.setdefault("state", {})["caller"] = found
        await self.app(scope, receive, send)

    async def _caller(self, scope: Scope, needed: str) -> Caller | Answer:
        token = bearer(scope["headers"])
        try:
            caller = None if token is None else await self._callers.of(token)
        except SQLAlchemyError as error:
            return failure(error)
        if caller is None:
            return UNAUTHENTICATED
        if not caller.may(needed):
            return problem(403, "not_allowed", "The API key does not allow this", f"scopes: needs {needed}")
        return caller


def scope_needed(scope: Scope) -> str | None:
    """The scope that this request needs; None if it needs no tenant."""
    if scope["type"] != "http":
        return None
    path = path_of(scope)
    return READS if path.startswith(OPERATIONS) else WRITES.get(path)


def is_write(scope: Scope) -> bool:
    """Whether this request is carried out once for its Idempotency-Key."""
    return scope["type"] == "http" and scope["method"] == "POST" and path_of(scope) in WRITES


def path_of(scope: Scope) -> str:
    """The path that the routes have: without the prefix of a mount, or of a proxy (`uvicorn --root-path`)."""
    path, root = str(scope["path"]), root_of(scope)
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def root_of(scope: Scope) -> str:
    """The prefix that clients see before the paths of the routes."""
    return str(scope.get("root_path", "")).rstrip("/")


def tenant_of(scope: Scope) -> str:
    """The tenant of a request that has passed `Authentication`. Raises `Refused` for one that has not."""
    caller: Caller | None = scope.get("state", {}).get("caller")
    if caller is None:
        raise Refused(UNAUTHENTICATED)
    return caller.tenant


def bearer(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The token in the header Authorization; None unless there is exactly one."""
    given = [value for name, value in headers if name.lower() == b"authorization"]
    if len(given) != 1:
        return None
    kind, _, token = given[0].decode("latin-1").partition(" ")
    return token.strip() if kind.lower() == "bearer" and token.strip() else None
