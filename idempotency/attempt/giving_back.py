"""Claims of a batch whose messages were not begun are given back: a limit is near, or the worker stops."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from ..errors import LeaseLost
from ..observe import metrics
from ..observe.logs import log
from ..store import ends, operations
from ..store.answers import Claimed, claim_of
from ..store.statements import describe, is_outage
from ..wire.delivery import Delivery
from .attempt import Attempt
from .batch import BatchAnswer
from .claim import at_once
from .policy import Policy
from .runtime import Runtime


def give_back(runtime: Runtime, waiting: Sequence[tuple[Delivery, BatchAnswer]], policy: Policy) -> None:
    """Give back claims of one task under which nothing has run, and do not count them: their messages come again.

    Together by their tokens; if that is refused, each by itself. While Postgres is away they are left to their leases.
    """
    by_tenant = sorted(waiting, key=lambda each: each[0].id.tenant)
    for _, group in groupby(by_tenant, key=lambda each: each[0].id.tenant):
        members = list(group)
        try:
            # once more over another connection: this one may have been idle for as long as a body ran
            at_once(partial(_give_back_together, runtime, members))
        except (DBAPIError, PoolTimeout) as error:
            if not _is_away(error) and _give_back_each(runtime, members, policy):
                continue  # which has told of each that could not be
            task = members[0][0].id.task
            log.warning("claims_not_given_back", task=task, many=len(members), error=describe(error))
            return


def _give_back_together(runtime: Runtime, members: Sequence[tuple[Delivery, BatchAnswer]]) -> None:
    id = members[0][0].id
    with runtime.autocommit(id.tenant) as connection:
        released = ends.give_back(
            connection, [delivery.id for delivery, _ in members], [answer.token for _, answer in members]
        )
    if released:
        metrics.deferrals.labels(id.task).inc(len(released))
        log.info("claims_given_back", task=id.task, many=len(released))
    for delivery, answer in members:
        if delivery.id.key in released:  # a heartbeat may have left a hint
            runtime.hints.drop(delivery.id, answer.token, delivery.fingerprint)


def _give_back_each(runtime: Runtime, members: Sequence[tuple[Delivery, BatchAnswer]], policy: Policy) -> bool:
    """Returns whether Postgres has answered for each."""
    for delivery, answer in members:
        try:
            claim = _claim_under(runtime, delivery, answer.token) if answer.is_in_doubt else answer.claim
            if claim is not None:
                _release(Attempt(runtime, claim, delivery, policy))
        except (LeaseLost, DBAPIError, PoolTimeout) as error:
            log.warning("claim_not_given_back", task=delivery.id.task, key=delivery.id.key, error=type(error).__name__)
            if _is_away(error):
                return False
    return True


def _claim_under(runtime: Runtime, delivery: Delivery, token: str) -> Claimed | None:
    """The claim under a token whose statement had no answer, if it was made."""
    with runtime.autocommit(delivery.id.tenant) as connection:
        record = operations.read_locked(connection, delivery.id)
    if record is None or (record.status, record.token) != ("started", token):
        return None
    return claim_of(delivery.id, record)


def _release(attempt: Attempt) -> None:
    try:
        attempt.release(delay=0.0, error=None, give_back=True)
    finally:
        attempt.close()


def _is_away(error: BaseException) -> bool:
    return isinstance(error, PoolTimeout) or is_outage(error)
