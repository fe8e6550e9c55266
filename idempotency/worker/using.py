"""A task with the options of one call, so that its arguments stay the function's own, to a type checker as well.

Python's types cannot add an option to a function's parameters (PEP 612), so a type checker refuses
`enqueue(session, …, countdown=60)`, although it works.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, TypedDict
from uuid import UUID

from celery import Celery
from typing_extensions import ParamSpec

from ..attempt.endings import MAX_DELAY
from ..errors import InvalidArguments
from ..handle import Handle, R_co
from ..store.callers import AsyncCaller, Caller, Pending
from ..wire.fitness import first_unfit
from ..wire.limits import too_much_to_send

if TYPE_CHECKING:
    from celery.result import AsyncResult

    from .calls import KeyedTask

# The parameters of a task's function. Without a typed decorator (`idempotent_task`) they are not known: anything goes.
P = ParamSpec("P", default=...)

# Options by which a worker, or the broker, would drop the message: Celery's, and the property of AMQP.
DROPPING = ("expires", "expiration")
# The headers that Celery makes of options as they are.
_HEADERS = {
    "task_id": "id", "shadow": "shadow", "root_id": "root_id", "parent_id": "parent_id", "group_id": "group",
    "stamped_headers": "stamped_headers",
}  # fmt: skip


class CallOptions(TypedDict, total=False):
    """Options of one call: countdown in seconds, eta as an aware datetime. The last one only for `enqueue`."""

    countdown: float
    eta: datetime
    priority: int
    queue: str
    task_id: str
    headers: Mapping[str, Any]
    idempotency_key: str | UUID
    tenant: str
    ordering_key: str


@dataclass(frozen=True, slots=True)
class Using(Generic[P, R_co]):
    """Returned by `task.using(...)`."""

    _task: KeyedTask[P, R_co]
    _options: CallOptions

    def enqueue(self, session: Caller, /, *args: P.args, **kwargs: P.kwargs) -> Handle[R_co]:
        """Send the task with the caller's commit, as `task.enqueue` does."""
        return self._task._enqueue(session, args, kwargs, self._options)

    async def aenqueue(self, session: AsyncCaller, /, *args: P.args, **kwargs: P.kwargs) -> Handle[R_co]:
        """Send the task with an async caller's commit, as `task.aenqueue` does."""
        pending = Pending()
        handle = self.enqueue(pending, *args, **kwargs)
        await pending.send(session)
        return handle

    def delay(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[R_co]:
        """Send the task now, as `task.apply_async` does. Raises `InvalidArguments` for an `ordering_key`."""
        if "ordering_key" in self._options:
            raise InvalidArguments("ordering_key: only messages that are enqueued have an order")
        return self._task.apply_async(args, kwargs, **self._options)


def check_kept(options: Mapping[str, Any]) -> None:
    """Raise `InvalidArguments` for an option by which the message could be dropped."""
    for name in DROPPING:
        if options.get(name) is not None:
            raise InvalidArguments(f"{name}: an accepted operation is never dropped; cancel it instead")


def check_arrival(app: Celery, headers: Mapping[str, Any]) -> None:
    """Raise `InvalidArguments` for headers that no worker would take, or that are too many to be sent."""
    why = too_much_to_send(headers) or first_unfit(headers, app.timezone)
    if why is not None:
        raise InvalidArguments(why)


def check_sent(app: Celery, options: Mapping[str, Any], headers: Mapping[str, Any]) -> None:
    """Raise `InvalidArguments` for options of a call by which its message could be dropped, or with which it would be refused.

    `headers`: the caller's, which Celery adds to those that it makes of the options.
    """
    check_kept(options)
    made = {header: options.get(option) for option, header in _HEADERS.items()}
    made["timelimit"] = [options.get("time_limit"), options.get("soft_time_limit")]
    if isinstance(eta := options.get("eta"), str):
        made["eta"] = eta
    check_arrival(app, {**made, **headers})


def checked_delay(countdown: object, eta: object) -> tuple[float, datetime | None]:
    if countdown is None:
        countdown = 0.0
    if not isinstance(countdown, int | float) or not 0 <= countdown <= MAX_DELAY:
        raise InvalidArguments(f"countdown: must be between 0 and {MAX_DELAY:.0f} seconds, got {countdown!r}")
    if eta is not None and (not isinstance(eta, datetime) or eta.tzinfo is None):
        raise InvalidArguments("eta: must be a datetime with a time zone")
    return float(countdown), eta


def check_options(app: Celery, *, task_id: str, queue: object = None, priority: object = None) -> None:
    """Refuse here what would otherwise fail in the relay, long after the caller's commit."""
    if not 0 < len(task_id.encode()) <= 255:
        raise InvalidArguments(f"task_id: at most 255 bytes, got {len(task_id.encode())}")
    if queue is not None and queue not in app.amqp.queues:
        raise InvalidArguments(f"queue: {queue!r} is not among this application's task_queues")
    if priority is not None and (type(priority) is not int or not 0 <= priority <= 255):
        raise InvalidArguments(f"priority: must be an integer from 0 to 255, got {priority!r}")
