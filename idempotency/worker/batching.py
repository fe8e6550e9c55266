"""Batches of a task, in the worker's main process: messages are gathered, and one job of the pool runs them together.

    @app.task(base=IdempotentTask, key="{entry_id}", batch=100)

Gathered is what Celery would send to the pool now, so events and revokes are Celery's own. What has an `eta`, or a task with a
`rate_limit`, goes to the pool by Celery's own timers and buckets, past this: each of its messages is a job by itself. The job
returns for each message what Celery's trace of it has returned, and each is acknowledged by that. A message that comes
again never joins a batch, nor does a later attempt: one that kills its process takes others with it once at most.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

from celery.app.trace import fast_trace_task, trace_task_ret
from celery.worker import state
from celery.worker.strategy import default

from ..observe.logs import log
from ..queues import queue_of
from ..wire.headers import ORIGIN_HEADER
from .batch import Call, run_batch

if TYPE_CHECKING:
    from .task import IdempotentTask


# What RabbitMQ takes as a prefetch count.
MOST_AHEAD = 65_535
# Origins of messages whose operation has had an attempt. A relay sends each as a new message, which the broker does not mark as
# redelivered. Not `resend`: most of what the broker has lost has had none.
LATER = frozenset(("retry", "recover", "replay"))


def strategy(task: IdempotentTask[..., Any], app: Any, consumer: Any, **options: Any) -> Callable[..., Any]:
    """Celery's strategy for a task's messages, with one difference: what it would send to the pool is gathered first."""
    # every process of the pool can then have a whole batch, and the next one waits here
    processes = getattr(consumer.pool, "num_processes", 1) or 1
    if consumer.initial_prefetch_count and _is_consumed(app, task):  # 0: the worker takes as many as there are
        wanted = min(task.batch * (processes + 1), MOST_AHEAD)
        consumer.initial_prefetch_count = max(consumer.initial_prefetch_count, wanted)
    handler: Callable[..., Any] = default(task, app, _Gathering(task, consumer), **options)
    return handler


def _is_consumed(app: Any, task: IdempotentTask[..., Any]) -> bool:
    """Whether this worker takes messages from the queue that the task's usually go to."""
    try:
        return queue_of(app, task.name, getattr(task, "queue", None)) in app.amqp.queues.consume_from
    except Exception:  # a route that wants arguments
        return True


class _Gathering:
    """A worker's consumer as a strategy sees it, which collects a task's requests and sends them to the pool together.

    A batch takes its place in Celery's line for the pool when it is full, or when its first message has waited for `batch_wait`;
    until a process takes it, more may join.
    """

    def __init__(self, task: IdempotentTask[..., Any], consumer: Any) -> None:
        self._task = task
        self._consumer = consumer
        self._job: _Job | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)

    def on_task_request(self, request: Any) -> None:
        if not _may_join(self._task, request):
            self._consumer.on_task_request(request)
            return
        job = self._job
        if job is None or not job.join(request):
            self._job = job = _Job(self._task, [request], getattr(self._consumer, "controller", None))
            self._consumer.timer.call_after(self._task.batch_wait, _stand_in_line, (job.waits, self._consumer))
        if job.is_full:
            job.stand_in_line(self._consumer)


def _may_join(task: IdempotentTask[..., Any], request: Any) -> bool:
    """Whether it is a first delivery, as far as the main process can tell, without a time limit of its own.

    Celery writes those of its task into each message.
    """
    if (request.delivery_info or {}).get("redelivered") or request.request_dict.get(ORIGIN_HEADER) in LATER:
        return False
    limits = zip(request.time_limits, (task.time_limit, task.soft_time_limit), strict=True)
    return all(not limit or limit == of_task for limit, of_task in limits)


def _stand_in_line(waiting: list[_Job], consumer: Any) -> None:
    """By a timer, which keeps no batch in memory that stands in line already."""
    for job in tuple(waiting):
        job.stand_in_line(consumer)


class _Job:
    """The job of the pool for one batch."""

    def __init__(self, task: IdempotentTask[..., Any], requests: Sequence[Any], controller: Any = None) -> None:
        self._task = task
        self._requests: list[Any] = []
        self._controller = controller
        self._is_green = False
        self._signals: set[int] = set()
        # with some pools, timers run in a thread of their own
        self._lock = threading.Lock()
        self._stands_in_line = self._has_begun = False
        # itself, until it stands in line
        self.waits = [self]
        for request in requests:
            self._add(request)

    @property
    def is_full(self) -> bool:
        return len(self._requests) >= self._task.batch

    def join(self, request: Any) -> bool:
        """Returns whether it was not too late, and there was room."""
        with self._lock:
            if self._has_begun or self.is_full:
                return False
            self._add(request)
            return True

    def _add(self, request: Any) -> None:
        self._requests.append(request)
        request.is_in_batch = True
        for name in ("cancel", "terminate"):
            setattr(request, name, partial(_signalled, ref(request), name, self._signals))

    def stand_in_line(self, consumer: Any) -> None:
        """Once: Celery waits for a free process of the pool, and then calls `execute_using_pool`."""
        with self._lock:
            stood, self._stands_in_line = self._stands_in_line, True
            self.waits.clear()
        if not stood:
            consumer.on_task_request(self)

    def execute_using_pool(self, pool: Any) -> None:
        """Send it, as Celery's request of one message does."""
        with self._lock:
            self._has_begun = True
        self._tell_each(lambda request: request.revoked())  # marks the message: it is delivered, and ends its operation
        task, first = self._task, self._requests[0]
        self._is_green = getattr(pool, "is_green", False)
        limits = (
            getattr(task, name) or getattr(self._controller, name, None) for name in ("soft_time_limit", "time_limit")
        )
        limit = min(filter(None, limits), default=None)
        trace = fast_trace_task if task.app.use_fast_trace_task else trace_task_ret
        pool.apply_async(
            run_batch,
            args=(trace, task.name, [_call(each) for each in self._requests], limit),
            accept_callback=self._on_accepted,
            timeout_callback=self._on_timeout,
            callback=self._on_traced,
            error_callback=self._on_lost,
            soft_timeout=task.soft_time_limit,
            timeout=task.time_limit,
            correlation_id=first.id,
        )

    def _on_accepted(self, pid: int, time_accepted: float) -> None:
        self._tell_each(lambda request: request.on_accepted(pid, time_accepted))

    def _tell_each(self, tell: Callable[[Any], object]) -> None:
        """What fails in Celery for one (the result backend is away, a header has a wrong form) keeps nothing from the others."""
        for request in self._requests:
            try:
                tell(request)
            except Exception:
                log.exception("batch_not_told", task=self._task.name, task_id=request.id)

    def _on_traced(self, results: Any) -> None:
        # else it is what a thread raised, or how a greenlet ended; a process would have been lost
        if not isinstance(results, list):
            self._on_lost(results)
            return
        for request, traced in zip(self._requests, results, strict=True):
            if traced is None:
                self._put_back(request)
                continue
            # Whatever becomes of this one, the others are acknowledged; if it comes again, its record answers.
            try:
                request.on_success(traced)
            except Exception:
                log.exception("batch_not_acknowledged", task=self._task.name, task_id=request.id)
                self._put_back(request)

    def _on_timeout(self, soft: bool, timeout: float) -> None:
        log.warning("batch_time_limit", task=self._task.name, many=len(self._requests), soft=soft, seconds=timeout)
        if self._is_green and not soft:  # nothing else is said of it: there is no process that is lost
            self._on_lost(None)

    def _on_lost(self, exc_info: Any) -> None:
        """The process was lost or killed: none of these messages is known to be done, and each comes again by itself."""
        error = exc_info.type.__name__ if hasattr(exc_info, "type") else "TimeLimitExceeded"
        log.error("batch_lost", task=self._task.name, many=len(self._requests), error=error)
        for request in self._requests:
            if not request._already_revoked:  # terminated by a person: Celery has announced that one, and no other
                self._put_back(request)

    def _put_back(self, request: Any) -> None:
        """One that cannot be, over a connection that is lost perhaps, keeps no other from its answer."""
        try:
            state.task_ready(request)
            request.reject(requeue=True)
        except Exception:
            log.exception("batch_not_put_back", task=self._task.name, task_id=request.id)


def _signalled(request: ref[Any], name: str, sent: set[int], pool: Any, signal: Any = None, **options: Any) -> None:
    """Celery's way to end one request, with one difference: the process of its batch gets each signal once."""
    found = request()
    if found is not None:
        # one that Celery has kept, for when the pool accepts the request, is that already
        once = pool if isinstance(pool, _SignalsOnce) else _SignalsOnce(pool, sent)
        getattr(type(found), name)(found, once, signal, **options)


class _SignalsOnce:
    """A pool as a request of a batch sees it. All of them are cancelled together when the connection is lost or the worker is
    told to end at once, and a second SIGTERM would interrupt what the first one makes the process give back."""

    def __init__(self, pool: Any, sent: set[int]) -> None:
        self._pool = pool
        self._sent = sent

    def terminate_job(self, pid: int, signal: int) -> None:
        if signal not in self._sent:
            self._sent.add(signal)
            self._pool.terminate_job(pid, signal)


def _call(request: Any) -> Call:
    return request.id, request._request_dict, request._body, request._content_type, request._content_encoding
