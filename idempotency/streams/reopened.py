"""Operations that a person has opened again: run from what their dead letters have kept, beside the order of their partitions."""

from __future__ import annotations

import threading
import time

from ..attempt.policy import Policy
from ..attempt.runtime import Runtime
from ..errors import IdempotencyError
from ..observe.logs import log
from ..store import stream_letters
from ..store.statements import describe
from ..wire.keys import OperationId
from .alone import handle_alone
from .declaring import Stream
from .message import from_kept
from .preparing import Prepared, prepare

# Seconds between two looks, and how many are run at a time.
PAUSE, LIMIT = 3.0, 50


class Reopened:
    """What people have opened again of a stream, until `stop` is set."""

    def __init__(self, runtime: Runtime, stream: Stream, policy: Policy, stop: threading.Event) -> None:
        self._runtime = runtime
        self._stream = stream
        self._policy = policy
        self._stop = stop
        self._look_at = 0.0
        # Those that this code cannot run: other code may, after a restart.
        self._unreadable: set[OperationId] = set()
        # Whose operations are looked for, where this role sees those of one tenant at a time.
        self.tenants = {runtime.settings.tenant}

    def run_those_due(self) -> None:
        """Run them, once in a while. Raises SQLAlchemy's errors."""
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + PAUSE
        task, service = self._stream.task, self._runtime.settings.service
        with self._runtime.autocommit(*self.tenants) as connection:
            # beyond those that are there each time
            rows = stream_letters.reopened(connection, service, task, limit=LIMIT + len(self._unreadable))
        for row in rows:
            if self._stop.is_set():
                return
            id = OperationId(row.tenant, task, row.key)
            if id not in self._unreadable:
                self._run(id, row.headers or "")

    def _run(self, id: OperationId, kept: str) -> None:
        if (prepared := self._prepared(id, kept)) is None:
            self._unreadable.add(id)
            return
        try:
            handle_alone(self._runtime, self._stream, self._policy, prepared, None)
        except IdempotencyError as error:  # in doubt for long, or stored by newer code: the next look tries again
            log.warning("stream_message_waits", stream=self._stream.name, error=str(error))

    def _prepared(self, id: OperationId, kept: str) -> Prepared | None:
        """The message, if this code takes it for the same operation: its key or tenant may be read otherwise now."""
        why = None
        try:
            prepared = prepare(self._stream, from_kept(kept), self._runtime.settings)
            if isinstance(prepared, Prepared) and prepared.delivery.id == id:
                return prepared
        except ValueError as error:
            why = describe(error)
        log.error("stream_letter_unreadable", stream=self._stream.name, key=id.key, error=why)
        return None
