"""Operators' requests: whose token it is, before anything is read; then the limits, the key and the body.

Refusals are audited and counted, those of one network together: a computer has 2^64 addresses of IPv6. Only they are:
guesses from behind a proxy stop no operator who shares it, and cannot fill the audit table. Tokens for which the issuer has to be
asked wait in a line of their own, which guesses can fill while it is silent, and so can all others while the database is slow: then
an operator gets 429, before a key is looked at. So does one who asks too often.
"""

from __future__ import annotations

import time
from ipaddress import ip_address, ip_network

from anyio import CapacityLimiter, to_thread
from sqlalchemy.exc import SQLAlchemyError

from idempotency.application import runtime_of
from idempotency.errors import IdempotencyError, InvalidArguments, NotAllowed, NotAuthenticated
from idempotency.http.asgi import Application, Message, Receive, Scope, Send
from idempotency.http.body import strict_json
from idempotency.http.key import checked_key
from idempotency.http.problems import Answer, Refused, problem, refused
from idempotency.http.request import Limits, Request, read
from idempotency.identities import waits_for_issuer
from idempotency.observe.logs import log
from idempotency.operate import people
from idempotency.operate.people import Person
from idempotency.store import tenants
from tasks import app as celery

from .callers import bearer, path_of
from .limits import RateLimit
from .problems import MISCONFIGURED, failure, unauthenticated

PATH = "/admin/dead-letters"
LIMITS = Limits(1024 * 1024, ("application/json",))
# Tokens that are checked at once, those for which the issuer is asked apart from others, and requests that wait for it: guesses, and
# an issuer that is slow, must not take all threads and connections.
CHECKS_AT_ONCE, CHECKS_WAITING = 4, 32
# Requests that wait for anything else, such as a slow database.
OTHERS_WAITING = 256
# Seconds between two audit rows of refusals that are beyond the limits.
SUMMARY = 60.0

UNAUTHENTICATED = unauthenticated(
    "Operator's token missing or not valid",
    "Authorization: Bearer with the token of an operator; `idempotency operators add` makes one",
)
NOT_ALLOWED = problem(403, "not_allowed", "Not allowed", "Needs the token of an operator whose role may do this.")


class Refusals:
    """How many refused requests of a network are answered as such, and how many in all have an audit row each."""

    def __init__(self) -> None:
        self._by_network = RateLimit(burst=60, per_second=2.0)
        self._in_all = RateLimit(burst=500, per_second=1 / 30)
        self._unrecorded = 0
        self._summed_up = time.monotonic()

    def take(self, address: str, why: str) -> tuple[int, str | None]:
        """The seconds until the network may be refused again, and what the audit row is to say; None: there is none."""
        seconds = self._by_network.take(network_of(address))
        if seconds == 0 and self._in_all.take("") == 0:
            return seconds, why
        self._unrecorded += 1
        if time.monotonic() - self._summed_up < SUMMARY:
            return seconds, None
        said, self._unrecorded, self._summed_up = self._unrecorded, 0, time.monotonic()
        return seconds, f"{why}; the last of {said} refusals without a row each"


def network_of(address: str) -> str:
    """What one computer may choose its addresses from: an address of IPv4, the /64 of one of IPv6."""
    try:
        found = ip_address(address)
    except ValueError:
        return address
    if found.version == 4:
        return str(found)
    return str(found.ipv4_mapped or ip_network((found, 64), strict=False))


class RateLimits:
    """How often each operator may ask, and each network be refused."""

    def __init__(self) -> None:
        self.refusals = Refusals()
        self.by_operator = RateLimit(burst=30, per_second=1.0)


class Line:
    """Checks some tokens at once; `waiting` more requests may wait for that."""

    def __init__(self, waiting: int) -> None:
        self._limiter = CapacityLimiter(CHECKS_AT_ONCE)
        self._room = CHECKS_AT_ONCE + waiting  # counted here: who has just come is not in the limiter's statistics yet

    async def check(self, scope: Scope) -> Person:
        """Whose token it is. Raises `Refused`."""
        if self._room == 0:
            raise Refused(too_many(1))
        self._room -= 1
        try:
            return await to_thread.run_sync(_authenticate, scope, limiter=self._limiter)
        finally:
            self._room += 1


class Operators:
    """Puts the `Person` of an operator's request into `request.state.operator`, and its key into `request.state.key`."""

    def __init__(self, app: Application) -> None:
        self.app = app
        self._by_issuer, self._others = Line(CHECKS_WAITING), Line(OTHERS_WAITING)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_for_operators(scope):
            await self.app(scope, receive, send)
            return
        try:
            person = await self._who(scope)
            if seconds := _limits(scope).by_operator.take(person.name):
                raise Refused(too_many(seconds))
            state = scope.setdefault("state", {})
            state["operator"], state["key"] = person, checked_key(scope)
            if scope["method"] == "POST":
                request = await read(scope, receive, LIMITS)
                if request is None:
                    return
                _check_json(request)
                scope, receive = {**scope, "headers": list(request.headers)}, _again(request.body, receive)
        except Refused as error:
            await error.answer(scope, receive, send)
        except SQLAlchemyError as error:
            await failure(error)(scope, receive, send)
        except IdempotencyError as error:  # a file of people that cannot be read, say
            log.error("operator_not_identified", error=str(error))
            await MISCONFIGURED(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _who(self, scope: Scope) -> Person:
        token = bearer(scope["headers"])
        if token is not None and waits_for_issuer(runtime_of(celery).settings, token):
            return await self._by_issuer.check(scope)
        return await self._others.check(scope)


def is_for_operators(scope: Scope) -> bool:
    return scope["type"] == "http" and (path := path_of(scope)).startswith(PATH) and path[len(PATH) :][:1] in ("", "/")


def too_many(seconds: int) -> Answer:
    detail = "Retry-After says when to try again."
    return problem(429, "too_many_requests", "Too many requests", detail, retry_after=seconds)


def _limits(scope: Scope) -> RateLimits:
    limits: RateLimits = scope["app"].state.admin_limits
    return limits


def _authenticate(scope: Scope) -> Person:
    """Whose token it is. Raises `Refused`: 401, 403 or 429."""
    runtime, token, wait = runtime_of(celery), bearer(scope["headers"]), 0

    def said(why: str) -> str | None:
        nonlocal wait
        wait, row = _limits(scope).refusals.take(scope["client"][0] if scope.get("client") else "", why)
        return row

    action = f"{scope['method']} {path_of(scope)[:200]}"
    try:
        person = people.authenticate(runtime, token, role="operator", action=action, said=said)
    except NotAllowed as refusal:
        if wait:
            raise Refused(too_many(wait)) from None
        if not isinstance(refusal, NotAuthenticated):  # a reader
            raise Refused(NOT_ALLOWED) from None
        with runtime.autocommit() as connection:
            caller = None if token is None else tenants.authenticate(connection, token)
        raise Refused(UNAUTHENTICATED if caller is None else NOT_ALLOWED) from None
    if person.tenants is not None:  # the lists here are of all tenants; `idempotency web` has those of one's own
        raise Refused(NOT_ALLOWED)
    return person


def _check_json(request: Request) -> None:
    try:
        strict_json(request.body)
    except InvalidArguments as error:
        raise refused(400, "body_malformed", "Malformed body", str(error)) from None


def _again(body: bytes, receive: Receive) -> Receive:
    parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return parts.pop() if parts else await receive()

    return again
