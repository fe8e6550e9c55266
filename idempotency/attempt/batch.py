"""Many first attempts of one task: claimed by one statement, or run and completed in one transaction.

    answers = claim_together(runtime, deliveries)
    answers = run_together(runtime, deliveries, policy, body)

`claim_together` claims operations that have no record yet, and the caller runs each by `run`, in a transaction of its own. Those
that have been completed are answered.

`run_together` claims nothing. What the bodies write and their records are one commit, so that a crash leaves nothing behind,
and of two that run the same operation at once the unique key lets one commit. Only what is plain is run so: bodies that write to
their session and return. Everything else (an error, an effect, a step, a duplicate, a commit without an answer) the caller runs
alone, by `run`. So such a body may run up to three times for one attempt; what it wrote before is rolled back.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from billiard.exceptions import SoftTimeLimitExceeded
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from ..errors import IdempotencyError, LeaseLost
from ..framework import Framework, framework
from ..observe import metrics
from ..observe.crash_points import crash_point
from ..observe.logs import log
from ..store import batches, operations
from ..store.answers import Claimed, Completed, claim_of
from ..store.connections import act_for
from ..store.statements import describe, execute
from ..wire.delivery import Delivery
from .attempt import Attempt
from .endings import Finished
from .heartbeat import Holding
from .policy import Policy
from .runtime import Runtime
from .session import LEADING, sessions_of

# The body of a delivery, given by its place in the batch.
BatchBody = Callable[[int, "SharingAttempt"], Any]
# What a body has SET would be so for the next ones.
_SETS = re.compile(LEADING + r"(?:set|reset|discard|do)\b|.*\bset_config\b", re.IGNORECASE | re.DOTALL)
# A call of `idempotency.about`, as `enqueue` makes one, and the name of the parameter that is its tenant.
_ABOUT = re.compile(r'\babout"?\s*\(\s*(?:%\((\w+)\)s)?', re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one delivery: it has ended (`outcome`), is claimed (`claim`), or has to ask its record under this token."""

    token: str
    # Its outcome, if nothing is left to run: completed now, or before.
    outcome: Finished | Completed | None = None
    # It is claimed, and the heartbeat renews this until it is run or given up.
    holding: Holding | None = None
    # It may be claimed: the claiming statement had no answer.
    is_in_doubt: bool = False

    @property
    def claim(self) -> Claimed | None:
        """The claim that it can be run under; None: its record has to be asked."""
        holding = self.holding
        if holding is None or holding.lost:
            return None
        return replace(holding.claim, asked_at=holding.renewed_at, has_hint=holding.is_renewed)


class Alone(IdempotencyError):
    """This body needs a transaction of its own."""


class SharingAttempt(Attempt):
    """A first attempt whose body shares its transaction with others, and that has claimed nothing.

    Its operation has no record before the commit, so no lease has to be renewed, and none can be lost. It may not commit
    anything before its end.
    """

    # Whether the body has rolled back past SQLAlchemy, and so what others had written.
    has_rolled_back = False
    # Whether the transaction may be about another tenant, too.
    is_about_others = False
    # Its span, which is noted with its end.
    trace: str | None = None

    def __init__(self, runtime: Runtime, delivery: Delivery, policy: Policy) -> None:
        unclaimed = Claimed(delivery.id, 0, "", 1, 1, 0.0, {}, fingerprint=delivery.fingerprint, has_hint=False)
        super().__init__(runtime, unclaimed, delivery, policy)

    def hold(self) -> None:
        """Nothing: there is no lease."""

    def check_lease(self) -> None:
        """Nothing: the commit decides."""

    def check_may_begin(self) -> None:
        self.leave()

    def watch(self, statement: str, parameters: Any) -> None:
        """Leave because of a statement that sets something, and note one that names another tenant."""
        if _SETS.match(statement):
            self.leave()
        given = parameters if isinstance(parameters, Mapping) else {}
        if any(given.get(name) != self.claim.id.tenant for name in _ABOUT.findall(statement)):
            self.is_about_others = True

    def leave(self) -> None:
        """Have the body run alone, even if it catches what this raises."""
        self.stopped = True
        raise Alone(f"{self.claim.id.task}: needs a transaction of its own")


def run_together(runtime: Runtime, deliveries: Sequence[Delivery], policy: Policy, body: BatchBody) -> list[Answer]:
    """Run and commit these deliveries of one task and tenant, with keys that differ; one answer for each.

    Raises what ends the process, and `SoftTimeLimitExceeded`: nothing of what ran is committed then. Whatever else goes wrong,
    they are run alone.
    """
    done: dict[int, Finished] = {}
    known: dict[str, Completed | None] = {}
    if type(framework()) is Framework:  # a framework's own connection is in one session at a time
        try:
            known, most = _known(runtime, deliveries)
            new = [place for place, delivery in enumerate(deliveries) if delivery.id.key not in known]
            for begin in range(0, len(new), most):
                done |= _Batch(runtime, deliveries, policy, body).run(new[begin : begin + most])
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:
            # A COMMIT may have succeeded all the same. The records know, and each delivery asks its own.
            log.warning("batch_not_committed", task=deliveries[0].id.task, many=len(deliveries), error=describe(error))
    return [
        Answer(secrets.token_hex(16), outcome=done.get(place) or known.get(delivery.id.key))
        for place, delivery in enumerate(deliveries)
    ]


def _known(runtime: Runtime, deliveries: Sequence[Delivery]) -> tuple[dict[str, Completed | None], int]:
    """Which of these cannot be begun as new ones, by key, with the answers of completed ones; and how many may be together."""
    runtime.check_open()
    id, settings = deliveries[0].id, runtime.settings
    with metrics.phase(id.task, "claim"), runtime.autocommit(id.tenant) as connection:
        known = batches.known(connection, deliveries, service=settings.service, horizon=settings.redelivery_horizon)
        most = batches.most_together(connection, len(deliveries))
    metrics.duplicates.labels(id.task).inc(sum(answer is not None for answer in known.values()))
    return known, most


def claim_together(runtime: Runtime, deliveries: Sequence[Delivery]) -> list[Answer]:
    """Claim these deliveries of one task and tenant, with keys that differ, to be run one after the other.

    The heartbeat renews the claims of those that wait. Raises `SoftTimeLimitExceeded`; whatever else goes wrong, they are
    claimed alone.
    """
    tokens = [secrets.token_hex(16) for _ in deliveries]
    try:
        claims, completed = _claim_or_answer(runtime, deliveries, tokens)
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:
        log.warning("batch_not_claimed", task=deliveries[0].id.task, many=len(deliveries), error=describe(error))
        return [Answer(token, is_in_doubt=True) for token in tokens]
    return [
        Answer(token, outcome=completed.get(delivery.id.key), holding=_held(runtime, claims.get(delivery.id.key)))
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
        known = {}
        if others := [each for each in deliveries if each.id.key not in claims]:
            known = batches.known(connection, others, service=settings.service, horizon=settings.redelivery_horizon)
    completed = {key: answer for key, answer in known.items() if answer is not None}
    metrics.claims.labels(id.task).inc(len(claims))
    metrics.duplicates.labels(id.task).inc(len(completed))
    return claims, completed


class _Batch:
    def __init__(self, runtime: Runtime, deliveries: Sequence[Delivery], policy: Policy, body: BatchBody) -> None:
        self._runtime = runtime
        self._deliveries = deliveries
        self._policy = policy
        self._body = body

    def run(self, places: Sequence[int]) -> dict[int, Finished]:
        """First without savepoints: they cost two round trips each, and beyond 64 every other transaction looks them up on disk.

        If one body cannot stay, all are rolled back and run once more, each behind a savepoint.
        """
        if not places:
            return {}
        attempts = {place: SharingAttempt(self._runtime, self._deliveries[place], self._policy) for place in places}
        try:
            with suppress(_NotAll, IntegrityError):  # a constraint that is checked at COMMIT
                return self._try(attempts, savepoints=False)
            return self._try(attempts, savepoints=True)
        finally:
            for attempt in attempts.values():
                attempt.close()

    def _try(self, attempts: dict[int, SharingAttempt], *, savepoints: bool) -> dict[int, Finished]:
        """Run and commit them. Takes those out that something else has begun meanwhile: raises `_NotAll` because of them."""
        id = self._deliveries[0].id
        with self._runtime.transaction(id.tenant) as connection:
            crash_point("body.entered")
            with metrics.phase(id.task, "body"):
                written = {
                    place: result
                    for place, attempt in attempts.items()
                    if (result := self._stays(connection, place, attempt, savepoint=savepoints)) is not None
                }
            if not written:
                return {}
            with metrics.phase(id.task, "commit"):
                self._complete(connection, attempts, written)
        crash_point("finish.committed")
        metrics.completed.labels(id.task).inc(len(written))
        return {place: Finished(attempts[place].claim, result) for place, (result, _) in written.items()}

    def _stays(
        self, connection: Connection, place: int, attempt: SharingAttempt, *, savepoint: bool
    ) -> tuple[Any, str] | None:
        """Run a body. Returns its result, also as text; None: it cannot stay, and nothing of it does."""
        try:
            body = partial(self._body, place)
            return run_within(self._runtime, connection, attempt, body, savepoint=savepoint)
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:
            if not savepoint:
                raise _NotAll from error
            if connection.invalidated or not connection.in_transaction() or attempt.has_rolled_back:
                raise
            return None

    def _complete(
        self, connection: Connection, attempts: dict[int, SharingAttempt], written: dict[int, tuple[Any, str]]
    ) -> None:
        settings = self._runtime.settings
        recorded = batches.complete_new(
            connection,
            [self._deliveries[place] for place in written],
            [stored for _, stored in written.values()],
            [attempts[place].trace for place in written],
            service=settings.service,
            holder=self._runtime.holder,
            retention=self._policy.retention_completed,
            lease=settings.lease,
        )
        crash_point("finish.written")
        if others := [place for place in written if self._deliveries[place].id.key not in recorded]:
            for place in others:
                attempts.pop(place).close()
            raise _NotAll


def run_within(
    runtime: Runtime,
    connection: Connection,
    attempt: SharingAttempt,
    body: Callable[[Any], Any],
    *,
    savepoint: bool = False,
) -> tuple[Any, str]:
    """Run a body in a transaction that others share, and flush what it wrote. Returns its result, and that as text.

    Raises what the body raises, and `Alone`. Without a `savepoint`, only a rollback of all undoes what it wrote by then.
    """
    session = sessions_of(runtime.engine).within(connection, savepoint=savepoint)
    attempt.writes.use(session)
    attempt.stopped, attempt.is_about_others, shared = False, False, connection.get_transaction()
    session.watch = attempt.watch
    driver: Any = connection.connection.driver_connection
    rollbacks = getattr(driver, "rollbacks", 0)
    try:
        try:
            if session.tells_of_commit:
                attempt.leave()
            result = body(attempt)
            stored = runtime.stored_result(result)
            session.flush()
        finally:
            attempt.has_rolled_back = getattr(driver, "rollbacks", 0) != rollbacks
        if (
            attempt.stopped
            or session.tells_of_commit
            or attempt.has_rolled_back
            or not connection.in_transaction()
            or connection.get_transaction() is not shared
        ):
            attempt.leave()  # perhaps it has rolled back more than its own
        if savepoint:  # at COMMIT, a violation would roll back everything
            execute(connection, "SET CONSTRAINTS ALL IMMEDIATE")
            execute(connection, "SET CONSTRAINTS ALL DEFERRED")
        session.end_with_commit()  # of the savepoint, if there is one
        if attempt.is_about_others:
            act_for(connection, [attempt.claim.id.tenant])
    finally:
        session.watch = None
        session.end()
    return result, stored


class _NotAll(Exception):
    """One of them cannot stay in the transaction, and no savepoint is before it."""
