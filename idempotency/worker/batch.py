"""A batch of a task, in a process of the pool: what is plain is claimed or runs together; then Celery traces each message.

So results, signals, links and logs are as without a batch: the trace of a message whose operation is completed finds that
it is, and the trace of any other runs it alone, under its claim if it has one.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from billiard.exceptions import SoftTimeLimitExceeded
from billiard.pool import soft_timeout_sighandler
from celery import current_app
from kombu.serialization import loads as loads_message
from kombu.serialization import prepare_accept_content

from ..application import runtime_of
from ..attempt.giving_back import give_back
from ..attempt.heartbeat import JobTime
from ..attempt.policy import Policy
from ..observe.logs import log
from .prepared import BUDGET, Prepared, prepare, prepared_in
from .waiting import Budget, is_stopping

if TYPE_CHECKING:
    from .task import IdempotentTask

# What the pool is given of a message: its id, headers, body, content type and encoding.
Call = tuple[str, dict[str, Any], Any, str | None, str | None]
# What Celery's trace returns for it.
Traced = tuple[int, Any, float]
# A message's id, headers and decoded body.
Decoded = tuple[str, dict[str, Any], Any]
# Of the job's shorter time limit: after this share no message is begun, for the pool's clock started before ours.
BEGIN_WITHIN = 0.9
# What billiard turns into an exception in a process of the pool: a person's `revoke(terminate=True)`, the end of a worker that does
# not wait, and by SIGUSR1 the soft time limit.
ENDING = (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1)


def run_batch(
    trace: Callable[..., Traced], name: str, calls: Sequence[Call], limit: float | None
) -> list[Traced | None]:
    """Run these messages of a task, together where that is possible, and trace each. Returns that; None: a message comes again.

    `limit`: the job's shorter time limit, in seconds; None: it has none.
    """
    app = current_app._get_current_object()
    task, accept = app.tasks[name], prepare_accept_content(app.conf.accept_content)
    job = JobTime(math.inf if limit is None else time.monotonic() + BEGIN_WITHIN * limit)
    decoded = [
        (id, request, _decoded(body, content_type, encoding, accept))
        for id, request, body, content_type, encoding in calls
    ]
    results: list[Traced | None] = [None] * len(calls)
    budget = Budget(limit, job=job)
    for _, request, _ in decoded:
        request[BUDGET] = budget
    try:
        with suppress(SoftTimeLimitExceeded), _noting_signals(job):
            if not is_stopping() and not _try_to_prepare(task, decoded, job):
                return results
            for place in _in_order(decoded, job):
                job.restart()
                id, request, body = decoded[place]
                results[place] = _traced(
                    trace, name, id, request, calls[place][2:] if body is None else (body, None, None)
                )
    finally:
        prepared = [each for _, request, _ in decoded if (each := prepared_in(request)) is not None]
        try:
            _give_back_rest(task, prepared)
        except SoftTimeLimitExceeded:  # raised once for a job
            _give_back_rest(task, prepared)
        except SystemExit:  # and so is this one, by the SIGTERM of a worker that is told to end at once
            _give_back_rest(task, prepared)
            raise
    if left := results.count(None):
        log.warning("batch_not_run", task=name, many=left)
    return results


@contextmanager
def _noting_signals(job: JobTime) -> Iterator[None]:
    """Note on the job, in a process of its own, that a signal has come to end it: a body may handle what that raises once."""
    if signal.getsignal(signal.SIGUSR1) is not soft_timeout_sighandler:  # not in a process of Celery's pool
        yield
        return
    # what ends the process, as a second SIGTERM, or is ignored, stays so
    before = {number: handler for number in ENDING if callable(handler := signal.getsignal(number))}

    def note(number: int, frame: FrameType | None) -> None:
        job.is_interrupted = True
        before[signal.Signals(number)](number, frame)

    try:
        for number in before:
            signal.signal(number, note)
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is note:
                signal.signal(number, handler)


def _try_to_prepare(task: IdempotentTask[..., Any], decoded: Sequence[Decoded], job: JobTime) -> bool:
    """Returns False if not one of them can be looked at now: all messages come again."""
    try:
        prepare(task, [(request, body) for _, request, body in decoded if body is not None], job)
    except SoftTimeLimitExceeded:
        raise
    except Exception:
        log.exception("batch_not_prepared", task=task.name, many=len(decoded))
        return False
    return True


def _in_order(decoded: Sequence[Decoded], job: JobTime) -> Iterator[int]:
    """The places of the messages to be traced, first of those that have ended: what follows them waits for no other.

    Until a limit is near or has come: it is raised once for a job, so what went on after that would have none. In a worker that
    is told to stop, no further body is begun: Celery gives back what it has only fetched, too.
    """
    prepared = [prepared_in(request) for _, request, _ in decoded]
    ended = [each is not None and each.answer.outcome is not None for each in prepared]
    for place in sorted(range(len(decoded)), key=lambda place: not ended[place]):
        if job.is_over or (is_stopping() and not ended[place]):
            return
        yield place


def _traced(
    trace: Callable[..., Traced], name: str, id: str, request: dict[str, Any], body: Sequence[Any]
) -> Traced | None:
    try:
        return trace(name, id, request, *body)
    except SoftTimeLimitExceeded:
        raise
    except Exception:
        log.exception("batch_not_traced", task=name, task_id=id)
        return None


def _give_back_rest(task: IdempotentTask[..., Any], prepared: Sequence[Prepared]) -> None:
    """Give back the claims of messages whose body was not entered, and renew none any more."""
    if not prepared:
        return
    runtime = runtime_of(task.app)
    try:
        not_begun = [
            (each.delivery, each.answer) for each in prepared if not each.has_begun and not each.answer.outcome
        ]
        give_back(runtime, not_begun, Policy.of(task, runtime.settings))
    except SoftTimeLimitExceeded:
        raise
    except Exception:
        log.exception("giving_back_failed", task=task.name)
    finally:
        for each in prepared:
            runtime.heartbeat.drop(each.answer.token)


def _decoded(body: Any, content_type: str | None, encoding: str | None, accept: Any) -> Any:
    """The arguments and what follows; None: it cannot be read, which Celery's trace will say."""
    if not content_type:
        return body
    try:
        return loads_message(body, content_type, encoding, accept=accept)
    except SoftTimeLimitExceeded:
        raise
    except Exception:
        return None
