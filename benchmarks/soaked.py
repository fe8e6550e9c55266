"""The application of `make soak`: one short task in all its ways, claimed twenty at once; nothing is kept for long."""

from __future__ import annotations

from typing import Any

from idempotency import IdempotentTask, PermanentError

from .jobs import INSERT, app, charge

__all__ = ["app"]

# Seconds. A table is as large as what ends in this time, so it is flat after twice of it.
KEPT = 60.0
# Of a hundred operations, in this order.
FAILED, RETRIED, OUTSIDE, TWICE = 1, 3, 5, 3

app.conf.update(
    {
        f"idempotency_{name}": KEPT
        for name in ("redelivery_horizon", "retention_completed", "retention_failed", "retention_dead_letters")
    }
)
app.conf.idempotency_retry_base = 0.1
app.conf.task_routes = {"benchmarks.soaked.soaked": {"queue": "unique"}}


def is_failed(number: int) -> bool:
    return number % 100 < FAILED


def is_sent_twice(number: int) -> bool:
    return number % 100 >= 100 - TWICE


@app.task(base=IdempotentTask, bind=True, key="{number}", batch=20, batch_commit="each")
def soaked(self: IdempotentTask, number: int) -> Any:
    """One row; some fail, some succeed the second time, some call outside."""
    place = number % 100
    if is_failed(number):
        raise PermanentError("not today", "soaked")
    if place < FAILED + RETRIED and self.request.retries == 0:
        raise ValueError("not yet")
    if place < FAILED + RETRIED + OUTSIDE:
        self.effect("charge", charge, number)
    self.session.execute(INSERT, {"job": "soaked", "number": number})
    return {"number": number}
