"""Alarms about lasting conditions: work without consumers, late work, silent processes, unknown effects, no relay.

An alarm goes to the log, a metric and the webhook once it has lasted for its `patience`, again every hour while it lasts,
and once more when it is over. Any number of processes may watch; they share their pace and state in Postgres. Those that
cannot reach the webhook log, and leave the sending to those that can. At least one has to be running: if all are down, only the gauges of `idempotency metrics` show it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from celery import Celery
from sqlalchemy.exc import DBAPIError

from ..application import runtime_of
from ..attempt.runtime import Runtime
from ..framework import framework
from ..observe import metrics
from ..observe.logs import log
from ..settings import Settings
from ..store import alarms as stored
from ..store.overview import QueueState, Snapshot, monitoring_connection
from ..store.statements import is_news
from ..streams.declaring import TASK_PREFIX
from ..text import one_line
from . import overview
from .alerts import ALARM_INTERVALS, can_send, post

# Seconds between two checks, by whichever process. Well below the settings for alarms; a check costs Postgres up to half
# a second with a long backlog.
WATCH = 15.0


@dataclass(frozen=True, slots=True)
class Alarm:
    """What is wrong and what to do. `name` identifies the alarm while it lasts; `patience` is the delay until it is sent."""

    name: str
    subject: str
    found: str
    advice: str
    patience: float = 0.0


def lasting(found: Snapshot, settings: Settings) -> list[Alarm]:
    """Everything that is wrong in a snapshot. Unknown is not wrong: an unavailable broker has not lost its consumers."""
    alarms = [
        Alarm(
            f"silent/{process.kind}/{process.name}/{process.host}/{process.pid}",
            f"{process.kind} {process.name}",
            f"silent for {process.silent_seconds:.0f} s, pid {process.pid} on {process.host}",
            f"check the process; if it is gone for good, run `{framework().command} forget`",
        )
        for process in found.processes
        if process.silent_seconds > settings.alarm_silence
    ]
    if found.outbox.unpublished and not found.has_relay(settings.alarm_silence):
        waiting = f"none is running; rows due: {found.outbox.unpublished:,}, for {max(found.outbox.oldest, 0.0):.0f} s"
        alarms.append(
            Alarm("no_relay", "relay", waiting, f"start `{framework().command} relay`", settings.alarm_unconsumed)
        )
    for row in found.sharers:
        if row.due and row.service is None:
            waiting = f"{row.due:,}, of tasks that this application does not know"
            advice = f"run a relay of the application that has them, or `{framework().command} cancel --without-task`"
            alarms.append(Alarm("unnamed_rows", "rows without a service", waiting, advice, settings.alarm_unconsumed))
        elif (row.due or row.lease_over) and not row.has_relay:
            waiting = (
                f"no relay of it is running; rows due: {row.due:,}, begun and without a holder: {row.lease_over:,}"
            )
            advice = f"start its relay; if it has another name now, `{framework().command} rename-service`"
            name = f"no_relay/{row.service}"
            alarms.append(Alarm(name, f"application {row.service}", waiting, advice, settings.alarm_unconsumed))
    alive = [each for each in found.processes if each.silent_seconds <= settings.alarm_silence]
    handled = {queue for each in alive if each.kind == "stream" for queue in each.queues}
    for name, queue in sorted(found.queues.items()):
        work = f"{_number(queue, 'accepted')} accepted, {_number(queue, 'released')} released, {queue.ready} ready"
        if queue.consumers == 0 and queue.has_work and name not in handled:
            advice = "start a worker for it"
            if name.startswith(TASK_PREFIX):  # no queue of the broker's, but what people have opened again of a stream
                advice = f"start `{framework().command} stream`"
            alarms.append(
                Alarm(
                    f"no_consumers/{name}", f"queue {name}", f"no consumers; {work}", advice, settings.alarm_unconsumed
                )
            )
        if (age := queue.oldest_accepted_seconds) is not None and age > settings.alarm_accepted:
            late = f"the oldest accepted operation has waited for {age:.0f} s; {_number(queue, 'accepted')} accepted"
            alarms.append(Alarm(f"accepted/{name}", f"queue {name}", late, "check its workers and the relay"))
    if found.unknown_effects:
        operations = "1 operation" if found.unknown_effects == 1 else f"{found.unknown_effects} operations"
        command = framework().command
        waiting = f"{operations} ended as effect_unknown: {command} dead-letters list --error effect_unknown"
        alarms.append(Alarm("unknown_effects", "effects", waiting, f"{command} effects resolve, then replay"))
    if found.not_kept:
        operations = "1 operation waits" if found.not_kept == 1 else f"{found.not_kept:,} operations wait"
        waiting = f"{operations} for their place, which does not take a result"
        advice = f"`{framework().command} doctor` says what it answers; nothing is lost, and they go on by themselves"
        alarms.append(Alarm("large_results", "results not kept", waiting, advice, settings.alarm_unconsumed))
    for row in found.streams:
        name, subject = f"{row.consumer}/{row.topic}/{row.partition}", f"stream {row.consumer}"
        if row.stopped is not None:
            advice = "as it says; until then, nothing that comes after it is handled"
            alarms.append(
                Alarm(f"stream_stopped/{name}", subject, f"{row.topic}/{row.partition}: {row.stopped}", advice)
            )
        elif row.lag and (row.lease_left is None or row.lease_left < 0):
            waiting = f"no process handles {row.topic}/{row.partition}; {row.lag:,} messages wait"
            advice = f"start `{framework().command} stream`"
            alarms.append(Alarm(f"stream_unowned/{name}", subject, waiting, advice, settings.alarm_unconsumed))
    alarms += [
        Alarm(
            f"webhook_disabled/{row.id}",
            f"webhooks to {row.id}",
            f"disabled, {row.disabled_because}; tenant {row.tenant}",
            f"ask the customer; then `{framework().command} webhooks enable`, or `disable` to accept it",
        )
        for row in found.disabled_webhooks
    ]
    return alarms


def run_once(app: Celery) -> int:
    """Check for alarms and tell those that are due or over; returns how many. A failing webhook raises nothing.

    Does nothing if another process has checked within the last `WATCH` seconds. May take several seconds: Postgres, the
    broker and the webhook have a few each.
    """
    runtime = runtime_of(app)
    settings = runtime.settings
    service, sends = settings.service, can_send(runtime)
    with runtime.autocommit() as connection:
        if not stored.try_begin_check(connection, service, watch=WATCH, sends=sends):
            return 0
    try:
        with monitoring_connection(settings) as connection:
            found = overview.take_snapshot(connection, app, settings)
    except DBAPIError as error:
        if is_news(error):
            log.warning("alarms_unknown", error=type(error.orig).__name__)
        return 0
    alarms = {alarm.name: alarm for alarm in lasting(found, settings)}
    unknown = [f"no_consumers/{name}" for name, queue in found.queues.items() if queue.consumers is None]
    patience = {name: alarm.patience for name, alarm in alarms.items()}
    repeat = settings.alert_interval * ALARM_INTERVALS
    # committed first: how long an alarm has lasted must not depend on the webhook
    with runtime.autocommit() as connection:
        stored.begin(connection, service, alarms)
    with runtime.engine.begin() as connection:
        if not stored.try_alert_lock(connection):
            return 0
        ended = stored.end(connection, service, alarms, unknown=unknown, sends=sends)
        due = [alarms[name] for name in stored.due(connection, service, patience, repeat=repeat)]
        logged = _log(runtime, due, repeat)
        over = [alarm.name for alarm in ended if alarm.sent_at is not None]
        if sends and (due or over):
            if not post(runtime, _text(service, due, over)):
                connection.rollback()  # sent again at the next check
                return 0
            stored.note_alarms_sent(connection, service, [alarm.name for alarm in due])
        for alarm in ended:
            if alarm.logged_at is not None:
                log.info("alarm_over", service=service, alarm=alarm.name)
    return len(due) + len(over) if sends else logged


def _log(runtime: Runtime, due: Iterable[Alarm], repeat: float) -> int:
    alarms, service = {alarm.name: alarm for alarm in due}, runtime.settings.service
    with runtime.autocommit() as connection:
        names = stored.to_log(connection, service, list(alarms), repeat=repeat)
    for name in names:
        metrics.alerts.labels(service, name.partition("/")[0]).inc()
        log.error("alarm", service=service, subject=alarms[name].subject, found=alarms[name].found)
    return len(names)


def _text(service: str, due: Iterable[Alarm], ended: Iterable[str]) -> str:
    lines = [f"{service}: {alarm.subject}: {alarm.found}" for alarm in due]
    lines += [f"{service}: over: {name}" for name in ended]
    return "\n".join(["Alarms", *map(one_line, lines)])  # names of queues and processes come from elsewhere


def _number(queue: QueueState, name: str) -> str:
    return f"{getattr(queue, name):,}{'+' if name in queue.at_least else ''}"
