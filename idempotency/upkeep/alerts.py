"""Alerts: every new dead letter, every outbox row that can never be published and every one that the broker goes on
refusing is told to somebody.

To the log and a metric always, and as {"text": …} to a webhook where one is set. A service and reason that goes on
failing is told once in `alert_interval` seconds, with a count. Rows are marked after they were sent: a receiver that is
away is told later, and perhaps twice. Any number of processes at once; they run it beside the relay.
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
from ..store import alarms as told
from ..store.outbox import STUCK

# The alarm about too many open letters is repeated after this many intervals, as long as it lasts.
ALARM_INTERVALS = 60


def run_once(app: Celery) -> int:
    """Tell what has not been told yet; returns how many rows. Never fails because of a receiver.

    Holds up its caller for `alert_timeout` seconds or a little longer, so it belongs beside the work and not into it.
    """
    runtime = runtime_of(app)
    settings = runtime.settings
    with runtime.engine.begin() as connection:
        if not told.take_turn(connection):
            return 0
        service, interval = settings.service, settings.alert_interval
        letters = told.untold_letters(connection, service, interval=interval)
        rows = told.untold_rows(connection, service, interval=interval)
        crowded = told.crowded(
            connection, service, most=settings.alert_open_letters, interval=interval * ALARM_INTERVALS
        )
        counts = Counter((row.service, row.reason) for row in letters)
        if rows:
            counts[settings.service, "outbox_failed"] = len(rows)
        stuck = told.stuck_rows(connection, service, interval=interval)
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
        told.note_sent(connection, kinds)
        if not post(settings, _text(counts, crowded, stuck, settings)):
            return 0  # not marked: told again after the interval
        told.mark_told(connection, [row.id for row in letters], rows)
    return len(letters) + len(rows)


def post(settings: Settings, text: str) -> bool:
    """Post a text to the webhook, if there is one. False: it did not take it; never raises, never shows the address."""
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
    """Services, reasons and numbers; never a key, an argument or an error's text."""
    lines = [f"{service}: {count} new, {reason}" for (service, reason), count in counts.most_common()]
    lines += [
        f"{service}: {count} open dead letters, more than {settings.alert_open_letters}"
        for service, count in crowded.items()
    ]
    if stuck:
        lines.append(
            f"{settings.service}: {stuck} outbox rows refused by the broker {STUCK} times or more, still tried"
        )
    return "\n".join(["Dead letters", *lines])


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Where alerts go is for the settings to say."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)
