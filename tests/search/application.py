"""The application under search: a refund with a step, an effect and an `on_failed`, as in `tasks/refunds.py`.

Nothing here is unique and nothing is checked by the database, so that what goes wrong is there to be seen.
"""

from __future__ import annotations

from typing import Any

from celery import Celery
from sqlalchemy import text
from sqlalchemy.orm import Session

from idempotency import IdempotentTask, Operation, PermanentError
from idempotency.attempt.effects import DidNotHappen, EffectInDoubt, Happened, StillUnknown
from idempotency.errors import EffectUnknown, Unfinished
from idempotency.queues import quorum_queue
from tests.search.provider import Provider

QUEUE = "search"
# Few, so that a short plan of faults exhausts them.
MAX_ATTEMPTS = 3
# Nothing happens on a timer: time passes when an actor says so.
LEASE = 900.0
# Operations that end so wait for a person, and stay reserved.
OPEN_CODES = (EffectUnknown.default_code, Unfinished.default_code)

TABLES = """
CREATE TABLE payments (id text PRIMARY KEY, captured bigint, reserved bigint, refunded bigint);
CREATE TABLE refunds (id text PRIMARY KEY, payment_id text, amount bigint, status text, failure text, charge text);
CREATE TABLE failures (id bigserial PRIMARY KEY, refund_id text, code text, generation int);
"""

app = Celery("search", set_as_current=False)
provider = Provider()
# The application's functions that raise: "undo", "on_failed".
broken: set[str] = set()
# Which attempts ran their body: (key, generation, attempt) of each claim.
bodies: set[tuple[str, int, int]] = set()


def configure(database_url: str) -> None:
    """Point the application at a database. There is no broker: its place is taken by the world."""
    app.conf.update(
        broker_url="memory://",
        task_queues=[quorum_queue(QUEUE, exchange=QUEUE, dead_letter_queue=f"{QUEUE}-dead")],
        task_default_queue=QUEUE,
        task_default_exchange=QUEUE,
        task_default_exchange_type="topic",
        task_default_routing_key=QUEUE,
        task_create_missing_queues=False,
        task_ignore_result=True,
        task_serializer="json",
        accept_content=["json"],
        timezone="UTC",
        idempotency_database_url=database_url,
        idempotency_lease=LEASE,
        idempotency_heartbeat=LEASE / 4,
        idempotency_max_attempts=MAX_ATTEMPTS,
        # due at once: the order is the scheduler's, not a timer's
        idempotency_retry_base=0.0,
        idempotency_pool_size=2,
    )


_LOCK = text("""
SELECT r.amount, p.id AS payment_id, p.captured - p.reserved - p.refunded AS "left"
FROM refunds r JOIN payments p ON p.id = r.payment_id WHERE r.id = :id FOR UPDATE
""")
_RESERVE = text("""
WITH refund AS (UPDATE refunds SET status = 'reserved' WHERE id = :id RETURNING payment_id, amount)
UPDATE payments p SET reserved = p.reserved + r.amount FROM refund r WHERE p.id = r.payment_id
""")
_UNRESERVE = text("""
WITH refund AS (UPDATE refunds SET status = 'pending' WHERE id = :id RETURNING payment_id, amount)
UPDATE payments p SET reserved = p.reserved - r.amount FROM refund r WHERE p.id = r.payment_id
""")
_PAID = text("""
WITH refund AS (UPDATE refunds SET status = 'refunded', charge = :charge, failure = NULL WHERE id = :id
                RETURNING payment_id, amount)
UPDATE payments p SET reserved = p.reserved - r.amount, refunded = p.refunded + r.amount
FROM refund r WHERE p.id = r.payment_id
""")
# What was reserved is the undo's business.
_FAILED = text("""
WITH refund AS (UPDATE refunds SET status = CASE WHEN :open THEN 'unknown' ELSE 'refused' END, failure = :code
                WHERE id = :id)
INSERT INTO failures (refund_id, code, generation)
SELECT :id, :code, generation FROM idempotency.records WHERE key = :id
""")


def reserve(session: Session, refund_id: str) -> dict[str, Any]:
    """Set the amount aside on the payment, or say why there will be no refund."""
    row = session.execute(_LOCK, {"id": refund_id}).one()
    if row.amount > row.left:
        raise PermanentError(f"amount: at most {row.left} left to refund, got {row.amount}", "exceeds_captured")
    session.execute(_RESERVE, {"id": refund_id})
    return {"id": refund_id, "amount": row.amount}


def unreserve(session: Session, result: dict[str, Any]) -> None:
    """Free what the step has set aside."""
    if "undo" in broken:
        raise ValueError("the undo is broken")
    session.execute(_UNRESERVE, {"id": result["id"]})


def refund_failed(session: Session, operation: Operation, error: PermanentError) -> None:
    """Say in the business rows that it has failed."""
    if "on_failed" in broken:
        raise ValueError("on_failed is broken")
    session.execute(_FAILED, {"id": operation.key, "code": error.code, "open": error.code in OPEN_CODES})


def call_provider(refund_id: str, amount: int, *, idempotency_key: str) -> dict[str, str]:
    return provider.call(refund_id, amount, idempotency_key)


def find_refund(refund_id: str, amount: int, *, doubt: EffectInDoubt) -> Happened | StillUnknown:
    """The truth, as far as a provider can tell it: what is not there may still be on its way under this key."""
    charge = provider.find(doubt.idempotency_key)
    return StillUnknown() if charge is None else Happened({"id": charge.id})


def close_refund(refund_id: str, amount: int, *, doubt: EffectInDoubt) -> Happened | DidNotHappen:
    """The truth, for good: what is not there cannot happen under this key any more."""
    charge = provider.close(doubt.idempotency_key)
    return DidNotHappen() if charge is None else Happened({"id": charge.id})


def _refund(self: IdempotentTask, refund_id: str, **effect: Any) -> dict[str, Any]:
    claim = self.request.attempt.claim
    bodies.add((claim.id.key, claim.generation, claim.attempts))
    reserved = self.step("reserve", reserve, refund_id, undo=unreserve)
    answer = self.effect("refund", call_provider, refund_id, reserved["amount"], **effect)
    self.session.execute(_PAID, {"id": refund_id, "charge": answer["id"]})
    return {"charge": answer["id"]}


@app.task(base=IdempotentTask, bind=True, name="search.asked", key="{refund_id}", on_failed=refund_failed, shared=False)
def asked(self: IdempotentTask, refund_id: str) -> dict[str, Any]:
    """Give money back; after a doubt the provider is asked."""
    return _refund(self, refund_id, reconcile=find_refund)


@app.task(
    base=IdempotentTask, bind=True, name="search.closed", key="{refund_id}", on_failed=refund_failed, shared=False
)
def closed(self: IdempotentTask, refund_id: str) -> dict[str, Any]:
    """Give money back; after a doubt the provider is asked, and lets nothing more happen under the key."""
    return _refund(self, refund_id, reconcile=close_refund)


@app.task(base=IdempotentTask, bind=True, name="search.bare", key="{refund_id}", on_failed=refund_failed, shared=False)
def bare(self: IdempotentTask, refund_id: str) -> dict[str, Any]:
    """Give money back; the provider cannot be asked."""
    return _refund(self, refund_id)
