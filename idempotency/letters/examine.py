"""Examining a message: the operation it names, or in one word why no worker can run it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from celery import Celery
from kombu import Message

from ..application import runtime_of
from ..errors import CallRefused, InvalidArguments, MissingKey, SettingsError, WrongCell
from ..reasons import ALTERED, BEYOND_LIMIT, OTHER_CELL, UNSIGNED
from ..wire import keys
from ..wire.arriving import TooLarge, unreadable
from ..wire.fitness import misplaced, time_of, unfit
from ..wire.headers import (
    MESSAGE_VERSION,
    OUTBOX_HEADER,
    REFUSED_HEADER,
    SERVICE_HEADER,
    SIGNATURE_HEADER,
    VERSION_HEADER,
    is_our_header,
)
from ..wire.keys import OperationId
from ..wire.limits import BODY_DEPTH, BODY_LIMIT, beyond_limits
from ..wire.signing import is_covered, signed_at
from ..worker.task import IdempotentTask

# A body has the arguments, and what Celery calls after the task with theirs.
BODY_PER_ARGUMENTS = 16
_TOO_DEEP = f"body: nested at most {BODY_DEPTH} deep"
# What a worker calls after a task, and Celery's own tasks that call those which their arguments name.
_FOLLOWERS = ("callbacks", "errbacks", "chain", "chord")
_CALLERS = frozenset(
    f"celery.{name}" for name in ("map", "starmap", "chunks", "group", "chain", "chord", "chord_unlock")
)
# How the bodies are encoded that we send; none said is read as this.
_ENCODINGS = (None, "", "utf-8")


@dataclass(frozen=True, slots=True)
class Examined:
    """The operation that a message names, or in one word why no worker can run it."""

    reason: str | None
    task: IdempotentTask | None = None
    id: OperationId | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    # names of parameters or limits, never values
    detail: str | None = None


def disbelieved(app: Celery, message: Message) -> Examined | None:
    """Why nothing is believed that a message says, if so: it is beyond a limit, or not signed by this application, or somebody has
    added to a copy of what is."""
    headers = message.headers
    limit = max(BODY_LIMIT, BODY_PER_ARGUMENTS * runtime_of(app).settings.arguments_limit)
    if (beyond := beyond_limits(headers, message.body, body_limit=limit)) is not None:
        return Examined(BEYOND_LIMIT, detail=beyond)
    return _forged(app, message) if _is_ours(app, headers) else None


def examine(app: Celery, message: Message) -> Examined:
    """Say whether a worker can run this message. A content type that is not accepted is never decoded."""
    if (refused := disbelieved(app, message)) is not None:
        return refused
    if (why := unreadable(message.properties, message.delivery_info)) is not None:
        return Examined("undecodable", detail=why)
    headers = message.headers
    name, task = headers.get("task"), _task_of(app, headers)
    version = headers.get(VERSION_HEADER, MESSAGE_VERSION)
    if type(version) is int and version > MESSAGE_VERSION:
        return Examined("unknown_version")  # nothing else is known about it, not even its encoding
    accepted = {"application/json"} if isinstance(task, IdempotentTask) else message.accept
    if accepted is not None and str(message.content_type) not in accepted:
        return Examined("content_type")
    try:
        if message.errors:
            raise message.errors[0][1]
        payload = message.decode()
    except TooLarge as error:
        return Examined(BEYOND_LIMIT, detail=str(error))
    except Exception as error:
        if isinstance(error.__cause__ or error.__context__ or error, RecursionError):
            return Examined(BEYOND_LIMIT, detail=_TOO_DEEP)
        return Examined("undecodable")
    if message.content_type == "application/json" and _may_be_deep(message.body) and keys.depth(payload) > BODY_DEPTH:
        return Examined(BEYOND_LIMIT, detail=_TOO_DEEP)
    if name is None and isinstance(payload, dict) and "task" in payload:
        return Examined("protocol")
    if not _is_envelope(payload):
        return Examined("envelope")
    if not isinstance(name, str) or not name:
        return Examined("missing_task")
    if task is None:
        return Examined("unknown_task")
    if not isinstance(headers.get("id"), str) or not headers["id"]:
        return Examined("missing_id")
    if isinstance(task, IdempotentTask) and headers.get(REFUSED_HEADER) is not None:
        return Examined("invalid_header", detail=REFUSED_HEADER)  # by the application itself, which has signed it
    if (found := next(unfit(headers, app.timezone), None)) is not None:
        return Examined("invalid_header", detail=found[0])
    if not isinstance(task, IdempotentTask):
        forged = _forged(app, message) if _calls_others(name, headers, payload) else None
        return forged or Examined(None)
    if (found := next(misplaced(headers), None)) is not None:
        return Examined("invalid_header", detail=found[0])
    examined = _named(task, payload, headers)
    if examined.reason is None and _is_row_of_another(app, headers):
        return replace(examined, reason="other_service")
    expires = headers.get("expires")
    if examined.reason is None and expires is not None and time_of(expires, app.timezone) < datetime.now(UTC):
        # Celery would acknowledge it; an accepted operation is never just dropped
        return replace(examined, reason="expired")
    return examined


def _is_ours(app: Celery, headers: Mapping[str, Any]) -> bool:
    """Whether a message has to be signed, if any has: also one with a header of ours for a task that is plain here.

    Newer code may have made that idempotent.
    """
    return isinstance(_task_of(app, headers), IdempotentTask) or any(
        is_our_header(each) and each != SIGNATURE_HEADER for each in headers
    )


def _task_of(app: Celery, headers: Mapping[str, Any]) -> Any:
    return app.tasks.get(name) if isinstance(name := headers.get("task"), str) else None


def _forged(app: Celery, message: Message) -> Examined | None:
    """Why a message is not believed to be this application's: UNSIGNED, or ALTERED.

    What is not signed of it has to be as we send it: else somebody has added that to a copy, which belongs to no operation.
    """
    headers, settings = message.headers, runtime_of(app).settings
    if not settings.message_secrets:
        return None
    if _is_as_sent(message) and signed_at(headers, message.body, settings.message_secrets) is not None:
        return _added(app, message)
    if headers.get(SIGNATURE_HEADER) is not None:
        return Examined(ALTERED)
    until = settings.unsigned_until
    return None if until is not None and datetime.now(UTC) < until else Examined(UNSIGNED)


def _is_as_sent(message: Message) -> bool:
    """Whether the body is read as it was signed: what decides about that is not signed."""
    encoding = message.content_encoding
    return message.content_type == "application/json" and encoding in _ENCODINGS and not message.errors


def _added(app: Celery, message: Message) -> Examined | None:
    headers = message.headers
    if (why := unreadable(message.properties, message.delivery_info)) is not None:
        return Examined(ALTERED, detail=why)
    if headers.get(REFUSED_HEADER) is not None:
        return None
    found = (*unfit(headers, app.timezone), *misplaced(headers))
    # what is covered was signed as it is, by older code, which did not refuse it
    return next((Examined(ALTERED, detail=name) for name, _ in found if not is_covered(name)), None)


def _calls_others(name: str, headers: Mapping[str, Any], payload: Any) -> bool:
    """Whether a plain task's message has its worker call other tasks, in the application's name: after it, or as its arguments say."""
    _, _, embed = payload
    # what the body does not name, Celery takes from the headers
    called = {each: headers.get(each) for each in _FOLLOWERS} | (embed or {})
    return any(called[each] for each in _FOLLOWERS) or name in _CALLERS


def _may_be_deep(body: Any) -> bool:
    """A cheap look: few brackets cannot be nested deeply."""
    text = body.encode("utf-8", "replace") if isinstance(body, str) else bytes(body or b"")
    return text.count(b"[") + text.count(b"{") > BODY_DEPTH


def _is_row_of_another(app: Celery, headers: Mapping[str, Any]) -> bool:
    """Whether another application's relay has published this from its outbox: its own workers are to run it.

    A message that a caller has sent directly belongs to the application that has the queue.
    """
    service = headers.get(SERVICE_HEADER)
    return OUTBOX_HEADER in headers and isinstance(service, str) and service != runtime_of(app).settings.service


def _is_envelope(payload: object) -> bool:
    match payload:
        case [list(), dict(), dict() | None]:
            return True
    return False


def _named(task: IdempotentTask, payload: Any, headers: Mapping[str, Any]) -> Examined:
    args, kwargs, _ = payload
    try:
        named = task.named_by(args, kwargs, headers)
    except MissingKey:
        return Examined("missing_key", task)
    except WrongCell:
        return Examined(OTHER_CELL, task)
    except InvalidArguments as error:
        return Examined("invalid_arguments", task, detail=str(error))
    except CallRefused:
        return Examined("invalid_key", task)
    except SettingsError:
        return Examined(None)  # not the message's fault
    except Exception:  # the application's own key function
        return Examined("invalid_key", task)
    return Examined(None, task, named.id, named.arguments)
