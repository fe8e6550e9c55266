"""Deleting what is kept beside operations once its time is over: events, notes on sagas, deliveries of webhooks, former requests, notes."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection

from . import edits, sweeps
from .purge import BATCH, RESTING
from .record import is_open, unsettled
from .sweeps import THIS_RECORD, Pace, Sweep, deletes

# How long a row that was set aside and is no longer due is kept for people to see, in seconds.
REMEMBER = 86400.0

_PAST = "(SELECT clock_timestamp() - make_interval(secs => %(retention)s))"

# A saga keeps those that it has used in its own rows. It may come to wait for any that is younger than itself, so the
# oldest one that runs bounds what is deleted; one bound for all, so that no pass reads what has to stay.
EVENTS = Sweep(
    "forget_events",
    table="saga_events",
    shown_as="r.tenant, r.event_type AS task, r.event_id AS key",
    columns="r.id",
    due="""r.service = %(service)s
      AND r.received_at < (SELECT least(clock_timestamp() - make_interval(secs => %(retention)s), min(g.accepted_at))
                           FROM idempotency.sagas g WHERE g.status = 'RUNNING' AND g.service = %(service)s)""",
    order="r.received_at",
    one="r.id = %(id)s",
    id="r.id::text",
    then=deletes("saga_events"),
)

# What an observer has noted, also of a process whose end it never saw; and sagas that were cancelled before they were enqueued.
OBSERVED = Sweep(
    "forget_observed",
    table="sagas",
    columns="r.id",
    due=f"""(r.observed OR r.status = 'COMPENSATING') AND r.service = %(service)s AND r.updated_at < {_PAST}
      AND (SELECT true FROM idempotency.records p
           WHERE p.tenant = r.tenant AND p.task = r.task AND p.key = r.key LIMIT 1) IS NULL
      AND (SELECT true FROM idempotency.outbox o
           WHERE o.tenant = r.tenant AND o.task = r.task AND o.key = r.key LIMIT 1) IS NULL""",
    order="r.updated_at",
    one="r.id = %(id)s",
    id="r.id::text",
    then=deletes("sagas"),
)

# With their attempts. One that waits stays, however old, and so does one that a person may replay; one that is just being
# redelivered has not ended any more.
DELIVERIES = Sweep(
    "forget_deliveries",
    table="webhook_deliveries",
    shown_as="r.tenant, r.task, r.id || ':' || r.redelivery AS key",
    columns="r.id",
    due=f"""r.service = %(service)s AND r.ended_at < {_PAST}
      AND (SELECT true FROM idempotency.dead_letters d
           WHERE (d.tenant, d.task, d.key) = (r.tenant, r.task, r.id || ':' || r.redelivery) AND {is_open("d")} LIMIT 1)
          IS NULL""",
    order="r.ended_at",
    one="r.id = %(id)s",
    id="r.id",
    then=deletes("webhook_deliveries"),
)

# What requests were before a person has edited them, of operations that are purged.
FORMER = Sweep(
    "forget_former",
    table="former_fingerprints",
    columns="r.fingerprint AS id",
    due=f"""(SELECT true FROM idempotency.records p
           WHERE p.tenant = r.tenant AND p.task = r.task AND p.key = r.key LIMIT 1) IS NULL
      AND (SELECT true FROM idempotency.outbox o
           WHERE o.tenant = r.tenant AND o.task = r.task AND o.key = r.key AND {unsettled("o")} LIMIT 1) IS NULL
      AND (SELECT true FROM idempotency.dead_letters d
           WHERE d.tenant = r.tenant AND d.task = r.task AND d.key = r.key AND {is_open("d")} LIMIT 1) IS NULL""",
    order="r.tenant, r.task, r.key, r.fingerprint",
    one=f"{THIS_RECORD} AND r.fingerprint = %(id)s",
    id="md5(ARRAY[r.tenant, r.task, r.key, r.fingerprint]::text)",
    then=deletes(
        "former_fingerprints",
        "(gone.tenant, gone.task, gone.key, gone.fingerprint) = (due.tenant, due.task, due.key, due.id)",
    ),
)

# The time of the last alert matters only for its interval; that of the report, for a week.
_ALERTS = f"DELETE FROM idempotency.alerts WHERE sent_at < {_PAST}"
_SET_ASIDE = f"DELETE FROM idempotency.set_aside WHERE until < {_PAST}"


def alerts(connection: Connection, *, retention: float) -> None:
    """Delete the times of alerts sent more than `retention` seconds ago."""
    connection.exec_driver_sql(_ALERTS, {"retention": retention})


def set_aside(connection: Connection) -> None:
    """Delete the notes on rows that were set aside until more than a day ago."""
    connection.exec_driver_sql(_SET_ASIDE, {"retention": REMEMBER})


def events(connection: Connection, service: str, *, retention: float, limit: int, pace: Pace = RESTING) -> bool:
    """Delete events that were kept for sagas of `service` for more than `retention` seconds, and are older than all that run.

    Returns whether more may be due, as the others do.
    """
    return _more(connection, EVENTS, limit, pace, service=service, retention=retention)


def observed(connection: Connection, service: str, *, retention: float, limit: int, pace: Pace = RESTING) -> bool:
    """Delete rows of sagas of `service` without an operation that have not changed for `retention` seconds."""
    return _more(connection, OBSERVED, limit, pace, service=service, retention=retention)


def deliveries(connection: Connection, service: str, *, retention: float, limit: int, pace: Pace = RESTING) -> bool:
    """Delete deliveries of webhooks that ended more than `retention` seconds ago."""
    return _more(connection, DELIVERIES, limit, pace, service=service, retention=retention)


def former_requests(connection: Connection, *, limit: int, pace: Pace = RESTING) -> bool:
    """Delete what requests were before an edit, of operations that are purged. Nothing in a database of earlier code."""
    return edits.is_there(connection, "former_fingerprints") and _more(connection, FORMER, limit, pace)


def _more(connection: Connection, sweep: Sweep, limit: int, pace: Pace, **bounds: Any) -> bool:
    return sweeps.run(connection, sweep, bounds, limit=limit, batch=min(limit, BATCH), pace=pace)[1]
