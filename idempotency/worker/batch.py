"""A batch of a task, in a process of the pool: what is plain is claimed or runs together; then Celery traces each message.

So results, signals, links and logs are as without a batch: the trace of a message whose operation is completed finds that
it is, and the trace of any other runs it alone, under its claim if it has one.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from billiard.exceptions import SoftTimeLimitExceeded
from celery import current_app
from celery._state import _task_stack
from celery.app.task import Context
from kombu.serialization import loads as loads_message
from kombu.serialization import prepare_accept_content

from ..application import runtime_of
from ..attempt.batch import Answer, claim_together, run_together
from ..attempt.giving_back import give_back
from ..attempt.policy import Policy
from ..attempt.run import Outcome
from ..attempt.tracing import BatchSpans
from ..observe.logs import log
from ..store.answers import Claimed
from ..wire.delivery import Delivery
from .deliveries import delivery_of, is_under_another
from .waiting import Budget, is_stopping

if TYPE_CHECKING:
    from ..attempt.attempt import Attempt
    from .task import IdempotentTask

# What the pool is given of a message: its id, headers, body, content type and encoding.
Call = tuple[str, dict[str, Any], Any, str | None, str | None]
# What Celery's trace returns for it.
Traced = tuple[int, Any, float]
# A message's id, headers and decoded body.
Decoded = tuple[str, dict[str, Any], Any]
# The share of the job's limit after which no message is begun: the pool's clock started before ours.
SHARE_OF_LIMIT = 0.9
# Seconds from one look at the claims that wait to the next: there may be a thousand.
LOOK = 1.0
# Attributes of a request, and keys in the dictionary that it is made from, beside a sender's headers.
PREPARED, BUDGET = "idempotency_prepared", "idempotency_budget"
# What a body's attempt sets in its request.
OURS = frozenset(("retries", "attempt", "asked", "eta", "replacement"))


@dataclass(slots=True)
class Prepared:
    """What the batch has found out about a message, and what has become of it since."""

    delivery: Delivery
    answer: Answer
    has_begun: bool = False
    # by what is raised once for a whole job
    is_interrupted: bool = False
    # what a body that has ended together with others, and its hooks, have changed in their request
    left: dict[str, Any] = field(default_factory=dict)


def prepared_for(request: Any) -> Prepared | None:
    """What a batch has found out about the message of this request. A header of that name is only text."""
    prepared = getattr(request, PREPARED, None)
    return prepared if isinstance(prepared, Prepared) else None


def budget_of(request: Any) -> Budget | None:
    """What this request may wait for together with others of its job; None: it has one of its own."""
    budget = getattr(request, BUDGET, None)
    return budget if isinstance(budget, Budget) else None


def claimed_for(request: Any) -> tuple[str | None, Claimed | None]:
    """The token and the claim of a batch, to run under: nothing without one."""
    prepared = prepared_for(request)
    return (None, None) if prepared is None else (prepared.answer.token, prepared.answer.claim)


def note_begun(request: Any) -> None:
    """Note that the body is entered under its own claim, which is not given back any more."""
    if (prepared := prepared_for(request)) is not None:
        prepared.has_begun = True


def note_end(request: Any, outcome: Outcome) -> None:
    """Note that there was an answer, and if a time limit or the end of a greenlet has ended the body."""
    if (budget := budget_of(request)) is not None:
        budget.is_spent = False
    error = getattr(outcome, "cause", None) or getattr(outcome, "error", None)
    if isinstance(error, SoftTimeLimitExceeded) or not isinstance(error, Exception | None):
        note_interrupted(request)


def note_interrupted(request: Any) -> None:
    """Note that the job's time limit has come: the messages after this one are not begun."""
    if (prepared := prepared_for(request)) is not None:
        prepared.is_interrupted = True


def run_batch(
    trace: Callable[..., Traced], name: str, calls: Sequence[Call], limit: float | None
) -> list[Traced | None]:
    """Run these messages of a task, together where that is possible, and trace each. Returns that; None: a message comes again.

    `limit`: the job's first time limit, in seconds; None: it has none.
    """
    app = current_app._get_current_object()
    task, accept = app.tasks[name], prepare_accept_content(app.conf.accept_content)
    ends_at = math.inf if limit is None else time.monotonic() + SHARE_OF_LIMIT * limit
    decoded = [
        (id, request, _decoded(body, content_type, encoding, accept))
        for id, request, body, content_type, encoding in calls
    ]
    results: list[Traced | None] = []
    budget = Budget(limit)
    for _, request, _ in decoded:
        request[BUDGET] = budget
    try:
        with suppress(SoftTimeLimitExceeded):
            if not is_stopping() and not _is_prepared(task, decoded, ends_at):
                return [None] * len(calls)
            looked_at = time.monotonic()
            for traced in _trace_each(trace, name, decoded, calls, ends_at):
                results.append(traced)
                looked_at = _wait_on(decoded, len(results), looked_at)
    finally:
        claimed = [each for _, request, _ in decoded if (each := _prepared(request)) is not None]
        try:
            _let_go(task, claimed)
        except SoftTimeLimitExceeded:  # raised once for a job
            _let_go(task, claimed)
        except SystemExit:  # and so is this one, by the SIGTERM of a worker that is told to end at once
            _let_go(task, claimed)
            raise
    results += [None] * (len(calls) - len(results))
    if left := results.count(None):
        log.warning("batch_not_run", task=name, many=left)
    return results


def _wait_on(decoded: Sequence[Decoded], place: int, looked_at: float) -> float:
    """Let the claims from this place on wait for the next body as long as any may run. Returns when that was last done."""
    if (now := time.monotonic()) - looked_at < LOOK:
        return looked_at
    for _, request, _ in decoded[place:]:
        if (each := _prepared(request)) is not None and each.answer.holding is not None:
            each.answer.holding.begun_at = now
    return now


def _is_prepared(task: IdempotentTask[..., Any], decoded: Sequence[Decoded], ends_at: float) -> bool:
    """False: not one of them can be looked at now, whose messages come again."""
    try:
        _prepare(task, [(request, body) for _, request, body in decoded if body is not None], ends_at)
    except SoftTimeLimitExceeded:
        raise
    except Exception:
        log.exception("batch_not_prepared", task=task.name, many=len(decoded))
        return False
    return True


def _trace_each(
    trace: Callable[..., Traced], name: str, decoded: Sequence[Decoded], calls: Sequence[Call], ends_at: float
) -> Iterator[Traced | None]:
    """Until a limit is near or has come: it is raised once for a job, so what went on after that would have none.

    In a worker that is told to stop, no further one is begun: Celery gives back what it has only fetched, too.
    """
    for (id, request, body), call in zip(decoded, calls, strict=True):
        if time.monotonic() >= ends_at:
            return
        prepared = _prepared(request)
        if is_stopping() and (prepared is None or prepared.answer.outcome is None):
            yield None
            continue
        yield _traced(trace, name, id, request, call[2:] if body is None else (body, None, None))
        if prepared is not None and prepared.is_interrupted:
            return


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


def _prepared(request: dict[str, Any]) -> Prepared | None:
    prepared = request.get(PREPARED)
    return prepared if isinstance(prepared, Prepared) else None


def _let_go(task: IdempotentTask[..., Any], claimed: Sequence[Prepared]) -> None:
    """Give back the claims of messages whose body was not entered, and renew none any more."""
    if not claimed:
        return
    runtime = runtime_of(task.app)
    try:
        not_begun = [(each.delivery, each.answer) for each in claimed if not each.has_begun and not each.answer.outcome]
        give_back(runtime, not_begun, Policy.of(task, runtime.settings))
    except SoftTimeLimitExceeded:
        raise
    except Exception:
        log.exception("giving_back_failed", task=task.name)
    finally:
        for each in claimed:
            runtime.heartbeat.drop(each.answer.token)


def _decoded(body: Any, content_type: str | None, encoding: str | None, accept: Any) -> Any:
    """The arguments and what follows; None: it cannot be read, which Celery's trace will say."""
    if not content_type:
        return body
    with suppress(Exception):
        return loads_message(body, content_type, encoding, accept=accept)
    return None


def _prepare(task: IdempotentTask[..., Any], calls: Sequence[tuple[dict[str, Any], Any]], ends_at: float) -> None:
    """Claim what is plain, and run it if it commits together; note in each request what came of it."""
    runtime, found = runtime_of(task.app), dict[tuple[str, str], tuple[Delivery, Context, dict[str, Any]]]()
    policy = Policy.of(task, runtime.settings)
    for request, body in calls:
        request.pop(PREPARED, None)
        with suppress(Exception):  # what is wrong with it shows where it is run alone
            args, kwargs, embed = body
            context = Context(request, args=args, kwargs=kwargs, is_eager=False, called_directly=False, **embed or {})
            delivery = delivery_of(task, context)
            task.check_cell(delivery.id)
            if _is_plain(task, delivery):
                found.setdefault((delivery.id.tenant, delivery.id.key), (delivery, context, request))
    of_tenants = sorted(found.values(), key=lambda each: each[0].id.tenant)
    for _, group in groupby(of_tenants, key=lambda each: each[0].id.tenant):
        if is_stopping():
            return
        members = list(group)
        contexts = [context for _, context, _ in members]
        deliveries = [delivery for delivery, _, _ in members]
        tokens = [secrets.token_hex(16) for _ in members]
        prepared = [
            Prepared(delivery, Answer(token, is_in_doubt=True))
            for delivery, token in zip(deliveries, tokens, strict=True)
        ]
        for (_, _, request), each in zip(members, prepared, strict=True):
            request[PREPARED] = each  # before the claims: what ends the job meanwhile may have left some
        if task.batch_commit == "each":
            answers = claim_together(runtime, deliveries, tokens)
        else:
            before = [dict(vars(context)) for context in contexts]
            spans, finished = BatchSpans(runtime, deliveries, partial(_run_body, task, contexts)), list[int]()
            try:
                answers = run_together(runtime, deliveries, tokens, policy, spans.run, ends_at)
                finished = [place for place, answer in enumerate(answers) if answer.finished is not None]
            finally:
                spans.end(finished)
            for place in finished:
                prepared[place].left = _left(before[place], vars(contexts[place]))
        for each, answer in zip(prepared, answers, strict=True):
            each.answer = answer


def _left(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in after.items()
        if name not in OURS and (name not in before or before[name] is not value)
    }


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
