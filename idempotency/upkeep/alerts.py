"""Alerts about new dead letters, outbox rows that can never be published, and rows that the broker keeps refusing.

They go to the log and a metric, and as {"text": …, "alerts": …} (`notices.py`) to a webhook if one is set: one per service and
reason within `alert_interval` seconds, with a count. Log and webhook are told independently: a process without the webhook's
address, or one that cannot reach it, logs, and leaves the sending to the others. Rows are marked after the alert was accepted,
so an unavailable webhook gets it later, and perhaps twice. Any number of processes may run this.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterable, Iterator
from functools import partial
from http.client import HTTPException
from weakref import WeakKeyDictionary

from celery import Celery
from sqlalchemy import Connection

from ..application import runtime_of
from ..attempt.runtime import Runtime
from ..deadlines import open_within
from ..framework import framework
from ..observe import metrics
from ..observe.logs import log
from ..reasons import OPEN, OUTBOX_STUCK
from ..settings import Settings
from ..store import alarms as stored
from ..store.alarms import News
from ..store.outbox import STUCK
from ..text import number_of, one_line
from .notices import COUNTED, NAMED, Notice, at_stake

# Alarms, such as the one about too many open letters, are repeated after this many intervals while they last.
ALARM_INTERVALS = 60
# Until when, by time.monotonic(), a process whose POST was not accepted leaves sending to others.
_holds_off: WeakKeyDictionary[Runtime, float] = WeakKeyDictionary()


def run_once(app: Celery) -> int:
    """Tell what is new; returns how many rows were sent, or logged by a process that cannot send. A failing webhook raises nothing.

    May take a little longer than `alert_timeout`, which is for the whole POST, so call it outside of task processing.
    """
    runtime = runtime_of(app)
    settings = runtime.settings
    news = partial(
        stored.news,
        interval=settings.alert_interval,
        most=settings.alert_open_letters,
        repeat=settings.alert_interval * ALARM_INTERVALS,
    )
    # committed first, and under a lock of its own: what is new is logged, however long the webhook takes with what was before
    with runtime.engine.begin() as connection:
        if not stored.try_lock(connection, "log"):
            return 0
        if found := news(connection, settings.service, "log"):
            _log(found, settings)
            stored.note_told(connection, settings.service, "log", found)
    if not can_send(runtime):
        return len(found.letters) + len(found.rows)
    with runtime.engine.begin() as connection:
        if not stored.try_lock(connection, "webhook"):
            return 0
        found = news(connection, settings.service, "webhook")
        if not found or not post(runtime, _text(found, settings), _notices(app, connection, found, settings)):
            return 0
        stored.note_told(connection, settings.service, "webhook", found)
    return len(found.letters) + len(found.rows)


def can_send(runtime: Runtime) -> bool:
    """Whether this process has the webhook's address, and has not just failed to reach it."""
    return runtime.settings.alert_webhook_url is not None and time.monotonic() >= _holds_off.get(runtime, 0.0)


def post(runtime: Runtime, text: str, notices: Iterable[Notice]) -> bool:
    """Post a text, and what a program can read of it, to the webhook. Returns whether it was accepted; never raises or logs the address.

    If it was not, this process sends nothing for `alert_interval`, so that another one has its turn.
    """
    settings = runtime.settings
    assert settings.alert_webhook_url is not None
    document = {"text": text, "alerts": [notice.document(settings) for notice in notices]}
    try:
        request = urllib.request.Request(  # noqa: S310  settings accept only http and https
            settings.alert_webhook_url.get_secret_value(),
            data=json.dumps(document).encode(),
            headers={"Content-Type": "application/json"},
        )
        with open_within(request, settings.alert_timeout):  # of its body, nothing is read
            return True
    except (OSError, HTTPException, ValueError) as error:
        _holds_off[runtime] = time.monotonic() + settings.alert_interval
        metrics.alerts_unsent.inc()
        log.warning("alert_not_sent", error=type(error).__name__, status=getattr(error, "code", None))
        return False


def _log(found: News, settings: Settings) -> None:
    for (service, reason), count in found.counts.items():
        metrics.alerts.labels(service, reason).inc()
        log.error("alert", service=service, reason=reason, dead_letters=count)
    for service, count in found.crowded.items():
        metrics.alerts.labels(service, OPEN).inc()
        log.error("alarm", service=service, open=count, limit=settings.alert_open_letters)
    if found.stuck:
        metrics.alerts.labels(settings.service, OUTBOX_STUCK).inc()
        log.error("alert", service=settings.service, reason=OUTBOX_STUCK, rows=found.stuck)


def _text(found: News, settings: Settings) -> str:
    """Services, reasons and numbers; never keys, arguments or error messages."""
    lines = [f"{service}: {count} new, {reason}" for (service, reason), count in found.counts.most_common()]
    lines += [
        f"{service}: {number_of(count, 'open dead letter')}, more than {settings.alert_open_letters}"
        for service, count in found.crowded.items()
    ]
    if found.stuck:
        lines.append(
            f"{settings.service}: {number_of(found.stuck, 'outbox row')} refused by the broker at least {STUCK} times, "
            "still being retried"
        )
    return "\n".join(["Dead letters", *map(one_line, lines)])


def _notices(app: Celery, connection: Connection, found: News, settings: Settings) -> Iterator[Notice]:
    command, service = framework().command, settings.service
    app.loader.import_default_modules()  # tasks say what is at stake
    for (owner, reason), count in found.counts.most_common():
        letters = found.ids.get(reason, [])
        look = f"{command} dead-letters show {letters[0]}" if letters else f"{command} status"
        stake = at_stake(app, stored.payloads(connection, letters[:COUNTED]))
        yield Notice(reason, owner, count, look, letters[:NAMED], stake)
    for owner, count in found.crowded.items():
        yield Notice(OPEN, owner, count, f"{command} dead-letters list --by reason --by task")
    if found.stuck:
        fields = {"queues": list(found.stuck_in), "queue": ",".join(found.stuck_in)}
        yield Notice(OUTBOX_STUCK, service, found.stuck, f"{command} status", fields=fields)
