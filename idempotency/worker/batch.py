"""A batch of a task, in a process of the pool: what is plain is claimed or runs together; then Celery traces each message.

So results, signals, links and logs are as without a batch: the trace of a message whose operation is completed finds that
it is, and the trace of any other runs it alone, under its claim if it has one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Any

from billiard.exceptions import SoftTimeLimitExceeded
from celery import current_app
from celery._state import _task_stack
from celery.app.task import Context
from kombu.serialization import loads as loads_message
from kombu.serialization import prepare_accept_content

from ..application import runtime_of
from ..attempt.batch import Answer, claim_together, give_back, run_together
from ..attempt.policy import Policy
from ..observe.logs import log
from ..wire.delivery import Delivery
from .deliveries import delivery_of, is_under_another

if TYPE_CHECKING:
    from ..attempt.attempt import Attempt
    from .task import IdempotentTask

# What the pool is given of a message: its id, headers, body, content type and encoding.
Call = tuple[str, dict[str, Any], Any, str | None, str | None]
# What Celery's trace returns for it.
Traced = tuple[int, Any, float]
# The attribute of a request, and the key in the dictionary that it is made from.
PREPARED = "prepared"


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the batch has found out about a message."""

    delivery: Delivery
    answer: Answer


def prepared_for(request: Any) -> Prepared | None:
    """What a batch has found out about the message of this request. A header of that name is only text."""
    prepared = getattr(request, PREPARED, None)
    return prepared if isinstance(prepared, Prepared) else None


def run_batch(trace: Callable[..., Traced], name: str, calls: Sequence[Call]) -> list[Traced | None]:
    """Run these messages of a task, together where that is possible, and trace each. Returns that; None: a message comes again."""
    app = current_app._get_current_object()
    task, accept = app.tasks[name], prepare_accept_content(app.conf.accept_content)
    ends_at = math.inf if task.soft_time_limit is None else time.monotonic() + task.soft_time_limit
    decoded = [
        (id, request, _decoded(body, content_type, encoding, accept))
        for id, request, body, content_type, encoding in calls
    ]
    results: list[Traced | None] = []
    try:
        with suppress(SoftTimeLimitExceeded):
            _prepare(task, [(request, body) for _, request, body in decoded if body is not None])
            for (id, request, body), call in takewhile(
                lambda _: time.monotonic() < ends_at, zip(decoded, calls, strict=True)
            ):
                results.append(_traced(trace, name, id, request, call[2:] if body is None else (body, None, None)))
        # The time limit is raised once for a job, so what went on after that would have none. Delivered again, each message
        # has its own.
        results += [None] * (len(calls) - len(results))
        for (_, request, _), result in zip(decoded, results, strict=True):
            if result is None:
                _give_back(task, request)
    finally:
        for _, request, _ in decoded[len(results) + 1 :]:  # the process ends
            _give_back(task, request)
        _let_go(task, [request for _, request, _ in decoded])
    if left := results.count(None):
        log.warning("batch_not_run", task=name, many=left)
    return results


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


def _give_back(task: IdempotentTask[..., Any], request: dict[str, Any]) -> None:
    """Give back the claim of a message that comes again."""
    if isinstance(prepared := request.get(PREPARED), Prepared):
        runtime = runtime_of(task.app)
        give_back(runtime, prepared.delivery, Policy.of(task, runtime.settings), prepared.answer)


def _let_go(task: IdempotentTask[..., Any], requests: Sequence[dict[str, Any]]) -> None:
    """Renew no claim any more, also of what has not come to its end."""
    for request in requests:
        if isinstance(prepared := request.get(PREPARED), Prepared) and prepared.answer.holding is not None:
            runtime_of(task.app).heartbeat.drop(prepared.answer.holding)


def _decoded(body: Any, content_type: str | None, encoding: str | None, accept: Any) -> Any:
    """The arguments and what follows; None: it cannot be read, which Celery's trace will say."""
    if not content_type:
        return body
    with suppress(Exception):
        return loads_message(body, content_type, encoding, accept=accept)
    return None


def _prepare(task: IdempotentTask[..., Any], calls: Sequence[tuple[dict[str, Any], Any]]) -> None:
    """Run what can be run together, and note in each message's request what came of it."""
    runtime, found = runtime_of(task.app), dict[tuple[str, str], tuple[Delivery, Context, dict[str, Any]]]()
    policy = Policy.of(task, runtime.settings)
    for request, body in calls:
        request.pop(PREPARED, None)
        with suppress(Exception):  # what is wrong with it shows where it is run alone
            args, kwargs, embed = body
            context = Context(request, args=args, kwargs=kwargs, is_eager=False, called_directly=False, **embed or {})
            delivery = delivery_of(task, context)
            if _is_plain(task, delivery):
                found.setdefault((delivery.id.tenant, delivery.id.key), (delivery, context, request))
    of_tenants = sorted(found.values(), key=lambda each: each[0].id.tenant)
    for _, group in groupby(of_tenants, key=lambda each: each[0].id.tenant):
        members = list(group)
        contexts = [context for _, context, _ in members]
        deliveries = [delivery for delivery, _, _ in members]
        if task.batch_commit == "each":
            answers = claim_together(runtime, deliveries)
        else:
            answers = run_together(runtime, deliveries, policy, partial(_run_body, task, contexts))
        for (delivery, _, request), answer in zip(members, answers, strict=True):
            request[PREPARED] = Prepared(delivery, answer)


def _is_plain(task: IdempotentTask[..., Any], delivery: Delivery) -> bool:
    """Whether a delivery is the first of its message, and nothing has to be asked before its claim."""
    if delivery.resent or delivery.is_revoked or delivery.eta is not None or task.may_vary(delivery.headers):
        return False
    return not is_under_another(delivery)


def _run_body(task: IdempotentTask[..., Any], contexts: Sequence[Context], place: int, attempt: Attempt) -> Any:
    context = contexts[place]
    task.request_stack.push(context)
    _task_stack.push(task)  # what `celery.current_task` reads
    try:
        return task._body(attempt)
    finally:
        context.attempt = None
        _task_stack.pop()
        task.request_stack.pop()
