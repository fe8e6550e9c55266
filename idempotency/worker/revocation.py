"""Celery's revoke, for operations: an accepted operation is never dropped, it ends as a dead letter.

Celery acknowledges a revoked message without running it, which would leave its record open forever, or leave none at
all. So a revoked message is delivered with a mark, and its claim fails the operation as `revoked` instead of running
the body: `on_failed`, the record and the dead letter are one commit, and an operation that has ended stays as it is.
A duplicate of an operation that runs, or was accepted, under another task id is dropped if it is revoked or terminated, and
changes nothing.
When a running attempt is terminated, its record is marked before the message is acknowledged; the first claim after
its holder is gone ends it. Without an answer within seconds the message comes back, and this worker remembers the revoke.

What Celery says of a revoked task follows once the operation has ended: the state REVOKED, its event and its signal.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

from billiard.einfo import ExceptionWithTraceback
from celery.app.task import Context
from celery.exceptions import Ignore, Reject
from celery.worker import request, state
from sqlalchemy.pool import NullPool

from ..application import runtime_of
from ..attempt import claim
from ..observe.logs import log
from ..reasons import REVOKED
from ..store import claims, ends
from ..store.answers import Claimed, Completed, Failed, Foreign, Mismatch, Stale
from ..store.connections import act_for, make_engine
from ..wire.headers import MESSAGE_VERSION, REVOKED_HEADER, VERSION_HEADER, all_headers
from .calls import KeyedTask
from .deliveries import delivery_of

# Seconds until an answer counts as lost, and until a lock is given up: the worker's main process serves every other task, too,
# and a COMMIT may wait for a standby that is away.
ANSWERED_WITHIN, LOCKED_WITHIN = 5.0, 3.0
# Seconds without a question after one that took longer than `QUICK` in vain: a batch is terminated a message at a time.
REST, QUICK = 60.0, 1.0
_rests_until = 0.0


def _raised(exc_info: Any) -> BaseException:
    """The error, which the pool wraps with its traceback."""
    error: BaseException = exc_info.exception
    return error.exc if isinstance(error, ExceptionWithTraceback) else error


class KeyedRequest(request.Request):
    """Celery's request of a task with keys, in the worker's main process. Its context's `headers` are all headers."""

    def __init__(self, message: Any, **options: Any) -> None:
        super().__init__(message, **options)
        # Celery's rule for what counts as a sender's header, without its exception for a header called `headers`.
        own = Context({name: value for name, value in self._request_dict.items() if name != "headers"}).headers
        received = all_headers({**(own or {}), **_nested(self._request_dict)})
        # code that passes these headers on does not mean the key in them: see `senders_headers`
        self._request_dict["headers"] = {VERSION_HEADER: MESSAGE_VERSION} | received

    def on_failure(self, exc_info: Any, *args: Any, **kwargs: Any) -> Any:
        """A message that is rejected becomes a dead letter. Celery since 5.7 would call that a failure, and send the errbacks of what may have happened."""
        error = _raised(exc_info)
        if isinstance(error, Reject) and not error.requeue:
            state.task_ready(self)
            return self.reject(requeue=False)
        return super().on_failure(exc_info, *args, **kwargs)

    def on_timeout(self, soft: bool, timeout: float) -> None:
        """After a hard limit the message comes back, and the operation goes on: no failure, whose errbacks might undo what it has done."""
        if soft or state.should_terminate:
            super().on_timeout(soft, timeout)
            return
        state.task_ready(self)
        request.error("Hard time limit (%ss) exceeded for %s[%s]", timeout, self.name, self.id)
        self.reject(requeue=True)

    def info(self, safe: bool = False) -> Any:
        """What remote control shows, `celery inspect active` and Flower's pages: never arguments."""
        return super().info(safe=True)


class Request(KeyedRequest):
    """That of an idempotent task, which is never dropped."""

    is_in_batch = False

    def revoked(self) -> bool:
        super().revoked()
        return bool(self._already_revoked)

    def on_failure(self, exc_info: Any, *args: Any, **kwargs: Any) -> Any:
        error = _raised(exc_info)
        if isinstance(error, Ignore) and error.args == (REVOKED,):
            return super()._announce_revoked(REVOKED, False, None, False)  # acknowledges, too
        return super().on_failure(exc_info, *args, **kwargs)

    def _announce_cancelled(self, *args: Any, **options: Any) -> None:
        """When the connection is lost. Of a batch no retry is announced: its operation may have ended, and its message comes back."""
        if not self.is_in_batch:
            super()._announce_cancelled(*args, **options)
            return
        state.task_ready(self)
        self.send_event("task-cancelled")
        self._already_cancelled = True

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        if not terminated:
            self._request_dict["headers"][REVOKED_HEADER] = True
            return
        if self._is_marked():
            super()._announce_revoked(reason, terminated, signum, expired)
        else:  # its record answers it, or it ends as revoked: this worker remembers the revoke
            self.reject(requeue=True)

    def _is_marked(self) -> bool:
        """Whether its operation will end as revoked without this message, as far as Postgres has answered."""
        global _rests_until
        if (began := time.monotonic()) < _rests_until:
            log.warning(
                "revoke_failed",
                task=self.name,
                task_id=self.id,
                error="not asked: there was no answer about another one",
            )
            return False
        try:
            return not revoke_terminated(self._task, self._context)
        except Exception:
            log.exception("revoke_failed", task=self.name, task_id=self.id)
            if time.monotonic() - began > QUICK:
                _rests_until = time.monotonic() + REST
            return False


def _nested(headers: dict[str, Any]) -> dict[str, Any]:
    return {"headers": headers["headers"]} if headers.get("headers") else {}


def revoke_terminated(task: KeyedTask, context: Any) -> bool:
    """Mark the operation whose attempt Celery terminates, so that its next claim ends it.

    Returns whether its message has to come back for what its record answers: the operation has ended, or another call has the
    key. Raises what Postgres, or the lack of its answer, raises: it may be marked all the same.
    """
    runtime, delivery = runtime_of(task.app), delivery_of(task, context)
    task.check_cell(delivery.id)
    engine = make_engine(
        runtime.settings,
        session={"lock_timeout": int(LOCKED_WITHIN * 1000)},
        patience=ANSWERED_WITHIN,
        poolclass=NullPool,
    )
    with engine.begin() as connection:
        act_for(connection, [delivery.id.tenant])
        service, also = runtime.settings.service, delivery.also
        given = (connection, delivery.id, delivery.fingerprint)
        if claims.is_anothers(*given, delivery.task_id, service=service, also=also):
            return False
        # The attempt may have been killed before its claim, with no record to be marked.
        answer = claim.ask(runtime, connection, delivery, secrets.token_hex(16))
        claims.revoke(*given, service=service, remembered=False, also=also)
        if isinstance(answer, Claimed):
            ends.release(connection, answer, delay=0.0, error=None, give_back=True)
    return isinstance(answer, Completed | Failed | Mismatch | Foreign | Stale)
