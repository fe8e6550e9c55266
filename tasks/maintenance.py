"""Scheduled maintenance. Plain tasks, because the work is safe to repeat and to run concurrently."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from idempotency.relay.resend import resend_lost
from idempotency.upkeep import alarms, alerts, maintenance, reports

from . import app, reconciliation


@app.task(name="maintenance.recover")
def recover() -> int:
    """Release orphaned operations; returns how many."""
    return maintenance.recover(app)


@app.task(name="maintenance.resend")
def resend_outbox() -> int:
    """Resend what the broker has lost; returns how many operations."""
    return resend_lost(app).resent


@app.task(name="maintenance.purge")
def purge() -> int:
    """Delete what is past its retention; returns how many operations."""
    return maintenance.purge(app)


# A list of many charges takes longer than a payment.
@app.task(name="maintenance.reconcile_provider", soft_time_limit=3 * 3600, time_limit=3 * 3600 + 60)
def reconcile_provider() -> int:
    """Compare the last month of the provider with the ledger, after what waits was looked at again. Returns how many objects differ.

    Raises `RuntimeError` at its end if questions had no answer: what they were about is compared the next day.
    """
    until = datetime.now(UTC) - reconciliation.SETTLED_AFTER
    unanswered = reconciliation.prepare(until)
    days = reconciliation.days_before(until, reconciliation.WINDOW / timedelta(days=1))
    compared = [reconciliation.reconcile(since, end) for since, end in days]
    unanswered += [why for each in compared for why in each.unanswered]
    if unanswered:
        raise RuntimeError(f"{len(unanswered)} questions have no answer: {unanswered[0]}")
    return sum(len(each.differences) for each in compared)


@app.task(name="maintenance.alert")
def alert() -> int:
    """Send alerts about dead letters and alarms; returns how many."""
    return alerts.run_once(app) + alarms.run_once(app)


@app.task(name="maintenance.report")
def report() -> bool:
    """Mail the weekly report if it is due; returns whether it was sent."""
    return reports.mail_weekly(app)
