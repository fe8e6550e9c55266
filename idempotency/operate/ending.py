"""How an operation ends when a person ends it: as after a failed attempt, with its task's undos and `on_failed`.

Shared by cancel and resolve. Nothing here writes an audit row: their functions do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from celery import Celery
from sqlalchemy import Connection, Row

from ..attempt import conclusions
from ..attempt.conclusions import Concluded, Entry
from ..attempt.policy import Policy
from ..attempt.runtime import Runtime
from ..errors import ChangeRefused, PermanentError, TransactionEnded
from ..reasons import ON_FAILED_ERROR
from ..store import stream_letters
from ..store.statements import describe
from ..streams.declaring import Stream, stream_of
from ..streams.message import from_kept
from ..wire import encoding, keys
from ..wire.keys import OperationId
from ..wire.message import Message
from .change import called

Answer = TypeVar("Answer")

# Why nothing of the task runs with `without_task`: that is what the person asked for, so nothing has failed.
NO_TASK = "no task of this name is known to this process"


def skipping_what_breaks(end: Callable[[str | None], Answer]) -> Answer:
    """Call `end(None)`. If an undo or `on_failed` ends its transaction, call it again with the reason to skip them."""
    try:
        return end(None)
    except TransactionEnded as broken:
        return end(str(broken))


def known_task(app: Celery, name: str, *, without_task: bool) -> Any:
    """The task of this name, or the stream. Raises `ChangeRefused` if the application has none, unless `without_task`: then None."""
    app.loader.import_default_modules()
    task = stream_of(name) or app.tasks.get(name)
    if hasattr(task, "retention_failed"):
        return task
    if not without_task:
        raise ChangeRefused(
            f"{name}: this application has no such task; name the one that has it with -A, or give --without-task: "
            "then neither its undos nor its on_failed run"
        )
    return None


def task_of(
    app: Celery, runtime: Runtime, connection: Connection, row: Row[Any], *, without_task: bool
) -> tuple[Policy, dict[str, Any], str | None]:
    """The task's policy, the operation's arguments by name, and why they could not be read. Raises `ChangeRefused`."""
    task = known_task(app, row.task, without_task=without_task)
    if isinstance(task, Stream):
        return _policy_of(task, runtime, connection, OperationId(row.tenant, row.task, row.key))
    if task is None:
        return Policy.by_settings(runtime.settings), {}, NO_TASK
    policy = Policy.of(task, runtime.settings)
    try:
        args, kwargs, _ = encoding.loads(Message.from_text(row.message).body)
        return policy, keys.bind(task.signature_of_run, args, kwargs), None
    except Exception as error:  # a message of another version
        return policy, {}, describe(error)


def _policy_of(
    stream: Stream, runtime: Runtime, connection: Connection, id: OperationId
) -> tuple[Policy, dict[str, Any], str | None]:
    """The same of a stream, whose messages are with the broker, and with the dead letters of those that have failed before.

    Raises `ChangeRefused` if its `on_failed` would have to be called without the event.
    """
    policy = stream.policy(runtime.settings)
    if policy.on_failed is None:
        return policy, {}, None
    if (kept := stream_letters.kept_message(connection, id)) is None:
        raise ChangeRefused(
            f"{called(id)}: its on_failed takes the event, which only the stream has until the message has failed; let it end"
        )
    try:
        return policy, {"event": stream.event(from_kept(kept))}, None
    except Exception as error:  # other code than the message's
        return policy, {}, describe(error)


def conclude(
    connection: Connection,
    id: OperationId,
    row: Any,
    error: PermanentError,
    policy: Policy,
    arguments: dict[str, Any],
    skip: str | None,
    *,
    entries: Mapping[str, Entry] | None = None,
) -> Concluded:
    """End the operation as a failed attempt does. `skip`: why neither undos nor `on_failed` run."""
    concluded = conclusions.conclude(
        connection,
        id,
        error,
        entries=row.effects if entries is None else entries,
        arguments=arguments,
        attempts=row.attempts,
        on_failed=policy.on_failed,
        skip=skip,
    )
    if skip is None:
        return concluded
    return replace(concluded, reason=concluded.reason if skip == NO_TASK else ON_FAILED_ERROR, broken=skip)
