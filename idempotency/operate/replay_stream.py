"""Replay: a message of a stream, which its letter alone has."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row

from ..errors import ReplayRefused
from ..framework import framework
from ..reasons import OTHER_CELL
from ..settings import Settings
from ..store import dead_letters, stream_letters
from ..streams.declaring import TASK_PREFIX, stream_of
from ..streams.refusing import EXPLANATIONS, WITHOUT_OPERATION
from ..streams.reopened import same_operation
from ..wire.keys import OperationId


def is_refused(row: Row[Any]) -> bool:
    """Whether this letter is of a message that was refused for its tenant's cell: it names an operation that has not begun by it."""
    return (row.source, row.reason) == ("broker", OTHER_CELL) and (row.task or "").startswith(TASK_PREFIX)


def check_has_message(connection: Connection, letter: int, settings: Settings) -> None:
    """Raise `ReplayRefused` for a message of a stream that a person has cancelled, and that its stream has not come to since.

    Also for one that names no operation, because it has no key, say, and for one that this application's code takes for another
    operation by now, or for none: nothing would run it.
    """
    row = dead_letters.show(connection, letter)
    if row.source == "broker" and row.reason in WITHOUT_OPERATION and (row.queue or "").startswith(TASK_PREFIX):
        raise ReplayRefused(
            f"dead letter {letter}: {EXPLANATIONS[row.reason]}, so it names no operation; it can only be discarded"
        )
    if not (row.task or "").startswith(TASK_PREFIX) or not (row.source == "operation" or is_refused(row)):
        return
    if row.headers == stream_letters.WITHOUT_MESSAGE:
        raise ReplayRefused(
            f"dead letter {letter}: its message is not known yet; `{framework().command} stream` adds it when it comes there"
        )
    if (stream := stream_of(row.task)) is None:
        return
    found = same_operation(stream, OperationId(row.tenant, row.task, row.key), row.headers or "", settings)
    if isinstance(found, str):
        raise ReplayRefused(f"dead letter {letter}: to the present code of {row.task}, {found}; nothing would run it")
