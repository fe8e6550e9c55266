"""Operations that a person has opened again: run from what their dead letters have kept, beside the order of their partitions."""

from __future__ import annotations

import time
from collections import deque
from itertools import islice
from typing import Any

from sqlalchemy import Row
from sqlalchemy.exc import DBAPIError

from ..attempt.policy import Policy
from ..attempt.runtime import Runtime
from ..errors import IdempotencyError
from ..observe.logs import log
from ..settings import Settings
from ..store import stream_letters
from ..store.statements import describe, is_refusal
from ..wire.keys import OperationId
from .alone import handle_alone
from .declaring import Stream
from .message import from_kept
from .preparing import Prepared, Refused, prepare

# Seconds between two looks, and how many operations one look finds.
PAUSE, LIMIT = 3.0, 50
# How many tenants are remembered, and for how many of them one look asks: the others have their turn in the next ones.
TENANTS, AT_ONCE = 1000, 100


class Reopened:
    """What people have opened again of a stream."""

    def __init__(self, runtime: Runtime, stream: Stream, policy: Policy) -> None:
        self._runtime = runtime
        self._stream = stream
        self._policy = policy
        self._look_at = 0.0
        # What the last look has found, with what is kept of it.
        self._found: deque[tuple[OperationId, str]] = deque()
        # The last row of a look that has not found all: the next begins behind it, so that those that cannot run keep none from
        # it.
        self._last: Row[Any] | None = None
        # Those that this code cannot run: other code may, after a restart.
        self._unreadable: set[OperationId] = set()
        # Whose operations are looked for, where this role sees those of one tenant at a time: besides the default one's, those
        # whose messages were handled last.
        self._tenants: dict[str, None] = {}
        self._next = 0
        # Of whom a look asks until it has found all.
        self._asked: list[str] = []

    @property
    def is_waiting(self) -> bool:
        """Whether one is known that has not run."""
        return bool(self._found)

    def note(self, tenant: str) -> None:
        """Remember a tenant whose message is handled."""
        self._tenants.pop(tenant, None)
        self._tenants[tenant] = None
        if len(self._tenants) > TENANTS:
            del self._tenants[next(iter(self._tenants))]

    def run_next(self) -> None:
        """Run one of them; look for them once in a while. Raises SQLAlchemy's errors."""
        if not self._found:
            self._look()
        if self._found:
            self._run(*self._found.popleft())

    def _look(self) -> None:
        if time.monotonic() < self._look_at:
            return
        task, service = self._stream.task, self._runtime.settings.service
        if self._last is None:
            self._asked = self._in_turn()
        with self._runtime.autocommit(*self._asked) as connection:
            rows = stream_letters.reopened(connection, service, task, after=self._last, limit=LIMIT)
        self._last = rows[-1] if len(rows) == LIMIT else None
        if self._last is None:
            self._look_at = time.monotonic() + PAUSE
        for row in rows:
            id = OperationId(row.tenant, task, row.key)
            if id not in self._unreadable:
                self._found.append((id, row.headers or ""))

    def _in_turn(self) -> list[str]:
        """The tenants that this look asks for."""
        begin = self._next if self._next < len(self._tenants) else 0
        self._next = begin + AT_ONCE
        return [self._runtime.settings.tenant, *islice(self._tenants, begin, self._next)]

    def _run(self, id: OperationId, kept: str) -> None:
        try:
            if (prepared := self._prepared(id, kept)) is None:
                self._unreadable.add(id)
                return
            handle_alone(self._runtime, self._stream, self._policy, prepared, None)
        except (
            IdempotencyError
        ) as error:  # in doubt for long, stored by newer code, or of no known cell: the next look tries again
            log.warning("stream_message_waits", stream=self._stream.name, error=str(error))
        except DBAPIError as error:
            if not is_refusal(error):
                raise
            log.warning("stream_message_waits", stream=self._stream.name, error=describe(error))

    def _prepared(self, id: OperationId, kept: str) -> Prepared | None:
        """The message, if this code takes it for the same operation: its key or tenant may be read otherwise now."""
        found = same_operation(self._stream, id, kept, self._runtime.settings)
        if isinstance(found, Prepared):
            return found
        log.error("stream_letter_unreadable", stream=self._stream.name, key=id.key, error=found)
        return None


def same_operation(stream: Stream, id: OperationId, kept: str, settings: Settings) -> Prepared | str:
    """The message that a letter has kept, if this code takes it for the operation `id`; otherwise why not, in some words.

    Raises `SettingsError` if it cannot be told which cell its tenant is of.
    """
    try:
        prepared = prepare(stream, from_kept(kept), settings)
    except ValueError as error:
        return describe(error)
    if isinstance(prepared, Refused):
        return f"its message is refused as {prepared.reason}"
    return prepared if prepared.delivery.id == id else "its message has another key or tenant"
