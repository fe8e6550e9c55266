"""Operations as tenants see them: read, and waited for with `Prefer: wait=n` (RFC 7240)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated
from urllib.parse import quote, unquote

from fastapi import APIRouter, Path, Request, Response
from sqlalchemy.exc import SQLAlchemyError

from idempotency import Handle, OperationId
from idempotency.application import runtime_of
from idempotency.errors import CallRefused
from idempotency.http.asgi import Application, Message, Receive, Scope, Send
from idempotency.http.problems import Refused
from idempotency.store import operations
from idempotency.waiting import Ends
from idempotency.wire.keys import check_key
from tasks import app as celery
from tasks.outcomes import outcome
from tasks.payments import capture_payment
from tasks.refunds import refund_payment
from tasks.returns import process_return

from .callers import OPERATIONS, is_write, root_of, tenant_of
from .problems import NOT_FOUND, documented
from .schemas import OperationDocument

# The longest that a request is held open, in seconds: proxies give up after a minute.
LONGEST_WAIT = 30
# The tasks whose operations tenants may look at.
SHOWN = (capture_payment.name, refund_payment.name, process_return.name)

router = APIRouter()


def address(id: OperationId) -> str:
    """The path at which a tenant finds its operation."""
    return f"{OPERATIONS}{id.task}/{quote(id.key, safe='')}"


def preferred_wait(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    """The seconds of `Prefer: wait=n`, at most `LONGEST_WAIT`; None if there is none. A malformed one is ignored."""
    given = b",".join(value for name, value in headers if name.lower() == b"prefer").decode("latin-1")
    for preference in given.split(","):
        name, _, value = preference.partition(";")[0].partition("=")
        seconds = value.strip().strip('"')
        if name.strip().lower() == "wait" and seconds.isascii() and seconds.isdigit():
            return min(int(seconds[:9]), LONGEST_WAIT)
    return None


def applied(seconds: int) -> str:
    """The value of Preference-Applied."""
    return f"wait={seconds}"


@router.get(
    OPERATIONS + "{task}/{key:path}",
    responses=documented(400, 401, 403, 404, 503),
    response_model_exclude_none=True,
    summary="What became of an operation",
)
async def read_operation(
    task: Annotated[str, Path(examples=["payments.capture_payment"])],
    key: Annotated[str, Path(examples=["p-1"])],
    request: Request,
    response: Response,
) -> OperationDocument:
    """The operation's status and result. `Prefer: wait=n` waits for its end, for at most 30 seconds."""
    id, seconds = OperationId(tenant_of(request.scope), task, key), preferred_wait(request.headers.raw)
    found = await document(id)
    if found is not None and seconds is not None:
        ended = has_ended(found) or await waited(request.scope, request.receive, id, seconds)
        if ended is not None:
            response.headers["Preference-Applied"] = applied(seconds)
        if ended and not has_ended(found):
            found = await document(id)
    if found is None:
        raise Refused(NOT_FOUND)
    return found


async def document(id: OperationId) -> OperationDocument | None:
    """Read an operation, off the event loop; None if the tenant has no such operation. Raises `SQLAlchemyError`."""
    try:
        check_key(id.key)
    except CallRefused:
        return None
    if id.task not in SHOWN:
        return None
    readers = runtime_of(celery).readers
    return await asyncio.get_running_loop().run_in_executor(readers, _read, id)


def _read(id: OperationId) -> OperationDocument | None:
    stored = Handle(celery, id).lookup()
    if stored is not None:
        # of an operation that has not failed, it would be an earlier attempt's
        code = stored.error["code"] if stored.status == "failed" and stored.error is not None else None
        result, erased = (None, True) if stored.is_erased else (stored.result, None)
        return OperationDocument(
            task=id.task, key=id.key, status=stored.status, result=result, code=code, erased=erased
        )
    runtime = runtime_of(celery)
    with runtime.autocommit(id.tenant) as connection:
        if operations.accepted(connection, id, runtime.settings.service) is not None:
            return OperationDocument(task=id.task, key=id.key, status="accepted")
        found = outcome(connection, id)  # its record may have been purged
    return None if found is None else OperationDocument(task=id.task, key=id.key, **asdict(found))


def has_ended(found: OperationDocument) -> bool:
    return found.status in ("completed", "failed")


def ends_of(scope: Scope) -> Ends:
    """The process's `Ends`, made when the application starts."""
    ends: Ends = scope["app"].state.ends
    return ends


async def waited(scope: Scope, receive: Receive, id: OperationId, seconds: int) -> bool | None:
    """Whether the operation has ended within so many seconds. None: it was not waited for, or the client has gone.

    Raises `SQLAlchemyError`.
    """
    ending = asyncio.create_task(ends_of(scope).wait(id, seconds))
    leaving = asyncio.create_task(_leaving(receive))
    try:
        await asyncio.wait((ending, leaving), return_when=asyncio.FIRST_COMPLETED)
        return ending.result() if ending.done() else None
    finally:
        for task in (ending, leaving):
            task.cancel()
        await asyncio.gather(ending, leaving, return_exceptions=True)


async def _leaving(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class PreferWait:
    """Holds back a 202 while its operation may end in time, and then answers 200 with the operation instead.

    It wraps the middleware that stores answers, so the stored answer is the 202, whether or not the client waited.
    """

    def __init__(self, app: Application) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        seconds = preferred_wait(scope["headers"]) if is_write(scope) else None
        if seconds is None:
            await self.app(scope, receive, send)
            return
        held: list[Message] = []

        async def hold(message: Message) -> None:
            if held or (message["type"] == "http.response.start" and message["status"] == 202):
                held.append(message)
            else:
                await send(message)

        await self.app(scope, receive, hold)
        if held:
            await self._answer(scope, receive, held, seconds, send)

    async def _answer(self, scope: Scope, receive: Receive, held: list[Message], seconds: int, send: Send) -> None:
        start, *rest = held
        headers = list(start["headers"])
        was_waited_for, found = await _ended(scope, receive, headers, seconds)
        if was_waited_for:
            headers.append((b"preference-applied", applied(seconds).encode()))
        if found is not None:
            body = found.model_dump_json(exclude_none=True).encode()
            headers = [each for each in headers if each[0].lower() != b"content-length"]
            headers.append((b"content-length", b"%d" % len(body)))
            start, rest = {**start, "status": 200}, [{"type": "http.response.body", "body": body}]
        for message in ({**start, "headers": headers}, *rest):
            await send(message)


async def _ended(
    scope: Scope, receive: Receive, headers: list[tuple[bytes, bytes]], seconds: int
) -> tuple[bool, OperationDocument | None]:
    """Whether the operation that a 202's Location names was waited for, and itself, if it has ended in time."""
    location = next((value.decode("latin-1") for name, value in headers if name.lower() == b"location"), "")
    task, _, key = location.removeprefix(root_of(scope)).removeprefix(OPERATIONS).partition("/")
    id = OperationId(tenant_of(scope), task, unquote(key))
    try:
        if (found := await document(id)) is not None and has_ended(found):
            return True, found
        if not (ended := await waited(scope, receive, id, seconds)):
            return ended is not None, None
        found = await document(id)
    except SQLAlchemyError:
        return False, None  # the wait failed; the request is accepted all the same
    return True, found if found is not None and has_ended(found) else None
