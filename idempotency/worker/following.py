"""What is sent after a task: its callbacks, the next of its chain, its errbacks.

Celery's tracer would send the callbacks and the chain once the task has returned, and take what that raises for the task's own
error: a committed operation would be a failure to its hooks and errbacks, and the refused call would be gone. So they are sent
here, before the task returns: while the broker does not take them, the message comes back. A call that can be seen to be
refused is refused where the whole is sent, and what turns out to be wrong later goes out as it is: the guard of its worker
makes it a dead letter. Errbacks are sent by Celery.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from amqp.exceptions import PreconditionFailed
from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery, Signature, group, signature
from celery.exceptions import Ignore, ImproperlyConfigured, Reject, Retry
from kombu.exceptions import SerializationError

from ..errors import CallRefused, MissingKey, Unanswered, UnsupportedControl
from ..observe.logs import log
from ..store.statements import describe
from ..wire.delivery import NamesItsOperation
from ..wire.fitness import misplaced, unfit
from ..wire.headers import KEY_HEADER, REFUSED_HEADER, TENANT_HEADER, harmless_headers, refused_headers, senders_headers
from ..wire.limits import BODY_LIMIT, too_much_to_send
from . import signed_calls
from .prepared import note_interrupted
from .using import check_sent
from .waiting import is_stopping

if TYPE_CHECKING:
    from .calls import KeyedTask

# Wrong with a signature or the application's settings, whatever the broker says: no such queue, no arguments that fit, a body
# that the broker finds too large.
NEVER_SENT = (CallRefused, ImproperlyConfigured, SerializationError, NotImplementedError, ValueError, TypeError,
              LookupError, AttributeError, PreconditionFailed)  # fmt: skip
# The option of a signature that follows a task in a worker. It never gets into a message.
FOLLOWS = "idempotency_follows"


def first_of(sig: Signature) -> list[Signature]:
    """The signatures that are sent first: their arguments are known. None of an empty chain."""
    match sig.subtask_type:
        case "chord" if isinstance(sig.tasks, Signature):  # frozen: its header is a group, and as such a dictionary
            return first_of(sig.tasks)
        case "group" | "chord":
            return [first for each in sig.tasks for first in first_of(each)]
        case "chain":
            return first_of(sig.tasks[0]) if sig.tasks else []
    return [sig]


def following(app: Celery, *embedded: Any) -> Iterator[Signature]:
    """The signatures in these options of a call: one, or a list, or none."""
    for each in embedded:
        for sig in each if isinstance(each, list | tuple) else [each] if each else []:
            yield signature(sig, app=app)


def check(app: Celery, callbacks: Sequence[Any], errbacks: Any) -> None:
    """Raise the `CallRefused` of a call that follows one, and could not be sent, whatever that one returns."""
    for sig in following(app, *callbacks):
        for first in first_of(sig):
            if (task := _ours(app, first)) is not None:
                task._check_call(first) if first.immutable else _check_partial(task, first)
    for sig in following(app, errbacks):
        if (task := _ours(app, sig)) is not None:
            task._check_call(sig) if sig.immutable else _headers_of(sig)


def _check_partial(task: KeyedTask, call: Signature) -> None:
    """Raise the `CallRefused` that sending this signature would raise whatever its first argument will be."""
    headers = _headers_of(call)
    check_sent(task.app, call.options, headers)
    given = (call.options.get("idempotency_key"), headers.get(KEY_HEADER))
    if given == (None, None) and task._key_function is None:
        raise MissingKey(f"{task.name}: give idempotency_key=, or the task a key template")


def _headers_of(call: Signature) -> dict[str, Any]:
    return senders_headers(call.options.get("headers") or {})


def _ours(app: Celery, sig: Signature) -> KeyedTask | None:
    task: Any = app.tasks.get(sig.task)
    return cast("KeyedTask", task) if isinstance(task, NamesItsOperation) else None


def send_refused(task: KeyedTask, args: Any, kwargs: Any, celerys: Any, named: Mapping[str, Any], given: Any) -> Any:
    """Send what follows a task as it is, past Celery's check of the arguments: the guard refuses it, and it is kept."""
    names = ("task_id", "producer", "link", "link_error", "shadow")
    options = {**task._get_exec_options(), **dict(zip(names, celerys, strict=True)), **given}
    keyed = {KEY_HEADER: named["idempotency_key"], TENANT_HEADER: named["tenant"]}
    options.pop("expiration", None)  # the broker would drop it, and no guard see it
    own = options.pop("headers", None) or {}
    # what would decide which task runs, and where; or what no worker goes by, and no signature covers
    refused = refused_headers(own)
    if too_much_to_send(own) is not None:
        own, refused = {}, ["headers"]
    kept = harmless_headers(own)
    for given_there, checked in (
        (kept, misplaced(kept)),
        (options, unfit({"shadow": options["shadow"]}, task.app.timezone)),
    ):
        for name, _ in checked:
            refused.append(name)
            given_there[name] = None
    headers = kept | {name: f"{value}" for name, value in keyed.items() if value is not None}
    if refused:
        headers[REFUSED_HEADER] = refused
    options["headers"] = headers
    options |= {"serializer": "json", "argsrepr": "()", "kwargsrepr": "{}"}
    with signed_calls.signing(task._settings):
        return task.app.send_task(task.name, args, kwargs, task_type=task, result_cls=task.AsyncResult, **options)


def is_too_large(args: Any, kwargs: Any) -> bool:
    """Whether no broker takes these arguments, as a large result may make them."""
    size = 0
    try:
        for part in json.JSONEncoder().iterencode([args, kwargs]):
            size += len(part)
            if size > BODY_LIMIT:
                return True
    except TypeError:  # of what Celery's JSON has beside: the broker says whether it is
        pass
    return False


def send(task: KeyedTask, result: Any) -> None:
    """Send the callbacks of a task that has returned, and the next of its chain, so that Celery's tracer finds none.

    Raises as `owed` does.
    """
    request = task.request
    callbacks, chain = request.callbacks, request.chain or []
    if request.is_eager or not (callbacks or chain):
        return
    request.callbacks, request.chain, app = None, None, task.app
    inherited = (request.delivery_info or {}).get("priority") if app.conf.task_inherit_parent_priority else None
    options = {"parent_id": request.id, "root_id": request.root_id or request.id, "priority": inherited}
    with owed(task, "what follows it"):
        for sig in _grouped(app, _marked(app, callbacks)):
            sig.apply_async((result,), **options)
        for sig in _marked(app, chain[-1:]):
            sig.apply_async((result,), chain=chain[:-1], **options)


@contextmanager
def owed(task: KeyedTask, what: str) -> Iterator[None]:
    """Send within this what a committed operation owes.

    Raises `Unanswered` if the broker did not take it: the message has to come back. Raises `UnsupportedControl` if it can never
    be sent, and `Ignore` as it is.
    """
    request = task.request
    try:
        yield
    except Ignore:
        raise
    except Exception as error:
        if isinstance(error, SoftTimeLimitExceeded):
            if request.is_eager:
                raise
            note_interrupted(request)
        # some OSErrors are ValueErrors, too; and an eager call has run it
        elif isinstance(error, NEVER_SENT) and not isinstance(error, OSError) and not request.is_eager:
            raise UnsupportedControl(f"{what} cannot be sent: {describe(error)}") from error
        if is_stopping():  # the broker may be away, and each of its batch would wait for that
            note_interrupted(request)
        log.warning("not_sent", task=task.name, task_id=request.id, error=describe(error))
        raise Unanswered(f"{task.name}: {what} could not be sent") from error


def _grouped(app: Celery, callbacks: list[Signature]) -> list[Signature]:
    """Several callbacks as Celery sends them: each group, and the others as one more."""
    if len(callbacks) <= 1:
        return callbacks
    others = [sig for sig in callbacks if not isinstance(sig, group)]
    return [sig for sig in callbacks if isinstance(sig, group)] + ([group(others, app=app)] if others else [])


def note_failed(task: KeyedTask, error: BaseException) -> None:
    """Mark the errbacks that Celery is about to send after this task, which has raised `error`."""
    if not isinstance(error, Ignore | Reject | Retry):
        task.request.errbacks = _marked(task.app, task.request.errbacks)


def _marked(app: Celery, sigs: Sequence[Any] | None) -> list[Signature]:
    marked = list(following(app, sigs))
    for sig in marked:
        for first in first_of(sig):
            if _ours(app, first) is not None:
                first.options[FOLLOWS] = True
    return marked
