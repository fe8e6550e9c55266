"""The claim: first Redis, which may make the question unnecessary, then Postgres, which decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from ..observe import metrics
from ..observe.crash_points import crash_point
from ..store import claims, edits
from ..store.answers import Answer, Busy, Changed, Claimed, Completed, Failed, Foreign, Mismatch, Stale
from ..store.driver import Unanswered
from ..wire.delivery import Delivery
from ..wire.headers import OUTBOX_HEADER
from .hints import Hint
from .runtime import Runtime

T = TypeVar("T")


class Patience(Protocol):
    """Asks until there is an answer, or gives up with an exception that it defines."""

    def __call__(self, ask: Callable[[], T], /) -> T: ...


def at_once(ask: Callable[[], T], /) -> T:
    """Ask once: for a caller who can be told that Postgres is away.

    And once more if the connection was found closed, as idle ones are when Postgres has been restarted. The same token
    claims the same attempt, so a claim whose answer was lost is not made twice.
    """
    try:
        return ask()
    except DBAPIError as error:
        if not error.connection_invalidated or isinstance(error.orig, Unanswered):
            raise
    return ask()


def claim(
    runtime: Runtime, delivery: Delivery, token: str, patiently: Patience = at_once, *, again: bool = False
) -> Claimed | Completed | Failed | Mismatch | Foreign | Stale | Busy:
    """Claim the operation, or learn from its record why not. Raises what `patiently` does.

    `Busy` comes only after a duplicate was counted on the record, now or by an earlier delivery: its holder will finish it, so
    this delivery may go. (Not if the operation is `only_asked` for, or if it `waits`: its caller asks again.) `again`: after a
    doubt, when the holder may be this attempt, whatever a hint says. Raises `WrongCell`, too.
    """
    runtime.settings.check_cell(delivery.id.tenant)
    with runtime.phase(delivery.id.task, "claim"):
        return _claim(runtime, delivery, token, patiently, again)


def _claim(
    runtime: Runtime, delivery: Delivery, token: str, patiently: Patience, again: bool
) -> Claimed | Completed | Failed | Mismatch | Foreign | Stale | Busy:
    hints, id = runtime.hints, delivery.id
    # Without a message, this caller may be the only way on: then, too, Postgres decides.
    skips_hint = delivery.resent or not delivery.message
    hint = Hint.FREE if skips_hint else hints.take(id, token, delivery.fingerprint)
    if hint is Hint.COUNTED and not again:
        metrics.busy.labels(id.task).inc()
        return Busy()  # a duplicate was counted before this one: the record will be finished without it
    crash_point("hint.left")
    answer = patiently(lambda: _answer(runtime, delivery, token, duplicate_first=hint is Hint.HELD and not again))
    if isinstance(answer, Claimed):
        if hint in (Hint.HELD, Hint.COUNTED) or (skips_hint and not delivery.only_asked):
            hints.hold([(id, token, delivery.fingerprint)])
    elif hint is Hint.FREE:
        hints.drop(id, token, delivery.fingerprint)
    _count(answer, id.task)
    return replace(answer, _decode=runtime.read_result) if isinstance(answer, Completed) else answer


def peek(runtime: Runtime, delivery: Delivery) -> Completed | Failed | Mismatch | Foreign | Busy | None:
    """What a claim would be answered, without waiting for a lock; None: it might succeed. Of what has ended, once a standby has it."""
    with runtime.autocommit(delivery.id.tenant) as connection:
        answer = claims.peek(
            connection,
            delivery.id,
            service=runtime.settings.service,
            fingerprint=delivery.fingerprint,
            also=delivery.also,
        )
        return _of_edited(runtime, connection, delivery) or answer if isinstance(answer, Mismatch) else answer


def _answer(
    runtime: Runtime, delivery: Delivery, token: str, *, duplicate_first: bool
) -> Claimed | Completed | Failed | Mismatch | Foreign | Stale | Busy:
    with runtime.autocommit(delivery.id.tenant) as connection:
        if duplicate_first and _counted(runtime, connection, delivery):
            return Busy()
        while True:
            answer = ask(runtime, connection, delivery, token, synchronous=False)
            if isinstance(answer, Busy) and (
                answer.is_known or delivery.only_asked or delivery.waits or _counted(runtime, connection, delivery)
            ):
                return answer
            if not isinstance(answer, Changed | Busy):
                return answer
            # the row became claimable meanwhile


def ask(
    runtime: Runtime, connection: Connection, delivery: Delivery, token: str, *, synchronous: bool = True
) -> Answer:
    """Claim the operation of a delivery on the record, by one statement."""
    answer = claims.claim(
        connection,
        delivery.id,
        service=runtime.settings.service,
        token=token,
        fingerprint=delivery.fingerprint,
        message=delivery.message,
        holder=runtime.holder,
        lease=runtime.settings.lease,
        queue=delivery.queue,
        synchronous=synchronous,
        also=delivery.also,
        signed_at=delivery.signed_at,
        horizon=runtime.settings.redelivery_horizon,
    )
    return _of_edited(runtime, connection, delivery) or answer if isinstance(answer, Mismatch) else answer


def _of_edited(
    runtime: Runtime, connection: Connection, delivery: Delivery
) -> Completed | Failed | Foreign | Busy | None:
    """What a request is told whose operation a person has edited since: it is a duplicate, and its own arguments never run.

    None: its arguments were never this operation's.
    """
    service, given = runtime.settings.service, [delivery.fingerprint, *delivery.also]
    if (present := edits.became(connection, delivery.id, given)) is None:
        return None
    if isinstance(row := delivery.headers.get(OUTBOX_HEADER), str):
        edits.settle(connection, delivery.id, given, row)
    answer = claims.peek(connection, delivery.id, service=service, fingerprint=present)
    if isinstance(answer, Completed | Failed | Foreign):
        return answer
    # Also one that is due: what runs it is on disk, the delivery that its replay has written or the letter that waits for one.
    claims.count_duplicate(connection, delivery.id, present, service=service)
    return Busy(is_known=True)


def _counted(runtime: Runtime, connection: Connection, delivery: Delivery) -> bool:
    counted, holder = claims.count_duplicate(
        connection,
        delivery.id,
        delivery.fingerprint,
        delivery.also,
        service=runtime.settings.service,
        message=delivery.message,
        queue=delivery.queue,
    )
    if counted and holder is not None:
        runtime.hints.count(delivery.id, holder, delivery.fingerprint)
    return counted


def _count(answer: Answer, task: str) -> None:
    match answer:
        case Claimed(taken_over=taken_over):
            metrics.claims.labels(task).inc()
            if taken_over:
                metrics.takeovers.labels(task).inc()
        case Completed() | Failed():
            metrics.duplicates.labels(task).inc()
        case Busy():
            metrics.busy.labels(task).inc()
