"""Scheduled maintenance. Plain tasks, because the work is safe to repeat and to run concurrently."""

from __future__ import annotations

from datetime import UTC, datetime

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


@app.task(name="maintenance.reconcile_provider")
def reconcile_provider() -> int:
    """Compare the last days of the provider with the ledger; returns how many objects differ."""
    until = datetime.now(UTC) - reconciliation.SETTLED_AFTER
    return len(reconciliation.reconcile(until - reconciliation.WINDOW, until))


@app.task(name="maintenance.alert")
def alert() -> int:
    """Send alerts about dead letters and alarms; returns how many."""
    return alerts.run_once(app) + alarms.run_once(app)


@app.task(name="maintenance.report")
def report() -> bool:
    """Mail the weekly report if it is due; returns whether it was sent."""
    return reports.mail_weekly(app)
