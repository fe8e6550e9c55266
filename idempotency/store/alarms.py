"""Which alerts and alarms were sent and when, and which process sends next.

Any number of processes may watch; through these tables they share their pace and what has been sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection, Row

from ..reasons import OPEN, OUTBOX_FAILED, OUTBOX_STUCK
from . import archive
from .outbox import STUCK

# Rows per pass and kind.
BATCH = 10_000
# Where alerts go. Each gets everything once: what one process has logged, another can still send.
Channel = Literal["log", "webhook"]
# Of each, one process tells at a time, so that together they keep to one rate: alerts by each channel, and alarms, which would
# lose their turn to alerts otherwise. Any constants not used elsewhere.
LOCKS: dict[Channel | Literal["alarms"], int] = {"log": 0x1DE49080, "webhook": 0x1DE49081, "alarms": 0x1DE49082}

# ---------------------------------------------------------------- alerts

# What is new to a channel. The log comes first; the webhook gets what has been logged and is still open, from a process that can
# post.
_NEW = {
    "log": ("alerted_at IS NULL AND alert_logged_at IS NULL", ""),
    "webhook": ("alerted_at IS NULL AND alert_logged_at IS NOT NULL", "AND status = 'open'"),
}
_PREFIX = {"log": "log/", "webhook": ""}
_MARKED = {"log": "alert_logged_at", "webhook": "alerted_at"}
# No alert of this kind went this way within the interval.
_NOT_LATELY = """
NOT EXISTS (SELECT FROM idempotency.alerts a WHERE a.kind = %(prefix)s || {kind}
            AND a.sent_at > clock_timestamp() - make_interval(secs => %(interval)s))
"""

# One kind after the other, so that many letters of one, which others may have had made, hide none of another. Each step is a
# probe of an index; the columns that are constant are in ORDER BY because for the planner, IS NULL does not say so.
_LETTERS = f"""
WITH RECURSIVE kinds (reason) AS (
    (SELECT reason FROM idempotency.dead_letters WHERE {{new}} ORDER BY consumer_service, reason LIMIT 1)
    UNION ALL
    SELECT later.reason FROM kinds CROSS JOIN LATERAL (
        SELECT reason FROM idempotency.dead_letters d WHERE {{new}} AND d.reason > kinds.reason
        ORDER BY consumer_service, reason LIMIT 1
    ) later
), due AS MATERIALIZED (
    SELECT reason FROM kinds WHERE {_NOT_LATELY.format(kind="%(service)s || '/' || reason")}
)
SELECT letters.id, due.reason FROM due CROSS JOIN LATERAL (
    SELECT id FROM idempotency.dead_letters d WHERE {{new}} AND d.reason = due.reason
    ORDER BY consumer_service, reason, id LIMIT %(batch)s FOR UPDATE SKIP LOCKED
) letters
"""
# Whose letters a service is told of: its own, and those whose owner is not known.
_OWNERS = ("consumer_service = %(service)s", "consumer_service IS NULL")

_OUTBOX = f"""
SELECT id FROM idempotency.outbox o
WHERE status = 'failed' AND {{new}} AND (service = %(service)s) IS NOT FALSE
  -- its dead letter has an alert already
  AND NOT EXISTS (SELECT FROM idempotency.dead_letters d WHERE d.outbox_id = o.id)
  AND {_NOT_LATELY.format(kind="%(service)s || '/" + OUTBOX_FAILED + "'")}
ORDER BY id LIMIT %(batch)s FOR UPDATE SKIP LOCKED
"""

# These are still retried, so they are not marked: one alert per interval while it lasts.
_STUCK = f"""
SELECT count(*) AS rows, coalesce(pg_catalog.array_agg(DISTINCT queue ORDER BY queue), '{{}}') AS queues FROM idempotency.outbox
WHERE status = 'pending' AND attempts >= {STUCK} AND (service = %(service)s) IS NOT FALSE
  AND {_NOT_LATELY.format(kind="%(service)s || '/" + OUTBOX_STUCK + "'")}
"""

_CROWDED = f"""
SELECT service, letters FROM (
    SELECT coalesce(consumer_service, %(service)s) AS service, count(*) AS letters
    FROM idempotency.dead_letters WHERE status = 'open' {{listed}} AND (consumer_service = %(service)s) IS NOT FALSE
    GROUP BY 1
) open
WHERE letters > %(most)s AND {_NOT_LATELY.format(kind="service || '/open'")}
"""

_SENT = """
INSERT INTO idempotency.alerts (kind, sent_at) SELECT %(prefix)s || pg_catalog.unnest(%(kinds)s::text[]), clock_timestamp()
ON CONFLICT (kind) DO UPDATE SET sent_at = excluded.sent_at
"""

_MARK = "UPDATE idempotency.{table} SET {column} = clock_timestamp() WHERE id = ANY(%(ids)s)"


def try_lock(connection: Connection, channel: Channel | Literal["alarms"]) -> bool:
    """Become the only process that tells alerts by this channel, or alarms, until the transaction ends. False: another one is."""
    return bool(connection.exec_driver_sql(f"SELECT pg_try_advisory_xact_lock({LOCKS[channel]})").scalar_one())


# Of letters whose operation is known: what others have sent names no amount that is believed.
_PAYLOADS = """
SELECT task, payload FROM idempotency.dead_letters WHERE id = ANY(%(ids)s) AND task IS NOT NULL AND generation IS NOT NULL
"""


def payloads(connection: Connection, letters: Sequence[int]) -> Sequence[Row[Any]]:
    """The tasks and messages of these letters, as far as their operation is known."""
    return connection.exec_driver_sql(_PAYLOADS, {"ids": list(letters)}).all()


@dataclass(frozen=True, slots=True)
class News:
    """What there is to tell: letters and failed rows by id, and what lasts by service."""

    # by reason
    ids: dict[str, list[int]]
    rows: Sequence[int]
    # by service and reason: how many are new
    counts: Counter[tuple[str, str]]
    # by service: how many letters are open, if they are too many
    crowded: dict[str, int]
    # rows that the broker keeps refusing, and their queues
    stuck: int
    stuck_in: Sequence[str] = ()

    @property
    def letters(self) -> list[int]:
        """All letters."""
        return [id for ids in self.ids.values() for id in ids]

    def __bool__(self) -> bool:
        return bool(self.counts or self.crowded or self.stuck)


def news(connection: Connection, service: str, channel: Channel, *, interval: float, most: int, repeat: float) -> News:
    """What this channel has not been told of `service`; nothing of a kind that it was told of within `interval` seconds.

    `most` open letters are not too many; `repeat`: seconds until that is told again.
    """
    new, is_open = _NEW[channel]
    listed = archive.condition(connection, "outside")
    fields = {"service": service, "interval": interval, "batch": BATCH, "prefix": _PREFIX[channel], "most": most}
    letters: list[Row[Any]] = []
    for owner in _OWNERS:
        letters += connection.exec_driver_sql(_LETTERS.format(new=f"{new} {is_open} {listed} AND {owner}"), fields)
    rows = connection.exec_driver_sql(_OUTBOX.format(new=new), fields).scalars().all()
    crowded = connection.exec_driver_sql(_CROWDED.format(listed=listed), fields | {"interval": repeat}).all()
    ids: dict[str, list[int]] = {}
    for row in letters:
        ids.setdefault(row.reason, []).append(row.id)
    counts = Counter({(service, reason): len(found) for reason, found in ids.items()})
    if rows:
        counts[service, OUTBOX_FAILED] = len(rows)
    stuck = connection.exec_driver_sql(_STUCK, fields).one()
    return News(ids, rows, counts, {row.service: row.letters for row in crowded}, stuck.rows, stuck.queues)


def note_told(connection: Connection, service: str, channel: Channel, told: News) -> None:
    """Record that this channel has been told."""
    kinds = [f"{owner}/{reason}" for owner, reason in told.counts] + [f"{owner}/{OPEN}" for owner in told.crowded]
    if told.stuck:
        kinds.append(f"{service}/{OUTBOX_STUCK}")
    connection.exec_driver_sql(_SENT, {"kinds": kinds, "prefix": _PREFIX[channel]})
    for table, ids in (("dead_letters", told.letters), ("outbox", told.rows)):
        connection.exec_driver_sql(_MARK.format(table=table, column=_MARKED[channel]), {"ids": list(ids)})


# ---------------------------------------------------------------- alarms

_TURN = """
INSERT INTO idempotency.alerts AS a (kind, sent_at) VALUES (%(kind)s, clock_timestamp())
ON CONFLICT (kind) DO UPDATE SET sent_at = excluded.sent_at
    WHERE a.sent_at < clock_timestamp() - make_interval(secs => %(watch)s)
RETURNING 1
"""

_BEGIN = """
INSERT INTO idempotency.alarms (service, name, since)
SELECT %(service)s, pg_catalog.unnest(%(names)s::text[]), clock_timestamp() ON CONFLICT DO NOTHING
"""

# Where it was sent that an alarm has begun, it is to be sent that it is over: by a process that can. If there is none any
# more, the alarm is forgotten after a day.
_END = """
DELETE FROM idempotency.alarms
WHERE service = %(service)s AND name <> ALL(%(names)s::text[]) AND name <> ALL(%(unknown)s::text[])
  AND (%(sends)s OR sent_at IS NULL OR sent_at < clock_timestamp() - interval '1 day')
RETURNING name, sent_at, logged_at
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

_ACTIVE = "SELECT name, since FROM idempotency.alarms WHERE service = %(service)s ORDER BY since, name LIMIT 100"

_SENT_ALARMS = """
UPDATE idempotency.alarms SET sent_at = clock_timestamp() WHERE service = %(service)s AND name = ANY(%(names)s::text[])
"""


def try_begin_check(connection: Connection, service: str, *, watch: float, sends: bool) -> bool:
    """Become the process that checks now. False: one has within the last `watch` seconds.

    Those that can send take turns among themselves: they must not have to wait for one that cannot.
    """
    kind = f"{service}/alarms" if sends else f"log/{service}/alarms"
    return connection.exec_driver_sql(_TURN, {"kind": kind, "watch": watch}).one_or_none() is not None


def begin(connection: Connection, service: str, names: Iterable[str]) -> None:
    """Record that these alarms begin now, unless they have begun already."""
    connection.exec_driver_sql(_BEGIN, {"service": service, "names": list(names)})


def end(
    connection: Connection, service: str, names: Iterable[str], *, unknown: Sequence[str], sends: bool
) -> Sequence[Row[Any]]:
    """Delete the alarms that are neither in `names` nor in `unknown`. Returns their `name`, `sent_at` and `logged_at`.

    A process that cannot send (`sends`) leaves those that were sent to one that can.
    """
    fields = {"service": service, "names": list(names), "unknown": unknown, "sends": sends}
    return connection.exec_driver_sql(_END, fields).all()


def due(connection: Connection, service: str, patience: Mapping[str, float], *, repeat: float) -> Sequence[str]:
    """The alarms to send now, for the first time or `repeat` seconds after the last. `patience`: seconds until the first."""
    fields = {"service": service, "names": list(patience), "patience": list(patience.values()), "repeat": repeat}
    return connection.exec_driver_sql(_DUE, fields).scalars().all()


def to_log(connection: Connection, service: str, names: Sequence[str], *, repeat: float) -> Sequence[str]:
    """Mark and return the alarms to log now, for the first time or `repeat` seconds after the last."""
    return connection.exec_driver_sql(_LOG, {"service": service, "due": names, "repeat": repeat}).scalars().all()


def active(connection: Connection, service: str) -> Sequence[Row[Any]]:
    """The alarms of `service` that have begun and are not over: `name` and `since`, the oldest first."""
    return connection.exec_driver_sql(_ACTIVE, {"service": service}).all()


def note_alarms_sent(connection: Connection, service: str, names: Sequence[str]) -> None:
    """Record that these alarms are sent now."""
    connection.exec_driver_sql(_SENT_ALARMS, {"service": service, "names": names})


# ---------------------------------------------------------------- the weekly report

# With several beats, the one that writes the row sends the mail. One day less than a week, in case the last was late.
_REPORT_TURN = """
INSERT INTO idempotency.alerts AS a (kind, sent_at) VALUES (%(service)s || '/report', clock_timestamp())
ON CONFLICT (kind) DO UPDATE SET sent_at = excluded.sent_at
WHERE a.sent_at < clock_timestamp() - pg_catalog.make_interval(days => %(days)s - 1)
RETURNING 1
"""


def try_begin_report(connection: Connection, service: str, *, days: int) -> bool:
    """Become the process that mails the report. False: it was mailed less than `days` - 1 days ago."""
    return connection.exec_driver_sql(_REPORT_TURN, {"service": service, "days": days}).one_or_none() is not None
