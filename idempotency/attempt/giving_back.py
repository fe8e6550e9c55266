"""Claims of a batch whose messages were not begun are given back: a limit is near, or the worker stops."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from ..errors import LeaseLost
from ..observe import metrics
from ..observe.logs import log
from ..store import ends, operations
from ..store.answers import Claimed, claim_of
from ..store.statements import describe, driver_error
from ..wire.delivery import Delivery
from .attempt import Attempt
from .batch import Answer
from .policy import Policy
from .runtime import Runtime


def give_back(runtime: Runtime, waiting: Sequence[tuple[Delivery, Answer]], policy: Policy) -> None:
    """Give back claims of one task under which nothing has run, and do not count them: their messages come again.

    Together by their tokens; if that is refused, each by itself. Without an answer of Postgres they are left to their leases.
    """
    by_tenant = sorted(waiting, key=lambda each: each[0].id.tenant)
    for tenant, group in groupby(by_tenant, key=lambda each: each[0].id.tenant):
        members = list(group)
        ids, tokens = [delivery.id for delivery, _ in members], [answer.token for _, answer in members]
        try:
            with runtime.autocommit(tenant) as connection:
                given_back = ends.give_back(connection, ids, tokens)
        except (DBAPIError, PoolTimeout) as error:
            log.warning("claims_not_given_back", task=ids[0].task, many=len(ids), error=describe(error))
            if getattr(driver_error(error), "sqlstate", None) is None:
                return
            for delivery, answer in members:
                _give_back_alone(runtime, delivery, answer, policy)
            continue
        metrics.deferrals.labels(ids[0].task).inc(len(given_back))
        if given_back:
            log.info("claims_given_back", task=ids[0].task, many=len(given_back))
        for delivery, answer in members:
            if delivery.id.key in given_back:  # a heartbeat may have left a hint
                runtime.hints.drop(delivery.id, answer.token, delivery.fingerprint)


def _give_back_alone(runtime: Runtime, delivery: Delivery, answer: Answer, policy: Policy) -> None:
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
