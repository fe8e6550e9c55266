"""What beat schedules. Plain tasks: the work itself is safe to run any number of times at once."""

from __future__ import annotations

from idempotency.relay.resend import resend_lost
from idempotency.upkeep import alarms, alerts, maintenance, reports

from . import app


@app.task(name="maintenance.recover")
def recover() -> int:
    """Release orphaned operations; returns how many."""
    return maintenance.recover(app)


@app.task(name="maintenance.resend")
def resend_outbox() -> int:
    """Send again what the broker has lost; returns how many operations."""
    return resend_lost(app).resent


@app.task(name="maintenance.purge")
def purge() -> int:
    """Delete what is past its retention; returns how many records."""
    return maintenance.purge(app)


@app.task(name="maintenance.alert")
def alert() -> int:
    """Tell what has become a dead letter and which alarms are on; returns how many."""
    return alerts.run_once(app) + alarms.run_once(app)


@app.task(name="maintenance.report")
def report() -> bool:
    """Mail the weekly report, once a week however often it is asked for; returns whether it was sent."""
    return reports.mail_weekly(app)
