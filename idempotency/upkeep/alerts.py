"""Alerts about new dead letters, outbox rows that can never be published, and rows that the broker keeps refusing.

They go to the log and a metric, and as {"text": …} to a webhook if one is set: one per service and reason within
`alert_interval` seconds, with a count. Rows are marked after the alert was sent, so an unavailable webhook gets it later,
and perhaps twice. Any number of processes may run this.
"""

from __future__ import annotations

import json
import urllib.request
from collections import Counter
from http.client import HTTPException
from typing import Any

from celery import Celery

from ..application import runtime_of
from ..observe import metrics
from ..observe.logs import log
from ..settings import Settings
from ..store import alarms as stored
from ..store.outbox import STUCK

# Alarms, such as the one about too many open letters, are repeated after this many intervals while they last.
ALARM_INTERVALS = 60


def run_once(app: Celery) -> int:
    """Send the alerts that are due; returns how many rows they cover. A failing webhook raises nothing.

    May take a little longer than `alert_timeout`, so call it outside of task processing.
    """
    runtime = runtime_of(app)
    settings = runtime.settings
    with runtime.engine.begin() as connection:
        if not stored.try_alert_lock(connection):
            return 0
        service, interval = settings.service, settings.alert_interval
        letters = stored.unalerted_letters(connection, service, interval=interval)
        rows = stored.unalerted_rows(connection, service, interval=interval)
        crowded = stored.crowded(
            connection, service, most=settings.alert_open_letters, interval=interval * ALARM_INTERVALS
        )
        counts = Counter((row.service, row.reason) for row in letters)
        if rows:
            counts[settings.service, "outbox_failed"] = len(rows)
        stuck = stored.stuck_rows(connection, service, interval=interval)
        if not counts and not crowded and not stuck:
            return 0
        for (service, reason), count in counts.items():
            metrics.alerts.labels(service, reason).inc()
            log.error("alert", service=service, reason=reason, dead_letters=count)
        for service, count in crowded.items():
            metrics.alerts.labels(service, "open").inc()
            log.error("alarm", service=service, open=count, limit=settings.alert_open_letters)
        kinds = [f"{service}/{reason}" for service, reason in counts] + [f"{service}/open" for service in crowded]
        if stuck:
            kinds.append(f"{settings.service}/outbox_stuck")
            metrics.alerts.labels(settings.service, "outbox_stuck").inc()
            log.error("alert", service=settings.service, reason="outbox_stuck", rows=stuck)
        stored.note_sent(connection, kinds)
        if not post(settings, _text(counts, crowded, stuck, settings)):
            return 0  # not marked: sent again after the interval
        stored.mark_alerted(connection, [row.id for row in letters], rows)
    return len(letters) + len(rows)


def post(settings: Settings, text: str) -> bool:
    """Post a text to the webhook, if there is one. Returns whether it was accepted; never raises or logs the address."""
    if settings.alert_webhook_url is None:
        return True
    try:
        request = urllib.request.Request(  # noqa: S310  settings accept only http and https
            settings.alert_webhook_url.get_secret_value(),
            data=json.dumps({"text": text}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with _OPENER.open(request, timeout=settings.alert_timeout):
            return True
    except (OSError, HTTPException, ValueError) as error:
        metrics.alerts_unsent.inc()
        log.warning("alert_not_sent", error=type(error).__name__, status=getattr(error, "code", None))
        return False


def _text(counts: Counter[tuple[str, str]], crowded: dict[str, int], stuck: int, settings: Settings) -> str:
    """Services, reasons and numbers; never keys, arguments or error messages."""
    lines = [f"{service}: {count} new, {reason}" for (service, reason), count in counts.most_common()]
    lines += [
        f"{service}: {count} open dead letters, more than {settings.alert_open_letters}"
        for service, count in crowded.items()
    ]
    if stuck:
        lines.append(
            f"{settings.service}: {stuck} outbox rows refused by the broker at least {STUCK} times, still being retried"
        )
    return "\n".join(["Dead letters", *lines])


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Alerts go only to the address in the settings."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)
