"""What has been told and when: alerts about rows, alarms about what lasts, and the turn of those who tell it.

Any number of processes watch; they share their pace and what has been sent through these tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row

from .outbox import STUCK

# One process alerts at a time, so that all keep to one rate together. Any constant not used elsewhere.
ALERT_LOCK = 0x1DE4907F
# Rows told in one pass.
BATCH = 10_000

# ---------------------------------------------------------------- alerts

_LETTERS = """
SELECT id, service, reason FROM (
    SELECT id, coalesce(consumer_service, %(service)s) AS service, reason
    FROM idempotency.dead_letters WHERE alerted_at IS NULL
    ORDER BY id LIMIT %(batch)s FOR UPDATE SKIP LOCKED
) new
WHERE NOT EXISTS (SELECT FROM idempotency.alerts a WHERE a.kind = service || '/' || reason
                  AND a.sent_at > clock_timestamp() - make_interval(secs => %(interval)s))
"""

_OUTBOX = """
SELECT id FROM idempotency.outbox o WHERE status = 'failed' AND alerted_at IS NULL
  -- its dead letter tells the same
  AND NOT EXISTS (SELECT FROM idempotency.dead_letters d WHERE d.outbox_id = o.id)
  AND NOT EXISTS (SELECT FROM idempotency.alerts a WHERE a.kind = %(service)s || '/outbox_failed'
                  AND a.sent_at > clock_timestamp() - make_interval(secs => %(interval)s))
ORDER BY id LIMIT %(batch)s FOR UPDATE SKIP LOCKED
"""

# They go on being tried, so they are not marked: told once in each interval, as long as it lasts.
_STUCK = f"""
SELECT count(*) FROM idempotency.outbox
WHERE status = 'pending' AND attempts >= {STUCK}
  AND NOT EXISTS (SELECT FROM idempotency.alerts a WHERE a.kind = %(service)s || '/outbox_stuck'
                  AND a.sent_at > clock_timestamp() - make_interval(secs => %(interval)s))
"""

_CROWDED = """
SELECT service, letters FROM (
    SELECT coalesce(consumer_service, %(service)s) AS service, count(*) AS letters
    FROM idempotency.dead_letters WHERE status = 'open' GROUP BY 1
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


def take_turn(connection: Connection) -> bool:
    """Be the process that tells until the transaction ends. False: another one is."""
    return bool(connection.exec_driver_sql(f"SELECT pg_try_advisory_xact_lock({ALERT_LOCK})").scalar_one())


def untold_letters(connection: Connection, service: str, *, interval: float) -> Sequence[Row[Any]]:
    """Lock the dead letters that have not been told, but for those whose kind was told within `interval` seconds."""
    return connection.exec_driver_sql(_LETTERS, _fields(service, interval)).all()


def untold_rows(connection: Connection, service: str, *, interval: float) -> Sequence[int]:
    """Lock the rows that failed, have no dead letter and have not been told; none within `interval` of the last."""
    return connection.exec_driver_sql(_OUTBOX, _fields(service, interval)).scalars().all()


def stuck_rows(connection: Connection, service: str, *, interval: float) -> int:
    """How many rows the broker goes on refusing; 0 if that was told within `interval` seconds."""
    stuck: int = connection.exec_driver_sql(_STUCK, _fields(service, interval)).scalar_one()
    return stuck


def crowded(connection: Connection, service: str, *, most: int, interval: float) -> dict[str, int]:
    """The services with more than `most` open letters, but for those told within `interval` seconds."""
    fields = {"service": service, "most": most, "interval": interval}
    return {row.service: row.letters for row in connection.exec_driver_sql(_CROWDED, fields)}


def note_sent(connection: Connection, kinds: Sequence[str]) -> None:
    """Note that alerts of these kinds are sent now."""
    connection.exec_driver_sql(_SENT, {"kinds": kinds})


def mark_told(connection: Connection, letters: Sequence[int], rows: Sequence[int]) -> None:
    """Mark letters and rows as told."""
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

# The log has its own pace: a webhook that is down must not write a line with every look.
_LOG = """
UPDATE idempotency.alarms SET logged_at = clock_timestamp()
WHERE service = %(service)s AND name = ANY(%(due)s::text[])
  AND (logged_at IS NULL OR logged_at <= clock_timestamp() - make_interval(secs => %(repeat)s))
RETURNING name
"""

_SENT_ALARMS = """
UPDATE idempotency.alarms SET sent_at = clock_timestamp() WHERE service = %(service)s AND name = ANY(%(names)s::text[])
"""


def take_look(connection: Connection, service: str, *, watch: float) -> bool:
    """Be the process that looks now. False: another one has within the last `watch` seconds."""
    fields = {"service": service, "watch": watch}
    return connection.exec_driver_sql(_TURN, fields).one_or_none() is not None


def begin(connection: Connection, service: str, names: Iterable[str]) -> None:
    """Note alarms as begun now, but for those that last already."""
    connection.exec_driver_sql(_BEGIN, {"service": service, "names": list(names)})


def end(connection: Connection, service: str, names: Iterable[str], *, unknown: Sequence[str]) -> list[str]:
    """Forget the alarms that are neither among `names` nor unknown. Returns those that had been sent."""
    rows = connection.exec_driver_sql(_END, {"service": service, "names": list(names), "unknown": unknown})
    return [row.name for row in rows if row.sent_at is not None]


def due(connection: Connection, service: str, patience: Mapping[str, float], *, repeat: float) -> Sequence[str]:
    """Of these alarms, each with its patience in seconds, those to send now: the first time, or `repeat` seconds later."""
    fields = {"service": service, "names": list(patience), "patience": list(patience.values()), "repeat": repeat}
    return connection.exec_driver_sql(_DUE, fields).scalars().all()


def to_log(connection: Connection, service: str, names: Sequence[str], *, repeat: float) -> Sequence[str]:
    """Of these alarms, those to log now, which are marked as logged: the first time, or `repeat` seconds later."""
    return connection.exec_driver_sql(_LOG, {"service": service, "due": names, "repeat": repeat}).scalars().all()


def note_alarms_sent(connection: Connection, service: str, names: Sequence[str]) -> None:
    """Note that these alarms are sent now."""
    connection.exec_driver_sql(_SENT_ALARMS, {"service": service, "names": names})


# ---------------------------------------------------------------- the weekly report

# Any number of beats at once: the one that writes the row sends the mail. A day's grace for a beat that is late.
_REPORT_TURN = """
INSERT INTO idempotency.alerts AS a (kind, sent_at) VALUES ('report', clock_timestamp())
ON CONFLICT (kind) DO UPDATE SET sent_at = excluded.sent_at
WHERE a.sent_at < clock_timestamp() - make_interval(days => %(days)s - 1)
RETURNING 1
"""


def take_report(connection: Connection, *, days: int) -> bool:
    """Be the process that mails the report. False: it has been mailed within so many days."""
    return connection.exec_driver_sql(_REPORT_TURN, {"days": days}).one_or_none() is not None
