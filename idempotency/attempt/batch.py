"""Many first attempts of one task, claimed by one statement; and, if they are to, run and completed in one transaction.

    answers = claim_together(runtime, deliveries)
    answers = run_together(runtime, deliveries, policy, body)

Claimed together are operations that have no record yet, and those that have been completed are answered; the caller runs
each claim by `run`, in a transaction of its own. Only what is plain is run together: bodies that write to their session and
return. For everything else (an error, an effect, a step, a duplicate, a lost lease, a commit without an answer) the answer
is the token under which it is claimed, or may be, and the caller runs it alone by `run` with that token, which asks the
record. So a body that shares a transaction may run up to three times for one attempt; what it wrote before is rolled back.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from billiard.exceptions import SoftTimeLimitExceeded
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from ..errors import LeaseLost
from ..framework import Framework, framework
from ..observe import metrics
from ..observe.crash_points import crash_point
from ..observe.logs import log
from ..store import batches, operations
from ..store.answers import Claimed, Completed, claim_of
from ..store.statements import describe
from ..wire.delivery import Delivery
from ..wire.keys import OperationId
from .attempt import Attempt
from .endings import Finished
from .heartbeat import Holding
from .policy import Policy
from .runtime import Runtime
from .sharing import SharingAttempt, run_within

# The body of a delivery, given by its place in the batch.
BatchBody = Callable[[int, "SharingAttempt"], Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one delivery: it has ended (`outcome`), is claimed (`claim`), or has to ask its record under this token."""

    token: str
    finished: Finished | None = None
    # It was completed before.
    completed: Completed | None = None
    # It is claimed, and the heartbeat renews this until it is run or given up.
    holding: Holding | None = None
    # It may be claimed: the claiming statement had no answer, or the commit of a batch has not.
    is_in_doubt: bool = False

    @property
    def outcome(self) -> Finished | Completed | None:
        """Its outcome, if nothing is left to run."""
        return self.finished or self.completed

    @property
    def claim(self) -> Claimed | None:
        """The claim that it can be run under; None: its record has to be asked."""
        holding = self.holding
        if holding is None or holding.lost or self.is_in_doubt:
            return None
        return replace(holding.claim, asked_at=holding.renewed_at, has_hint=holding.is_renewed)


def run_together(
    runtime: Runtime,
    deliveries: Sequence[Delivery],
    tokens: Sequence[str],
    policy: Policy,
    body: BatchBody,
    ends_at: float = math.inf,
) -> list[Answer]:
    """Claim, run and commit these deliveries of one task and tenant, with keys that differ; one answer for each.

    Each is claimed under its token. `ends_at`: by the monotonic clock; nothing is begun or committed after it. Raises what ends
    the process, and `SoftTimeLimitExceeded`, also for that: the caller gives back then what is claimed under the tokens.
    Whatever else goes wrong, they are run alone.
    """
    done: dict[int, Finished] = {}
    attempts: dict[int, SharingAttempt] = {}
    completed: dict[str, Completed] = {}
    try:
        if type(framework()) is Framework:  # a framework's own connection is in one session at a time
            claims, completed = _claim_or_answer(runtime, deliveries, tokens)
            attempts = {
                place: SharingAttempt(runtime, claim, delivery, policy)
                for place, delivery in enumerate(deliveries)
                if (claim := claims.get(delivery.id.key)) is not None
            }
            done = _Batch(runtime, attempts, policy, body, ends_at).run()
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:
        # Its COMMIT may have succeeded. The records know, and each delivery asks its own.
        metrics.batches.labels(deliveries[0].id.task, "alone").inc()
        log.warning("batch_not_committed", task=deliveries[0].id.task, many=len(attempts), error=describe(error))
    finally:
        for attempt in attempts.values():
            attempt.close()
    answers = []
    for place, (token, delivery) in enumerate(zip(tokens, deliveries, strict=True)):
        answer = Answer(token, finished=done.get(place), completed=completed.get(delivery.id.key))
        if answer.outcome is None:
            # it runs alone, after those before it; if it does not, it is given back by its token
            claim = attempts[place].claim if place in attempts else None
            answer = Answer(token, holding=_held(runtime, claim), is_in_doubt=True)
        answers.append(answer)
    return answers


def claim_together(runtime: Runtime, deliveries: Sequence[Delivery], tokens: Sequence[str]) -> list[Answer]:
    """Claim these deliveries of one task and tenant, with keys that differ, to be run one after the other.

    The heartbeat renews the claims of those that wait. Raises as `run_together` does; whatever else goes wrong, they are
    claimed alone.
    """
    try:
        claims, completed = _claim_or_answer(runtime, deliveries, tokens)
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:
        metrics.batches.labels(deliveries[0].id.task, "alone").inc()
        log.warning("batch_not_claimed", task=deliveries[0].id.task, many=len(deliveries), error=describe(error))
        return [Answer(token, is_in_doubt=True) for token in tokens]
    metrics.batches.labels(deliveries[0].id.task, "each").inc()
    return [
        Answer(token, completed=completed.get(delivery.id.key), holding=_held(runtime, claims.get(delivery.id.key)))
        for token, delivery in zip(tokens, deliveries, strict=True)
    ]


def _held(runtime: Runtime, claim: Claimed | None) -> Holding | None:
    if claim is None:
        return None
    holding = Holding(claim, claim.fingerprint, runtime.settings.lease)
    runtime.heartbeat.hold(holding)
    return holding


def give_back(runtime: Runtime, delivery: Delivery, policy: Policy, answer: Answer) -> None:
    """Give back a claim under which nothing has run, and do not count it: its message comes again."""
    claim = _claim_under(runtime, delivery, answer.token) if answer.is_in_doubt else answer.claim
    if claim is None:
        return
    attempt = Attempt(runtime, claim, delivery, policy)
    try:
        _release(attempt)
    finally:
        attempt.close()


def _claim_under(runtime: Runtime, delivery: Delivery, token: str) -> Claimed | None:
    """The claim under a token whose statement had no answer, if it was made. None also if Postgres does not say."""
    with suppress(DBAPIError, PoolTimeout), runtime.autocommit(delivery.id.tenant) as connection:
        record = operations.read_locked(connection, delivery.id)
        if record is not None and (record.status, record.token) == ("started", token):
            return claim_of(delivery.id, record)
    return None


def _release(attempt: Attempt) -> None:
    """Let go, and do not count it: its message comes again. If it has been committed after all, it stays so."""
    try:
        attempt.release(delay=0.0, error=None, give_back=True)
    except (LeaseLost, DBAPIError, PoolTimeout) as error:
        log.warning("claim_not_given_back", error=type(error).__name__, **attempt.writes.names)


def _claim_or_answer(
    runtime: Runtime, deliveries: Sequence[Delivery], tokens: Sequence[str]
) -> tuple[dict[str, Claimed], dict[str, Completed]]:
    """The claims of those that have no record yet, and the answers of those that have been completed, by key."""
    runtime.check_open()
    id, settings = deliveries[0].id, runtime.settings
    with metrics.phase(id.task, "claim"), runtime.autocommit(id.tenant) as connection:
        claims = batches.claim_new(
            connection,
            deliveries,
            tokens,
            service=settings.service,
            holder=runtime.holder,
            lease=settings.lease,
            horizon=settings.redelivery_horizon,
        )
        known = [each for each in deliveries if each.id.key not in claims]
        completed = batches.completed(connection, known, service=settings.service) if known else {}
    metrics.claims.labels(id.task).inc(len(claims))
    metrics.duplicates.labels(id.task).inc(len(completed))
    return claims, completed


class _Batch:
    def __init__(
        self,
        runtime: Runtime,
        attempts: dict[int, SharingAttempt],
        policy: Policy,
        body: BatchBody,
        ends_at: float,
    ) -> None:
        self._ends_at = ends_at
        self._runtime = runtime
        self._attempts = attempts
        self._policy = policy
        self._body = body

    @property
    def _id(self) -> OperationId:
        """Of one of them, whose task and tenant are those of all."""
        return next(iter(self._attempts.values())).claim.id

    def run(self) -> dict[int, Finished]:
        """First without savepoints: they cost two round trips each, and beyond 64 every other transaction looks them up on disk.

        If one body cannot stay, all are rolled back and run once more, each behind a savepoint.
        """
        crash_point("claimed")
        if not self._attempts:
            return {}
        ran, done = "together", None
        with suppress(_NotAll, IntegrityError):  # a constraint that is checked at COMMIT
            done = self._try(savepoints=False)
        if done is None:
            ran, done = "again", self._try(savepoints=True)
        metrics.batches.labels(self._id.task, ran).inc()
        return done

    def _try(self, *, savepoints: bool) -> dict[int, Finished]:
        id = self._id
        with self._runtime.transaction(id.tenant) as connection:
            crash_point("body.entered")
            with metrics.phase(id.task, "body"):
                written = {
                    place: result
                    for place, attempt in self._attempts.items()
                    if (result := self._stays(connection, place, attempt, savepoint=savepoints)) is not None
                }
            if not written:
                return {}
            with metrics.phase(id.task, "commit"):
                self._complete(connection, written)
        crash_point("finish.committed")
        metrics.completed.labels(id.task).inc(len(written))
        return {place: Finished(self._attempts[place].claim, result) for place, (result, _) in written.items()}

    def _stays(
        self, connection: Connection, place: int, attempt: SharingAttempt, *, savepoint: bool
    ) -> tuple[Any, str] | None:
        """Run a body. Returns its result, also as text; None: it cannot stay, and nothing of it does."""
        self._check_time()
        try:
            body = partial(self._body, place)
            return run_within(self._runtime, connection, attempt, body, savepoint=savepoint)
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:
            if not savepoint:
                raise _NotAll from error
            if connection.invalidated or not connection.in_transaction() or attempt.has_spoilt:
                raise
            return None

    def _check_time(self) -> None:
        """Raise `SoftTimeLimitExceeded`, which the pool raises once: a body may have handled it."""
        if time.monotonic() >= self._ends_at:
            raise SoftTimeLimitExceeded

    def _complete(self, connection: Connection, written: dict[int, tuple[Any, str]]) -> None:
        self._check_time()
        attempts = [self._attempts[place] for place in written]
        for attempt in attempts:
            attempt.check_lease()
        batches.complete(
            connection,
            [attempt.claim for attempt in attempts],
            [stored for _, stored in written.values()],
            [attempt.trace for attempt in attempts],
            retention=self._policy.retention_completed,
            lease=self._runtime.settings.lease,
        )
        crash_point("finish.written")


class _NotAll(Exception):
    """A body that is not behind a savepoint cannot stay in the transaction."""
