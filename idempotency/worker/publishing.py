"""A call's message for the outbox, put together and announced by Celery as if it were sent.

Tracing tools add their headers to a message while Celery sends it: OpenTelemetry in the signal `before_task_publish`,
Sentry and others around `Celery.send_task`. So `enqueue` goes through both, with a producer that hands the message to
the outbox. Both signals are sent in the caller's thread, `after_task_publish` once the row is written: what a tool opens
in the first (a span, say), it closes in the second. The caller's transaction may still be rolled back; the relay sends
no signal.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

from celery import Celery, Task
from celery.exceptions import AlwaysEagerIgnored

from ..errors import InvalidArguments, SettingsError
from ..wire.message import Message
from .using import check_arrival

Write = Callable[[Message], object]


class _OutboxProducer:
    """What Celery is given as its producer: it publishes by `write`."""

    # Celery translates a broker connection's errors; here there is none.
    connection = SimpleNamespace(_reraise_as_library_errors=nullcontext)

    def __init__(self, app: Celery, write: Write) -> None:
        self._app = app
        self._write = write

    def publish(self, body: Any, *, headers: Mapping[str, Any] | None = None, **options: Any) -> None:
        if not isinstance(body, tuple):
            raise SettingsError("task_protocol: must be 2, which workers accept, got 1")
        message = Message.published(body, headers or {}, **options)
        _check_headers(message.headers)
        check_arrival(self._app, message.headers)
        self._write(message)


def publish(
    task: Task,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    write: Write,
    *,
    headers: Mapping[str, Any],
    **options: Any,
) -> None:
    """Compose the message of this call, with what receivers add to its headers, and `write` it.

    `options` are those of `apply_async`, except that the message has no `eta`. Raises `InvalidArguments` for a header
    that is not JSON, or that a worker would refuse, `SettingsError` for another protocol, and what `write` raises.
    """
    with _eagerness_ignored(task.app):
        task.app.send_task(
            task.name,
            args,
            kwargs,
            task_type=task,
            producer=_OutboxProducer(task.app, write),
            # Celery would ask the result backend to wait for the result; the caller has a Handle for that.
            ignore_result=True,
            headers={**headers, "ignore_result": task.ignore_result},
            result_cls=lambda task_id: SimpleNamespace(id=task_id),
            add_to_parent=False,
            # the event of `task_send_sent_event`, which only a broker can pass on
            event_dispatcher=SimpleNamespace(publish=lambda *_, **__: None),
            retry=False,
            **options,
        )


def _check_headers(headers: Mapping[str, Any]) -> None:
    if _is_json(headers):
        return
    name, value = next((name, value) for name, value in headers.items() if not _is_json({name: value}))
    raise InvalidArguments(f"headers: {name}: must be JSON, got {type(value).__name__}")


def _is_json(headers: Mapping[str, Any]) -> bool:
    try:
        json.dumps(headers)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


@contextmanager
def _eagerness_ignored(app: Celery) -> Iterator[None]:
    """Without Celery's warning that `task_always_eager` has no effect: an enqueued message is always for a worker."""
    if not app.conf.task_always_eager:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AlwaysEagerIgnored)
        yield
