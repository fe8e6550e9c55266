"""What a batch finds out about its messages before each is traced: what is plain is claimed, or has run together.

It is noted in the dictionary that Celery makes the message's request from, where the task finds it.
"""

from __future__ import annotations

import secrets
from asyncio import CancelledError
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from billiard.exceptions import SoftTimeLimitExceeded
from celery._state import _task_stack
from celery.app.task import Context

from ..application import runtime_of
from ..attempt.batch import BatchAnswer, claim_together, run_together
from ..attempt.heartbeat import JobTime
from ..attempt.policy import Policy
from ..attempt.run import Outcome
from ..attempt.runtime import Runtime
from ..attempt.tracing import BatchSpans
from ..store.answers import Busy, Claimed
from ..wire.delivery import Delivery
from ..wire.keys import OperationId
from .deliveries import delivery_of, is_under_another
from .waiting import Budget, is_stopping

if TYPE_CHECKING:
    from ..attempt.attempt import Attempt
    from .task import IdempotentTask

# Attributes of a request, and keys in the dictionary that it is made from, beside a sender's headers.
PREPARED, BUDGET = "idempotency_prepared", "idempotency_budget"
# What `IdempotentTask._body` sets in a request, which no body has left there.
SET_AS_A_BODY_BEGINS = frozenset(("retries", "attempt", "asked", "eta", "replacement"))


@dataclass(slots=True)
class Prepared:
    """What the batch has found out about a message, and what has become of it since."""

    delivery: Delivery
    answer: BatchAnswer
    has_begun: bool = False
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
    """Note that Postgres has answered, unless Redis has, and whether a time limit or the end of its greenlet has ended the body."""
    if (budget := budget_of(request)) is not None and not isinstance(outcome, Busy):
        budget.is_spent = False
    error = getattr(outcome, "cause", None) or getattr(outcome, "error", None)
    if isinstance(error, SoftTimeLimitExceeded) or not isinstance(error, Exception | CancelledError | None):
        note_interrupted(request)


def note_interrupted(request: Any) -> None:
    """Note that what is raised once for a whole job has come: the messages after this one are not begun."""
    if (budget := budget_of(request)) is not None:
        budget.job.is_interrupted = True


def prepared_in(request: dict[str, Any]) -> Prepared | None:
    prepared = request.get(PREPARED)
    return prepared if isinstance(prepared, Prepared) else None


class _Member(NamedTuple):
    """A message about which nothing has to be asked before its claim."""

    delivery: Delivery
    context: Context
    request: dict[str, Any]


def prepare(task: IdempotentTask[..., Any], calls: Sequence[tuple[dict[str, Any], Any]], job: JobTime) -> None:
    """Claim what is plain, and run it if it commits together; note in each request what came of it."""
    runtime = runtime_of(task.app)
    policy = Policy.of(task, runtime.settings)
    for _, of_tenant in groupby(_plain(task, calls), key=lambda each: each.delivery.id.tenant):
        if is_stopping():
            return
        job.restart()
        _prepare_tenant(task, runtime, policy, list(of_tenant), job)


def _plain(task: IdempotentTask[..., Any], calls: Sequence[tuple[dict[str, Any], Any]]) -> list[_Member]:
    """Those that can be claimed together, one of each key, by tenant."""
    found: dict[OperationId, _Member] = {}
    for request, body in calls:
        if (member := _member(task, request, body)) is not None:
            found.setdefault(member.delivery.id, member)
    return sorted(found.values(), key=lambda each: each.delivery.id.tenant)


def _member(task: IdempotentTask[..., Any], request: dict[str, Any], body: Any) -> _Member | None:
    """None: it has to run alone, or something is wrong with it, which shows there."""
    try:
        args, kwargs, embed = body
        context = Context(request, args=args, kwargs=kwargs, is_eager=False, called_directly=False, **embed or {})
        delivery = delivery_of(task, context)
        task.check_cell(delivery.id)
        return _Member(delivery, context, request) if _is_plain(task, delivery) else None
    except SoftTimeLimitExceeded:
        raise
    except Exception:
        return None


def _prepare_tenant(
    task: IdempotentTask[..., Any],
    runtime: Runtime,
    policy: Policy,
    members: Sequence[_Member],
    job: JobTime,
) -> None:
    deliveries = [each.delivery for each in members]
    tokens = [secrets.token_hex(16) for _ in members]
    prepared = [
        Prepared(delivery, BatchAnswer(token, is_in_doubt=True))
        for delivery, token in zip(deliveries, tokens, strict=True)
    ]
    # Before the claims: what ends the job meanwhile may have left some. And once the contexts are made: a body that runs together
    # has not begun under its own claim.
    for member, each in zip(members, prepared, strict=True):
        member.request[PREPARED] = each
    if task.batch_commit == "each" or len(members) == 1:  # one shares its transaction with nobody
        answers = claim_together(runtime, deliveries, tokens, job)
    else:
        answers = _run_members(task, runtime, policy, members, prepared, job)
    for each, answer in zip(prepared, answers, strict=True):
        each.answer = answer


def _run_members(
    task: IdempotentTask[..., Any],
    runtime: Runtime,
    policy: Policy,
    members: Sequence[_Member],
    prepared: Sequence[Prepared],
    job: JobTime,
) -> list[BatchAnswer]:
    """Run them in one transaction, and note what those that have ended there have left in their requests."""
    before = [dict(vars(each.context)) for each in members]
    deliveries, tokens = [each.delivery for each in members], [each.answer.token for each in prepared]
    spans, finished = BatchSpans(runtime, deliveries, partial(_run_body, task, members, before)), list[int]()
    try:
        answers = run_together(runtime, deliveries, tokens, policy, spans.run, job)
        finished = [place for place, answer in enumerate(answers) if answer.finished is not None]
    finally:
        spans.end(finished)
    for place in finished:
        prepared[place].left = _left(before[place], vars(members[place].context))
    return answers


def _left(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in after.items()
        if name not in SET_AS_A_BODY_BEGINS and (name not in before or _is_changed(before[name], value))
    }


def _is_plain(task: IdempotentTask[..., Any], delivery: Delivery) -> bool:
    """Whether a delivery is the first of its message, and nothing has to be asked before its claim."""
    if delivery.resent or delivery.is_revoked or delivery.eta is not None or task.may_vary(delivery.headers):
        return False
    return not is_under_another(delivery)


def _is_changed(before: Any, after: Any) -> bool:
    return bool(before != after) if isinstance(after, list | dict) else before is not after


def _run_body(
    task: IdempotentTask[..., Any],
    members: Sequence[_Member],
    before: Sequence[Mapping[str, Any]],
    place: int,
    attempt: Attempt,
) -> Any:
    context = members[place].context
    # as it came: what an earlier run has left in it, which was rolled back, is not there; nor do the runs share lists
    vars(context).clear()
    vars(context).update(
        {name: copy(each) if isinstance(each, list | dict) else each for name, each in before[place].items()}
    )
    task.request_stack.push(context)
    _task_stack.push(task)  # what `celery.current_task` reads
    try:
        return task._body(attempt)
    finally:
        context.attempt = None
        _task_stack.pop()
        task.request_stack.pop()
