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
from sqlalchemy import Connection

from ..application import runtime_of
from ..observe import metrics
from ..observe.logs import log
from ..relay.relay import STUCK
from ..settings import Settings

# One process alerts at a time, so that all keep to one rate together. Any constant not used elsewhere.
ALERT_LOCK = 0x1DE4907F
# Rows told in one pass.
BATCH = 10_000
# The alarm about too many open letters is repeated after this many intervals, as long as it lasts.
ALARM_INTERVALS = 60

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


def run_once(app: Celery) -> int:
    """Tell what has not been told yet; returns how many rows. Never fails because of a receiver.

    Holds up its caller for `alert_timeout` seconds or a little longer, so it belongs beside the work and not into it.
    """
    runtime = runtime_of(app)
    settings = runtime.settings
    with runtime.engine.begin() as connection:
        if not connection.exec_driver_sql(f"SELECT pg_try_advisory_xact_lock({ALERT_LOCK})").scalar_one():
            return 0
        fields = {"service": settings.service, "interval": settings.alert_interval, "batch": BATCH}
        letters = connection.exec_driver_sql(_LETTERS, fields).all()
        rows = connection.exec_driver_sql(_OUTBOX, fields).scalars().all()
        crowded = _crowded(connection, settings)
        counts = Counter((row.service, row.reason) for row in letters)
        if rows:
            counts[settings.service, "outbox_failed"] = len(rows)
        stuck = connection.exec_driver_sql(_STUCK, fields).scalar_one()
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
        connection.exec_driver_sql(_SENT, {"kinds": kinds})
        if not post(settings, _text(counts, crowded, stuck, settings)):
            return 0  # not marked: told again after the interval
        connection.exec_driver_sql(_MARK.format(table="dead_letters"), {"ids": [row.id for row in letters]})
        connection.exec_driver_sql(_MARK.format(table="outbox"), {"ids": list(rows)})
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


def _crowded(connection: Connection, settings: Settings) -> dict[str, int]:
    fields = {
        "service": settings.service,
        "most": settings.alert_open_letters,
        "interval": settings.alert_interval * ALARM_INTERVALS,
    }
    return {row.service: row.letters for row in connection.exec_driver_sql(_CROWDED, fields)}


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
