"""Many first attempts of one task, claimed by one statement; and, if they are to, run and completed in one transaction.

    answers = claim_together(runtime, deliveries, tokens, job)
    answers = run_together(runtime, deliveries, tokens, policy, body, job)

Claimed together are operations that have no record yet, and those that have been completed are answered; the caller runs
each claim by `run`, in a transaction of its own. Only what is plain is run together: bodies that write to their session and
return. For everything else (an error, an effect, a step, a duplicate, a lost lease, a commit without an answer) the answer
is the claim, or the token under which there may be one, and the caller runs it alone by `run`, which asks the record where
there is no claim. So a body that shares a transaction may run up to three times for one attempt; what it wrote before is
rolled back.
"""

from __future__ import annotations

import time
from asyncio import CancelledError
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from billiard.exceptions import SoftTimeLimitExceeded
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from .. import objects
from ..errors import LeaseLost
from ..framework import Framework, framework
from ..observe import metrics
from ..observe.crash_points import crash_point
from ..observe.logs import log
from ..store import batches
from ..store.answers import Claimed, Completed
from ..store.statements import describe, where
from ..wire.delivery import Delivery
from ..wire.keys import OperationId
from .endings import Finished, is_for_anothers_lock
from .heartbeat import Holding, JobTime
from .policy import Policy
from .runtime import Runtime
from .sharing import SharingAttempt, run_within

# The body of a delivery, given by its place in the batch.
BatchBody = Callable[[int, "SharingAttempt"], Any]


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """What became of one delivery: it has ended (`outcome`), is claimed (`claim`), or has to ask its record under this token."""

    token: str
    finished: Finished | None = None
    # It was completed before.
    completed: Completed | None = None
    # It is claimed, and the heartbeat renews this until it is run or given up.
    holding: Holding | None = None
    # Not known whether it is claimed or has ended: not asked yet, no answer, or an error. Its record has to be asked.
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
    job: JobTime,
) -> list[BatchAnswer]:
    """Claim, run and commit these deliveries of one task and tenant, with keys that differ; one answer for each.

    Each is claimed under its token. Nothing is begun or committed once the time of the job is over. It is restarted with each body,
    so the longest run is that of one of them; once their sum is longer, the rest runs alone.

    Raises what ends the process, and `SoftTimeLimitExceeded`, also for that: the caller gives back then what is claimed under the
    tokens. Whatever else goes wrong, they are run alone.
    """
    done: dict[int, Finished] = {}
    attempts: dict[int, SharingAttempt] = {}
    completed: dict[str, Completed] = {}
    places = {delivery.id.key: place for place, delivery in enumerate(deliveries)}
    what, is_in_doubt, task = "batch_not_claimed", False, deliveries[0].id.task

    def hold(claim: Claimed) -> None:
        place = places[claim.id.key]
        attempts[place] = SharingAttempt(runtime, claim, deliveries[place], policy, job)

    try:
        if type(framework()) is Framework:  # a framework's own connection is in one session at a time
            completed = _claim_or_answer(runtime, deliveries, tokens, hold)
            what = "batch_not_committed"
            done = _Batch(runtime, dict(sorted(attempts.items())), policy, body, job).run()
        else:
            metrics.batches.labels(task, "alone").inc()
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:
        is_in_doubt = True  # its COMMIT may have succeeded: the records know, and each delivery asks its own
        metrics.batches.labels(task, "alone").inc()
        _note_failed(what, deliveries, error)
    finally:
        for attempt in attempts.values():
            attempt.close()
    return [
        BatchAnswer(
            token,
            finished=done.get(place),
            completed=completed.get(delivery.id.key),
            # it runs alone, after those before it
            holding=attempts[place].keep() if place in attempts and place not in done else None,
            is_in_doubt=is_in_doubt,
        )
        for place, (token, delivery) in enumerate(zip(tokens, deliveries, strict=True))
    ]


def claim_together(
    runtime: Runtime, deliveries: Sequence[Delivery], tokens: Sequence[str], job: JobTime
) -> list[BatchAnswer]:
    """Claim these deliveries of one task and tenant, with keys that differ, to be run one after the other.

    The heartbeat renews the claims of those that wait, for the longest run from each restart of the job's time. Raises as
    `run_together` does; whatever else goes wrong, claims that are not known to have been made are made one by one.
    """
    completed: dict[str, Completed] = {}
    holdings: dict[str, Holding] = {}

    def hold(claim: Claimed) -> None:
        holdings[claim.id.key] = holding = Holding(claim, claim.fingerprint, runtime.settings.lease, job)
        runtime.heartbeat.hold(holding)

    ran, is_in_doubt = "each", False
    try:
        completed = _claim_or_answer(runtime, deliveries, tokens, hold)
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:
        ran, is_in_doubt = "alone", True
        _note_failed("batch_not_claimed", deliveries, error)
    if holdings or is_in_doubt:  # else nothing is left to run
        metrics.batches.labels(deliveries[0].id.task, ran).inc()
    return [
        BatchAnswer(
            token,
            completed=completed.get(delivery.id.key),
            holding=(holding := holdings.get(delivery.id.key)),
            is_in_doubt=is_in_doubt and holding is None,
        )
        for token, delivery in zip(tokens, deliveries, strict=True)
    ]


def _claim_or_answer(
    runtime: Runtime, deliveries: Sequence[Delivery], tokens: Sequence[str], hold: Callable[[Claimed], None]
) -> dict[str, Completed]:
    """Claim those that have no record yet, and return the answers of those that have been completed, by key.

    `hold` is called for each claim once it is known to be made, also if this raises.
    """
    runtime.check_open()
    id, settings, asked_at = deliveries[0].id, runtime.settings, time.monotonic()
    claimed: set[str] = set()

    def note(claims: Sequence[Claimed]) -> None:
        for claim in claims:
            if claim.id.key not in claimed:
                claimed.add(claim.id.key)
                hold(claim)

    try:
        with metrics.phase(id.task, "claim"), runtime.autocommit(id.tenant) as connection:
            for some in batches.claim_new(
                connection,
                deliveries,
                tokens,
                service=settings.service,
                holder=runtime.holder,
                lease=settings.lease,
                horizon=settings.redelivery_horizon,
            ):
                note(some)
            known = [each for each in deliveries if each.id.key not in claimed]
            completed = batches.completed(connection, known, service=settings.service) if known else {}
    except SoftTimeLimitExceeded:
        raise
    except Exception:
        # What was claimed without an answer waits like the others, and is renewed meanwhile. If Postgres is away now, each delivery
        # asks later.
        with suppress(DBAPIError, PoolTimeout), runtime.autocommit(id.tenant) as connection:
            note(batches.claimed(connection, deliveries, tokens, asked_at=asked_at))
        raise
    finally:
        metrics.claims.labels(id.task).inc(len(claimed))
    metrics.duplicates.labels(id.task).inc(len(completed))
    return completed


def _note_failed(what: str, deliveries: Sequence[Delivery], error: Exception) -> None:
    # its place, and not its traceback, whose texts may have values
    write = log.warning if isinstance(error, SQLAlchemyError | LeaseLost) else log.error
    write(what, task=deliveries[0].id.task, many=len(deliveries), error=describe(error), at=where(error))


class _Batch:
    def __init__(
        self,
        runtime: Runtime,
        attempts: dict[int, SharingAttempt],
        policy: Policy,
        body: BatchBody,
        job: JobTime,
    ) -> None:
        self._job = job
        self._runtime = runtime
        self._attempts = attempts
        self._policy = policy
        self._body = body
        # of bodies that are known to be rolled back
        self._in_vain: list[str] = []

    @property
    def _id(self) -> OperationId:
        """Of one of them, whose task and tenant are those of all."""
        return next(iter(self._attempts.values())).claim.id

    def run(self) -> dict[int, Finished]:
        """First without savepoints: they cost two round trips each, and beyond 64 every other transaction looks them up on disk.

        If one body cannot stay, all are rolled back and run once more, each behind a savepoint. If one has met another
        transaction's lock, all are rolled back and run alone: a savepoint leaves the others' locks held, which would meet again.
        """
        crash_point("claimed")
        if not self._attempts:
            return {}
        ran, done = "together", None
        try:
            with suppress(_NotAll, IntegrityError):  # a constraint that is checked at COMMIT
                done = self._try(savepoints=False)
            if done is None:
                self._note_undone(*self._attempts.values())
                ran, done = "again", self._try(savepoints=True)
        except _Contended as contended:
            self._note_undone(*self._attempts.values())
            ran, done = "alone", {}
            error = describe(contended.__cause__ or contended)
            log.warning("batch_contended", task=self._id.task, many=len(self._attempts), error=error)
        finally:
            objects.forget(self._runtime.settings.large_results_at, self._in_vain)
        metrics.batches.labels(self._id.task, ran).inc()
        return done

    def _try(self, *, savepoints: bool) -> dict[int, Finished]:
        id = self._id
        with self._runtime.transaction(id.tenant) as connection:
            crash_point("body.entered")
            with metrics.phase(id.task, "body"):
                written = {
                    place: result
                    for place, attempt in self._until_it_is_long()
                    if (result := self._run_one(connection, place, attempt, savepoint=savepoints)) is not None
                }
            if not written:
                return {}
            with metrics.phase(id.task, "commit"):
                self._complete(connection, written)
        crash_point("finish.committed")
        metrics.completed.labels(id.task).inc(len(written))
        return {place: Finished(self._attempts[place].claim, result) for place, (result, _) in written.items()}

    def _until_it_is_long(self) -> Iterator[tuple[int, SharingAttempt]]:
        """The attempts that are begun in one transaction: what is left when it has lasted for the longest run is run alone."""
        until = time.monotonic() + self._runtime.settings.longest_run
        for place, attempt in self._attempts.items():
            if time.monotonic() > until:
                return
            yield place, attempt

    def _run_one(
        self, connection: Connection, place: int, attempt: SharingAttempt, *, savepoint: bool
    ) -> tuple[Any, str] | None:
        """Run a body behind what the others wrote. Returns its result, also as text; None: it cannot stay, and nothing of it does."""
        self._check_time()
        self._job.restart()
        try:
            body = partial(self._body, place)
            return run_within(self._runtime, connection, attempt, body, savepoint=savepoint)
        except SoftTimeLimitExceeded:
            raise
        except (Exception, CancelledError) as error:
            if is_for_anothers_lock(error):
                raise _Contended from error
            if not savepoint:
                raise _NotAll from error
            if connection.invalidated or not connection.in_transaction() or attempt.has_spoilt:
                raise
            self._note_undone(attempt)
            return None

    def _note_undone(self, *attempts: SharingAttempt) -> None:
        """Note what was put for these, whose transaction or savepoint is rolled back. An erasure would not find it."""
        self._in_vain += [each.stored for each in attempts if each.stored is not None]
        for each in attempts:
            each.stored = None

    def _check_time(self) -> None:
        """Raise `SoftTimeLimitExceeded`, which the pool raises once: a body may have handled it."""
        if self._job.is_over:
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


class _Contended(Exception):
    """A body has met a lock of another transaction, which may wait for one of this batch."""
