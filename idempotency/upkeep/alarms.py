"""Alarms about lasting conditions: work without consumers, late work, silent processes, unknown effects, no relay.

An alarm goes to the log, a metric and the webhook once it has lasted for its `patience`, again every hour while it lasts, and
once more when it is over. Any number of processes may watch; they share their pace and state in Postgres. Those that cannot
reach the webhook log, and leave the sending to those that can. At least one has to be running: if all are down, only the gauges
of `idempotency metrics` show it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from celery import Celery
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from ..application import runtime_of
from ..framework import framework
from ..observe import metrics
from ..observe.logs import log
from ..reasons import (
    ACCEPTED,
    LARGE_RESULTS,
    NO_CONSUMERS,
    NO_RELAY,
    SILENT,
    STREAM_STOPPED,
    STREAM_UNOWNED,
    UNKNOWN_EFFECTS,
    UNNAMED_ROWS,
    WEBHOOK_DISABLED,
)
from ..settings import Settings
from ..store import alarms as stored
from ..store.overview import QueueState, Snapshot, monitoring_connection
from ..store.statements import is_news
from ..streams.declaring import TASK_PREFIX, declared_streams
from ..text import number_of, one_line
from . import overview
from .alerts import ALARM_INTERVALS, can_send, post
from .notices import Notice
from .started import start_of

# Seconds between two checks, by whichever process. Well below the settings for alarms; a check costs Postgres up to half
# a second with a long backlog.
WATCH = 15.0


@dataclass(frozen=True, slots=True)
class Alarm:
    """What is wrong and what to do. `name`, which begins with the kind, identifies it while it lasts; `patience` is the delay until it is sent.

    `look` is the command to type first, without the program's name; `fields` are what the runbook's page names in capitals.
    """

    name: str
    subject: str
    found: str
    advice: str
    patience: float = 0.0
    look: str = "status"
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Which of `reasons.ALARMS`."""
        return self.name.partition("/")[0]

    def notice(self, service: str) -> Notice:
        """What is posted besides the text."""
        fields = {"alarm": self.name, "subject": self.subject, "found": self.found, **self.fields}
        return Notice(self.kind, service, 1, f"{framework().command} {self.look}", fields=fields)


def lasting(found: Snapshot, settings: Settings) -> list[Alarm]:
    """Everything that is wrong in a snapshot. Unknown is not wrong: an unavailable broker has not lost its consumers."""
    return [
        *_of_processes(found, settings),
        *_of_rows(found, settings),
        *_of_queues(found, settings),
        *_of_ends(found, settings),
        *_of_streams(found, settings),
    ]


def _of_processes(found: Snapshot, settings: Settings) -> Iterator[Alarm]:
    command = framework().command
    for process in found.processes:
        if process.silent_seconds > settings.alarm_silence:
            yield Alarm(
                f"{SILENT}/{process.kind}/{process.name}/{process.host}/{process.pid}",
                f"{process.kind} {process.name}",
                f"silent for {process.silent_seconds:.0f} s, pid {process.pid} on {process.host}",
                f"check the process; if it is gone for good, run `{command} forget`",
                fields={
                    **{name: getattr(process, name) for name in ("kind", "name", "host", "pid")},
                    **({} if process.directory is None else {"directory": process.directory}),
                    "start": start_of(process),
                },
            )


def _of_rows(found: Snapshot, settings: Settings) -> Iterator[Alarm]:
    command, patience = framework().command, settings.alarm_unconsumed
    if found.outbox.unpublished and not found.has_relay(settings.alarm_silence):
        waiting = f"none is running; rows due: {found.outbox.unpublished:,}, for {max(found.outbox.oldest, 0.0):.0f} s"
        yield Alarm(NO_RELAY, "relay", waiting, f"start `{command} relay`", patience)
    for row in found.sharers:
        if row.due and row.service is None:
            waiting = f"{row.due:,}, of tasks that this application does not know"
            advice = f"run a relay of the application that has them, or `{command} cancel --without-task`"
            yield Alarm(UNNAMED_ROWS, "rows without a service", waiting, advice, patience)
        elif (row.due or row.lease_over) and not row.has_relay:
            waiting = (
                f"no relay of it is running; rows due: {row.due:,}, begun and without a holder: {row.lease_over:,}"
            )
            advice = f"start its relay; if it has another name now, `{command} rename-service`"
            fields = {"application": row.service}
            name = f"{NO_RELAY}/{row.service}"
            yield Alarm(name, f"application {row.service}", waiting, advice, patience, fields=fields)


def _of_queues(found: Snapshot, settings: Settings) -> Iterator[Alarm]:
    alive = [each for each in found.processes if each.silent_seconds <= settings.alarm_silence]
    handled = {queue for each in alive if each.kind == "stream" for queue in each.queues}
    for name, queue in sorted(found.queues.items()):
        accepted, about, of_it = f"{_number(queue, 'accepted')} accepted", f"queue {name}", {"queue": name}
        if queue.consumers == 0 and queue.has_work and name not in handled:
            idle = f"no consumers; {accepted}, {_number(queue, 'released')} released, {queue.ready} ready"
            advice = "start a worker for it"
            if name.startswith(TASK_PREFIX):  # no queue of the broker's, but what people have opened again of a stream
                advice = f"start `{framework().command} stream`"
            yield Alarm(f"{NO_CONSUMERS}/{name}", about, idle, advice, settings.alarm_unconsumed, fields=of_it)
        if (age := queue.oldest_accepted_seconds) is not None and age > settings.alarm_accepted:
            late = f"the oldest accepted operation has waited for {age:.0f} s; {accepted}"
            yield Alarm(f"{ACCEPTED}/{name}", about, late, "check its workers and the relay", fields=of_it)


def _of_ends(found: Snapshot, settings: Settings) -> Iterator[Alarm]:
    command = framework().command
    if found.unknown_effects:
        operations = number_of(found.unknown_effects, "operation")
        look = "dead-letters list --error effect_unknown"
        waiting = f"{operations} ended as effect_unknown: {command} {look}"
        advice = (
            f"{command} effects resolve, then replay; an effect with a `reconcile` is replayed first, and looks itself"
        )
        yield Alarm(UNKNOWN_EFFECTS, "effects", waiting, advice, look=look)
    if found.not_kept:
        operations = number_of(found.not_kept, "operation waits", "operations wait")
        waiting = f"{operations} for their place, which does not take a result"
        look = "doctor --problems"
        advice = f"`{command} doctor` says what it answers; nothing is lost, and they go on by themselves"
        yield Alarm(LARGE_RESULTS, "results not kept", waiting, advice, settings.alarm_unconsumed, look)
    for row in found.disabled_webhooks:
        yield Alarm(
            f"{WEBHOOK_DISABLED}/{row.id}",
            f"webhooks to {row.id}",
            f"disabled, {row.disabled_because}; tenant {row.tenant}",
            f"ask the customer; then `{command} webhooks enable`, or `disable` to accept it",
            look="webhooks list",
            fields={"endpoint": row.id},
        )


def _of_streams(found: Snapshot, settings: Settings) -> Iterator[Alarm]:
    for row in found.streams:
        name, subject = f"{row.consumer}/{row.topic}/{row.partition}", f"stream {row.consumer}"
        fields = {"stream": row.consumer, "topic": row.topic, "partition": row.partition}
        if row.stopped is not None:
            advice = "as it says; until then, nothing that comes after it is handled"
            stopped = f"{row.topic}/{row.partition}: {row.stopped}"
            yield Alarm(f"{STREAM_STOPPED}/{name}", subject, stopped, advice, look="stream status", fields=fields)
        elif (row.lag or _is_read(row)) and (row.lease_left is None or row.lease_left < 0):
            # only who reads a partition sees what comes to it
            waiting = (
                f"{number_of(row.lag, 'message waits', 'messages wait')}, or more"
                if row.lag
                else "whether messages wait is not known"
            )
            waiting = f"no process handles {row.topic}/{row.partition}; {waiting}"
            advice, patience = f"start `{framework().command} stream`", settings.alarm_unconsumed
            yield Alarm(f"{STREAM_UNOWNED}/{name}", subject, waiting, advice, patience, "stream status", fields)


def _is_read(row: Any) -> bool:
    """Whether the application reads this partition. Of what it reads no more, only what was seen to wait alarms."""
    declared = declared_streams().get(row.consumer)
    return declared is not None and declared.source.reads(row.topic, row.partition)


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
    unknown = [f"{NO_CONSUMERS}/{name}" for name, queue in found.queues.items() if queue.consumers is None]
    patience = {name: alarm.patience for name, alarm in alarms.items()}
    repeat = settings.alert_interval * ALARM_INTERVALS
    # committed first: neither how long an alarm has lasted nor its line may depend on the webhook
    with runtime.autocommit() as connection:
        stored.begin(connection, service, alarms)
        to_log = [alarms[name] for name in stored.due(connection, service, patience, repeat=repeat)]
        logged = _log(connection, to_log, service, repeat)
    with runtime.engine.begin() as connection:
        if not stored.try_lock(connection, "alarms"):
            return 0 if sends else logged
        ended = stored.end(connection, service, alarms, unknown=unknown, sends=sends)
        due = [alarms[name] for name in stored.due(connection, service, patience, repeat=repeat)]
        over = [alarm.name for alarm in ended if alarm.sent_at is not None]
        if sends and (due or over):
            notices = [*(alarm.notice(service) for alarm in due), *(_over(service, name) for name in over)]
            if not post(runtime, _text(service, due, over), notices):
                connection.rollback()  # sent again at the next check
                return 0
            stored.note_alarms_sent(connection, service, [alarm.name for alarm in due])
        for alarm in ended:
            if alarm.logged_at is not None:
                log.info("alarm_over", service=service, alarm=alarm.name)
    return len(due) + len(over) if sends else logged


def _log(connection: Connection, due: Iterable[Alarm], service: str, repeat: float) -> int:
    alarms = {alarm.name: alarm for alarm in due}
    names = stored.to_log(connection, service, list(alarms), repeat=repeat)
    for name in names:
        metrics.alerts.labels(service, name.partition("/")[0]).inc()
        log.error("alarm", service=service, subject=alarms[name].subject, found=alarms[name].found)
    return len(names)


def _text(service: str, due: Iterable[Alarm], ended: Iterable[str]) -> str:
    lines = [f"{service}: {alarm.subject}: {alarm.found}" for alarm in due]
    lines += [f"{service}: over: {name}" for name in ended]
    return "\n".join(["Alarms", *map(one_line, lines)])  # names of queues and processes come from elsewhere


def _over(service: str, name: str) -> Notice:
    fields = {"alarm": name, "over": True}
    return Notice(name.partition("/")[0], service, 0, f"{framework().command} status", fields=fields)


def _number(queue: QueueState, name: str) -> str:
    return f"{getattr(queue, name):,}{'+' if name in queue.at_least else ''}"
