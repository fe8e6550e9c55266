"""What is past its time: deleted in batches, each row only if nothing needs it any more. The audit stays."""

from __future__ import annotations

from sqlalchemy import Connection

from . import sweeps
from .sweeps import RECORD_ID, THIS_RECORD, Sweep

# A record that is past its time and must stay is looked at again after an hour: what stays costs no pass anything.
KEEP = 3600.0
# How long a row that was set aside and is due no more is remembered, for people to see what happened.
REMEMBER = 86400.0

# The outbox rows go with their record: a row that outlived it would be sent again and run a second time. A row that
# is not published, or not settled and another request's, keeps the record, and so does an open dead letter. A row that
# was published may still be delivered for as long as the redelivery horizon says, whatever it is settled by: the record
# is what keeps that delivery from running.
OPERATIONS = Sweep(
    "purge",
    table="records",
    columns="""greatest(
        (SELECT clock_timestamp() + make_interval(secs => %(keep)s) FROM idempotency.outbox o
         WHERE o.tenant = r.tenant AND o.task = r.task AND o.key = r.key
           AND (o.status = 'pending' OR o.settled_at IS NULL AND (o.status <> 'published' OR o.fingerprint <> r.fingerprint))
         LIMIT 1),
        (SELECT clock_timestamp() + make_interval(secs => %(keep)s) FROM idempotency.dead_letters d
         WHERE d.tenant = r.tenant AND d.task = r.task AND d.key = r.key AND d.status = 'open' LIMIT 1),
        (SELECT max(o.published_at) + make_interval(secs => %(horizon)s) FROM idempotency.outbox o
         WHERE o.tenant = r.tenant AND o.task = r.task AND o.key = r.key)) AS stays_until""",
    due="r.status IN ('completed', 'failed') AND greatest(r.expires_at, r.kept_until) < (SELECT clock_timestamp())",
    order="greatest(r.expires_at, r.kept_until)",
    one=THIS_RECORD,
    id=RECORD_ID,
    then="""
, judged AS MATERIALIZED (
    SELECT tenant, task, key, stays_until, coalesce(stays_until > clock_timestamp(), false) AS stays FROM due
), kept AS (
    UPDATE idempotency.records r SET kept_until = j.stays_until
    FROM judged j WHERE j.stays AND (r.tenant, r.task, r.key) = (j.tenant, j.task, j.key)
), rows AS (
    DELETE FROM idempotency.outbox o USING judged j
    WHERE NOT j.stays AND (o.tenant, o.task, o.key) = (j.tenant, j.task, j.key)
), purged AS (
    DELETE FROM idempotency.records r USING judged j
    WHERE NOT j.stays AND (r.tenant, r.task, r.key) = (j.tenant, j.task, j.key)
    RETURNING 1
)
SELECT (SELECT count(*) FROM purged)""",
)

# Settled rows whose operation has ended or has no record: duplicates of what is asked for again and again, events for
# consumers outside, what a person discarded, what could never be published. One that was published late, and may still
# be delivered, keeps its record. One that stays is looked at again after another retention.
ROWS = Sweep(
    "purge_rows",
    table="outbox",
    columns="""r.id, coalesce(
        (SELECT true FROM idempotency.records p
         WHERE p.tenant = r.tenant AND p.task = r.task AND p.key = r.key
           AND (p.status NOT IN ('completed', 'failed')
                OR r.published_at > clock_timestamp() - make_interval(secs => %(horizon)s)) LIMIT 1),
        (SELECT true FROM idempotency.dead_letters d WHERE d.outbox_id = r.id AND d.status = 'open' LIMIT 1),
        (SELECT true FROM idempotency.dead_letters d
         WHERE d.tenant = r.tenant AND d.task = r.task AND d.key = r.key AND d.status = 'open' LIMIT 1),
        false) AS stays""",
    due="""r.settled_at IS NOT NULL AND r.status = %(status)s AND r.status <> 'pending'
      AND greatest(r.settled_at, r.kept_at) < (SELECT clock_timestamp() - make_interval(secs => %(retention)s))""",
    order="greatest(r.settled_at, r.kept_at)",
    one="r.id = %(id)s",
    id="r.id::text",
    then="""
, kept AS (
    UPDATE idempotency.outbox o SET kept_at = clock_timestamp() FROM due WHERE due.stays AND o.id = due.id
), purged AS (
    DELETE FROM idempotency.outbox o USING due WHERE NOT due.stays AND o.id = due.id RETURNING 1
)
SELECT (SELECT count(*) FROM purged)""",
)

# Only what a person has closed: an open letter stays as long as it takes. The request to discard it goes with it.
LETTERS = Sweep(
    "purge_letters",
    table="dead_letters",
    columns="r.id",
    due="r.status <> 'open' AND r.closed_at < (SELECT clock_timestamp() - make_interval(secs => %(retention)s))",
    order="r.closed_at",
    one="r.id = %(id)s",
    id="r.id::text",
    then="""
, purged AS (DELETE FROM idempotency.dead_letters d USING due WHERE d.id = due.id RETURNING 1)
SELECT (SELECT count(*) FROM purged)""",
)

# When an alert was last sent matters for its interval only; the report's turn, for a week.
_FORGET_ALERTS = (
    "DELETE FROM idempotency.alerts WHERE sent_at < (SELECT clock_timestamp() - make_interval(secs => %(retention)s))"
)
_FORGET_SET_ASIDE = (
    "DELETE FROM idempotency.set_aside WHERE until < (SELECT clock_timestamp() - make_interval(secs => %(remember)s))"
)


def letters(connection: Connection, *, retention: float, limit: int) -> tuple[int, bool]:
    """Delete letters closed more than `retention` seconds ago. Returns how many, and whether more may be due."""
    return sweeps.run(connection, LETTERS, {"retention": retention}, limit=limit)


def operations(connection: Connection, *, horizon: float, limit: int) -> tuple[int, bool]:
    """Delete ended operations past their retention, with their rows, `horizon` seconds after the last was published."""
    return sweeps.run(connection, OPERATIONS, {"keep": KEEP, "horizon": horizon}, limit=limit)


def rows(connection: Connection, status: str, *, retention: float, horizon: float, limit: int) -> tuple[int, bool]:
    """Delete rows of that status, settled more than `retention` seconds ago, whose operation has ended or has no record."""
    bounds = {"status": status, "retention": retention, "horizon": horizon}
    return sweeps.run(connection, ROWS, bounds, limit=limit)


def forget_alerts(connection: Connection, *, retention: float) -> None:
    """Forget when an alert was last sent, after so many seconds."""
    connection.exec_driver_sql(_FORGET_ALERTS, {"retention": retention})


def forget_set_aside(connection: Connection) -> None:
    """Forget the rows that were set aside and have not been due for a day."""
    connection.exec_driver_sql(_FORGET_SET_ASIDE, {"remember": REMEMBER})
