"""Alarms: what no message says by itself. Work without consumers, work that does not begin, silent processes, unknown effects.

An alarm goes to the log, a metric and the webhook when it has lasted for its patience, again every hour while it lasts,
and once more when it is over. Any number of processes may watch; they share the pace and the state in Postgres. At least
one of them has to live: that everything is gone only shows from outside, by the gauges (`idempotency metrics`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from celery import Celery
from sqlalchemy.exc import DBAPIError

from ..application import runtime_of
from ..attempt.runtime import Runtime
from ..observe import metrics
from ..observe.logs import log
from ..settings import Settings
from ..store import overview
from ..store.overview import Look
from .alerts import ALARM_INTERVALS, ALERT_LOCK, post

# Seconds between two looks of all processes together: well below every patience, and a look at a long backlog costs
# Postgres half a second.
WATCH = 15.0

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

_SENT = """
UPDATE idempotency.alarms SET sent_at = clock_timestamp() WHERE service = %(service)s AND name = ANY(%(names)s::text[])
"""


@dataclass(frozen=True, slots=True)
class Alarm:
    """What is wrong, and what to do. `name` is `kind/subject` and stays the same while it lasts; `patience` in seconds."""

    name: str
    subject: str
    found: str
    advice: str
    patience: float = 0.0


def lasting(found: Look, settings: Settings) -> list[Alarm]:
    """Everything that is wrong in what was seen. Nothing unknown is: a broker that is away has not lost its consumers."""
    alarms = [
        Alarm(
            f"silent/{process.kind}/{process.name}/{process.host}/{process.pid}",
            f"{process.kind} {process.name}",
            f"silent for {process.silent_seconds:.0f} s, pid {process.pid} on {process.host}",
            "look at the process; one that will not come back: idempotency forget",
        )
        for process in found.processes
        if process.silent_seconds > settings.alarm_silence
    ]
    if found.outbox.unpublished and not found.has_relay(settings.alarm_silence):
        waiting = f"none is running; rows due: {found.outbox.unpublished:,}, for {max(found.outbox.oldest, 0.0):.0f} s"
        alarms.append(
            Alarm(
                "no_relay", "relay", waiting, "start `idempotency relay`: it publishes them", settings.alarm_unconsumed
            )
        )
    for name, queue in sorted(found.queues.items()):
        work = f"{_number(queue, 'accepted')} accepted, {_number(queue, 'released')} released, {queue.ready} ready"
        if queue.consumers == 0 and queue.has_work:
            advice = "start a worker for it"
            alarms.append(
                Alarm(
                    f"no_consumers/{name}", f"queue {name}", f"no consumers; {work}", advice, settings.alarm_unconsumed
                )
            )
        if (age := queue.oldest_accepted_seconds) is not None and age > settings.alarm_accepted:
            late = f"the oldest accepted operation has waited for {age:.0f} s; {_number(queue, 'accepted')} accepted"
            alarms.append(Alarm(f"accepted/{name}", f"queue {name}", late, "are its workers and the relay alive?"))
    if found.unknown_effects:
        waiting = f"{found.unknown_effects} ended as effect_unknown and open, for a person to resolve"
        alarms.append(Alarm("unknown_effects", "effects", waiting, "idempotency effects resolve, then replay"))
    return alarms


def run_once(app: Celery) -> int:
    """Look and send what has begun, lasts or is over; returns how many lines. Never fails because of a receiver.

    Does nothing while another process has looked within the last `WATCH` seconds. May hold up its caller for several
    seconds: Postgres, the broker and the receiver each have a few.
    """
    runtime = runtime_of(app)
    settings = runtime.settings
    service = {"service": settings.service}
    with runtime.autocommit() as connection:
        if connection.exec_driver_sql(_TURN, service | {"watch": WATCH}).one_or_none() is None:
            return 0
    try:
        with overview.looking(settings) as connection:
            found = overview.look(connection, app, settings)
    except DBAPIError as error:
        log.warning("alarms_unknown", error=type(error.orig).__name__)
        return 0
    alarms = {alarm.name: alarm for alarm in lasting(found, settings)}
    fields = service | {
        "names": list(alarms),
        "patience": [alarm.patience for alarm in alarms.values()],
        "unknown": [f"no_consumers/{name}" for name, queue in found.queues.items() if queue.consumers is None],
        "repeat": settings.alert_interval * ALARM_INTERVALS,
    }
    # first and for itself: how long an alarm lasts does not depend on its receiver
    with runtime.autocommit() as connection:
        connection.exec_driver_sql(_BEGIN, fields)
    with runtime.engine.begin() as connection:
        if not connection.exec_driver_sql(f"SELECT pg_try_advisory_xact_lock({ALERT_LOCK})").scalar_one():
            return 0
        ended = [row.name for row in connection.exec_driver_sql(_END, fields) if row.sent_at is not None]
        due = [alarms[name] for name in connection.exec_driver_sql(_DUE, fields).scalars()]
        if not due and not ended:
            return 0
        _log(runtime, due, fields)
        if not post(settings, _text(settings.service, due, ended)):
            connection.rollback()  # sent again with the next look
            return 0
        for name in ended:
            log.info("alarm_over", service=settings.service, alarm=name)
        connection.exec_driver_sql(_SENT, service | {"names": [alarm.name for alarm in due]})
    return len(due) + len(ended)


def _log(runtime: Runtime, due: Iterable[Alarm], fields: dict[str, Any]) -> None:
    alarms = {alarm.name: alarm for alarm in due}
    with runtime.autocommit() as connection:
        names = connection.exec_driver_sql(_LOG, fields | {"due": list(alarms)}).scalars().all()
    service = runtime.settings.service
    for name in names:
        metrics.alerts.labels(service, name.partition("/")[0]).inc()
        log.error("alarm", service=service, subject=alarms[name].subject, found=alarms[name].found)


def _text(service: str, due: Iterable[Alarm], ended: Iterable[str]) -> str:
    lines = [f"{service}: {alarm.subject}: {alarm.found}" for alarm in due]
    return "\n".join(["Alarms", *lines, *(f"{service}: over: {name}" for name in ended)])


def _number(queue: overview.QueueState, name: str) -> str:
    return f"{getattr(queue, name):,}{'+' if name in queue.at_least else ''}"
