"""Which alerts and alarms were sent and when, and which process sends next.

Any number of processes may watch; through these tables they share their pace and what has been sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row

from .outbox import STUCK

# One process sends at a time, so that together they keep to one rate. Any constant not used elsewhere.
ALERT_LOCK = 0x1DE4907F
# Rows per pass.
BATCH = 10_000

# ---------------------------------------------------------------- alerts

_LETTERS = """
SELECT id, service, reason FROM (
    SELECT id, coalesce(consumer_service, %(service)s) AS service, reason
    FROM idempotency.dead_letters WHERE alerted_at IS NULL AND (consumer_service = %(service)s) IS NOT FALSE
    ORDER BY id LIMIT %(batch)s FOR UPDATE SKIP LOCKED
) new
WHERE NOT EXISTS (SELECT FROM idempotency.alerts a WHERE a.kind = service || '/' || reason
                  AND a.sent_at > clock_timestamp() - make_interval(secs => %(interval)s))
"""

_OUTBOX = """
SELECT id FROM idempotency.outbox o
WHERE status = 'failed' AND alerted_at IS NULL AND (service = %(service)s) IS NOT FALSE
  -- its dead letter has an alert already
  AND NOT EXISTS (SELECT FROM idempotency.dead_letters d WHERE d.outbox_id = o.id)
  AND NOT EXISTS (SELECT FROM idempotency.alerts a WHERE a.kind = %(service)s || '/outbox_failed'
                  AND a.sent_at > clock_timestamp() - make_interval(secs => %(interval)s))
ORDER BY id LIMIT %(batch)s FOR UPDATE SKIP LOCKED
"""

# These are still retried, so they are not marked: one alert per interval while it lasts.
_STUCK = f"""
SELECT count(*) FROM idempotency.outbox
WHERE status = 'pending' AND attempts >= {STUCK} AND (service = %(service)s) IS NOT FALSE
  AND NOT EXISTS (SELECT FROM idempotency.alerts a WHERE a.kind = %(service)s || '/outbox_stuck'
                  AND a.sent_at > clock_timestamp() - make_interval(secs => %(interval)s))
"""

_CROWDED = """
SELECT service, letters FROM (
    SELECT coalesce(consumer_service, %(service)s) AS service, count(*) AS letters
    FROM idempotency.dead_letters WHERE status = 'open' AND (consumer_service = %(service)s) IS NOT FALSE
    GROUP BY 1
) open
WHERE letters > %(most)s
  AND NOT EXISTS (SELECT FROM idempotency.alerts a WHERE a.kind = service || '/open'
                  AND a.sent_at > clock_timestamp() - make_interval(secs => %(interval)s))
"""

_SENT = """
INSERT INTO idempotency.alerts (kind, sent_at) SELECT unnest(%(kinds)s::text[]), clock_timestamp()
ON CONFLICT (kind) DO UPDATE SET sent_at = excluded.sent_at
"""

_MARK = "UPDATE idempotency.{table} SET alerted_at = clock_timestamp() WHERE id = ANY(%(ids)s)"


def try_alert_lock(connection: Connection) -> bool:
    """Become the only process that sends, until the transaction ends. False: another one is."""
    return bool(connection.exec_driver_sql(f"SELECT pg_try_advisory_xact_lock({ALERT_LOCK})").scalar_one())


def unalerted_letters(connection: Connection, service: str, *, interval: float) -> Sequence[Row[Any]]:
    """Lock dead letters of `service` without an alert, except for kinds that had one within `interval` seconds."""
    return connection.exec_driver_sql(_LETTERS, _fields(service, interval)).all()


def unalerted_rows(connection: Connection, service: str, *, interval: float) -> Sequence[int]:
    """Lock failed rows of `service` without a dead letter or an alert; none within `interval` seconds of the last alert."""
    return connection.exec_driver_sql(_OUTBOX, _fields(service, interval)).scalars().all()


def stuck_rows(connection: Connection, service: str, *, interval: float) -> int:
    """How many rows of `service` the broker keeps refusing; 0 within `interval` seconds of the last alert."""
    stuck: int = connection.exec_driver_sql(_STUCK, _fields(service, interval)).scalar_one()
    return stuck


def crowded(connection: Connection, service: str, *, most: int, interval: float) -> dict[str, int]:
    """`service` and its open letters, if there are more than `most`, and no alert within `interval` seconds."""
    fields = {"service": service, "most": most, "interval": interval}
    return {row.service: row.letters for row in connection.exec_driver_sql(_CROWDED, fields)}


def note_sent(connection: Connection, kinds: Sequence[str]) -> None:
    """Record that alerts of these kinds are sent now."""
    connection.exec_driver_sql(_SENT, {"kinds": kinds})


def mark_alerted(connection: Connection, letters: Sequence[int], rows: Sequence[int]) -> None:
    """Record that these letters and rows had an alert."""
    connection.exec_driver_sql(_MARK.format(table="dead_letters"), {"ids": letters})
    connection.exec_driver_sql(_MARK.format(table="outbox"), {"ids": rows})


def _fields(service: str, interval: float) -> dict[str, Any]:
    return {"service": service, "interval": interval, "batch": BATCH}


# ---------------------------------------------------------------- alarms

_TURN = """
INSERT INTO idempotency.alerts AS a (kind, sent_at) VALUES (%(service)s || '/alarms', clock_timestamp())
ON CONFLICT (kind) DO UPDATE SET sent_at = excluded.sent_at
    WHERE a.sent_at < clock_timestamp() - make_interval(secs => %(watch)s)
RETURNING 1
"""

_BEGIN = """
INSERT INTO idempotency.alarms (service, name, since)
SELECT %(service)s, unnest(%(names)s::text[]), clock_timestamp() ON CONFLICT DO NOTHING
"""

_END = """
DELETE FROM idempotency.alarms
WHERE service = %(service)s AND name <> ALL(%(names)s::text[]) AND name <> ALL(%(unknown)s::text[])
RETURNING name, sent_at
"""

_DUE = """
SELECT name FROM idempotency.alarms
JOIN unnest(%(names)s::text[], %(patience)s::float8[]) AS lasting(name, patience) USING (name)
WHERE service = %(service)s AND since <= clock_timestamp() - make_interval(secs => patience)
  AND (sent_at IS NULL OR sent_at <= clock_timestamp() - make_interval(secs => %(repeat)s))
"""

# Logged at its own pace: if the webhook is down, not every check should log a line.
_LOG = """
UPDATE idempotency.alarms SET logged_at = clock_timestamp()
WHERE service = %(service)s AND name = ANY(%(due)s::text[])
  AND (logged_at IS NULL OR logged_at <= clock_timestamp() - make_interval(secs => %(repeat)s))
RETURNING name
"""

_SENT_ALARMS = """
UPDATE idempotency.alarms SET sent_at = clock_timestamp() WHERE service = %(service)s AND name = ANY(%(names)s::text[])
"""


def try_begin_check(connection: Connection, service: str, *, watch: float) -> bool:
    """Become the process that checks now. False: one has within the last `watch` seconds."""
    fields = {"service": service, "watch": watch}
    return connection.exec_driver_sql(_TURN, fields).one_or_none() is not None


def begin(connection: Connection, service: str, names: Iterable[str]) -> None:
    """Record that these alarms begin now, unless they have begun already."""
    connection.exec_driver_sql(_BEGIN, {"service": service, "names": list(names)})


def end(connection: Connection, service: str, names: Iterable[str], *, unknown: Sequence[str]) -> list[str]:
    """Delete the alarms that are neither in `names` nor in `unknown`. Returns those that had been sent."""
    rows = connection.exec_driver_sql(_END, {"service": service, "names": list(names), "unknown": unknown})
    return [row.name for row in rows if row.sent_at is not None]


def due(connection: Connection, service: str, patience: Mapping[str, float], *, repeat: float) -> Sequence[str]:
    """The alarms to send now, for the first time or `repeat` seconds after the last. `patience`: seconds until the first."""
    fields = {"service": service, "names": list(patience), "patience": list(patience.values()), "repeat": repeat}
    return connection.exec_driver_sql(_DUE, fields).scalars().all()


def to_log(connection: Connection, service: str, names: Sequence[str], *, repeat: float) -> Sequence[str]:
    """Mark and return the alarms to log now, for the first time or `repeat` seconds after the last."""
    return connection.exec_driver_sql(_LOG, {"service": service, "due": names, "repeat": repeat}).scalars().all()


def note_alarms_sent(connection: Connection, service: str, names: Sequence[str]) -> None:
    """Record that these alarms are sent now."""
    connection.exec_driver_sql(_SENT_ALARMS, {"service": service, "names": names})


# ---------------------------------------------------------------- the weekly report

# With several beats, the one that writes the row sends the mail. One day less than a week, in case the last was late.
_REPORT_TURN = """
INSERT INTO idempotency.alerts AS a (kind, sent_at) VALUES (%(service)s || '/report', clock_timestamp())
ON CONFLICT (kind) DO UPDATE SET sent_at = excluded.sent_at
WHERE a.sent_at < clock_timestamp() - make_interval(days => %(days)s - 1)
RETURNING 1
"""


def try_begin_report(connection: Connection, service: str, *, days: int) -> bool:
    """Become the process that mails the report. False: it was mailed less than `days` - 1 days ago."""
    return connection.exec_driver_sql(_REPORT_TURN, {"service": service, "days": days}).one_or_none() is not None
