"""The application of `make soak`: a short task in all its ways, in both kinds of batches; nothing is kept for long.

Of five operations four are postings, of which up to a hundred share a transaction; the fifth is claimed in batches of up to
twenty, and committed by itself, as what calls outside has to be.
"""

from __future__ import annotations

from typing import Any

from idempotency import IdempotentTask, PermanentError

from .jobs import INSERT, app, charge

__all__ = ["app"]

# Seconds. A table is as large as what ends in this time, so it is flat after twice that time.
KEPT = 60.0
TOGETHER = 5
# The code of those that fail.
REFUSED = "soaked"
# Of a hundred operations of each task, in this order; only what commits by itself calls outside.
FAILED, RETRIED, OUTSIDE, TWICE = 1, 3, 5, 3

app.conf.update(
    {
        f"idempotency_{name}": KEPT
        for name in ("redelivery_horizon", "retention_completed", "retention_failed", "retention_dead_letters")
    }
)
app.conf.idempotency_retry_base = 0.1
app.conf.task_routes = {"benchmarks.soaked.soaked": {"queue": "unique"}, "benchmarks.soaked.posted": {"queue": "batch"}}


def task_of(number: int) -> IdempotentTask:
    """Which task carries this number out."""
    task: IdempotentTask = posted if number % TOGETHER else soaked
    return task


def is_failed(number: int) -> bool:
    return _share(number) < FAILED


def is_sent_twice(number: int) -> bool:
    return _share(number) >= 100 - TWICE


@app.task(base=IdempotentTask, bind=True, key="{number}", batch=20, batch_commit="each")
def soaked(self: IdempotentTask, number: int) -> Any:
    """One row; some fail, some succeed the second time, some call outside."""
    _go_wrong(self, number)
    if _share(number) < FAILED + RETRIED + OUTSIDE:
        self.effect("charge", charge, number)
    self.session.execute(INSERT, {"job": "soaked", "number": number})
    return {"number": number}


@app.task(base=IdempotentTask, bind=True, key="{number}", batch=100)
def posted(self: IdempotentTask, number: int) -> Any:
    """One row; some fail, some succeed the second time."""
    _go_wrong(self, number)
    self.session.execute(INSERT, {"job": "posted", "number": number})
    return {"number": number}


def _share(number: int) -> int:
    return number // TOGETHER % 100


def _go_wrong(task: IdempotentTask, number: int) -> None:
    if is_failed(number):
        raise PermanentError("not today", REFUSED)
    if _share(number) < FAILED + RETRIED and task.request.retries == 0:
        raise ValueError("not yet")
