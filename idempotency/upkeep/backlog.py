"""Gauges of the backlog and the processes, queried at each scrape because no process owns this state.

A scrape never fails or hangs: if Postgres is unavailable or slow, `idempotency_database_up` is 0 and the other gauges are
missing, which does not mean zero. Likewise the broker's gauges. Counts stop at 50,000 rows over all queues.
"""

from __future__ import annotations

from collections.abc import Iterator

from celery import Celery
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy.exc import DBAPIError

from ..application import settings_of
from ..store.overview import Snapshot, monitoring_connection
from . import overview

# For each queue: the attribute of its state, the gauge, and the help text.
_QUEUE_GAUGES = (
    ("accepted", "accepted", "Accepted operations that are due and have not started; stops at 50,000 over all queues"),
    ("oldest_accepted_seconds", "accepted_oldest_seconds", "How long the oldest accepted operation has been due"),
    ("scheduled", "scheduled", "Accepted operations that are not due yet"),
    ("running", "running", "Operations that an attempt holds"),
    ("lease_over", "lease_over", "Running operations whose lease has run out"),
    ("released", "released", "Operations waiting for their next attempt; stops at 50,000 over all queues"),
    (
        "next_due_seconds",
        "released_next_due_seconds",
        "Seconds until the first released operation is due; negative if overdue",
    ),
    ("ready", "queue_ready", "Messages in the broker that have not been handed to a consumer"),
    ("consumers", "queue_consumers", "Consumers of the queue"),
)


class Backlog(Collector):
    """The backlog of one application: its database, its queues and its processes."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._settings = settings_of(app)

    def describe(self) -> list[Metric]:
        """Empty, or the registry would query Postgres before the first scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("idempotency_database_up", "Whether Postgres answered this scrape in time")
        try:
            with monitoring_connection(self._settings) as connection:
                found = overview.take_snapshot(connection, self._app, self._settings)
        except DBAPIError:
            up.add_metric([], 0)
            yield up
            return
        up.add_metric([], 1)
        yield up
        yield GaugeMetricFamily(
            "idempotency_database_writable", "Whether Postgres takes writes", float(found.takes_writes)
        )
        yield GaugeMetricFamily(
            "idempotency_broker_up", "Whether the broker answered this scrape in time", float(found.broker_answered)
        )
        yield GaugeMetricFamily(
            "idempotency_outbox_unpublished", "Outbox rows that are due and not published", found.outbox.unpublished
        )
        yield GaugeMetricFamily(
            "idempotency_outbox_oldest_seconds",
            "How long the oldest unpublished outbox row has been due",
            max(found.outbox.oldest or 0.0, 0.0),
        )
        yield GaugeMetricFamily(
            "idempotency_outbox_failed", "Outbox rows that can never be published", found.outbox.failed
        )
        yield GaugeMetricFamily(
            "idempotency_results_not_kept", "Operations that wait for the place of large results", found.not_kept
        )
        yield GaugeMetricFamily(
            "idempotency_webhooks_disabled",
            "Endpoints of customers that were disabled because they accept nothing",
            len(found.disabled_webhooks),
        )
        yield from _queues(found)
        yield from _processes(found)
        yield from _others(found)
        yield from _letters(found)
        yield from _streams(found)


def _queues(found: Snapshot) -> Iterator[Metric]:
    for attribute, name, text in _QUEUE_GAUGES:
        gauge = GaugeMetricFamily(f"idempotency_{name}", text, labels=["queue"])
        for queue, state in sorted(found.queues.items()):
            if (value := getattr(state, attribute)) is not None:
                gauge.add_metric([queue], value)
        yield gauge


def _processes(found: Snapshot) -> Iterator[Metric]:
    signs = GaugeMetricFamily(
        "idempotency_last_sign_seconds",
        "Time since a worker, relay, beat or stream process that has not shut down cleanly was last seen",
        labels=["kind", "name", "host", "pid"],
    )
    for process in found.processes:
        signs.add_metric([process.kind, process.name, process.host, str(process.pid)], process.silent_seconds)
    yield signs


def _others(found: Snapshot) -> Iterator[Metric]:
    due = GaugeMetricFamily(
        "idempotency_due_without_relay",
        "Rows that are due of other applications on these tables, no relay of which is running; '-': of none",
        labels=["application"],
    )
    for row in found.sharers:
        if row.service is None or not row.has_relay:
            due.add_metric([row.service or "-"], row.due)
    yield due


def _letters(found: Snapshot) -> Iterator[Metric]:
    by_reason: dict[tuple[str, str], int] = {}
    for row in found.letters:
        by_reason[row.service, row.reason] = by_reason.get((row.service, row.reason), 0) + row.letters
    letters = GaugeMetricFamily(
        "idempotency_dead_letters_open", "Dead letters waiting for a person", labels=["service", "reason"]
    )
    for labels, number in sorted(by_reason.items()):
        letters.add_metric(labels, number)
    yield letters
    yield GaugeMetricFamily(
        "idempotency_dead_letters_archived",
        "Open dead letters that people have archived, so that lists and alarms leave them out",
        found.archived.letters,
    )
    yield GaugeMetricFamily(
        "idempotency_unknown_effects_open",
        "Operations that ended as effect_unknown, waiting for a person",
        found.unknown_effects,
    )


def _streams(found: Snapshot) -> Iterator[Metric]:
    by_name = {
        name: GaugeMetricFamily(f"idempotency_stream_{name}", text, labels=["stream", "topic", "partition"])
        for name, text in (
            ("position", "The offset of the next message of a partition"),
            (
                "lag",
                "Messages of a partition that are not handled, as its owner has last seen; absent while that is not known",
            ),
            ("stopped", "Whether a partition goes no further until a person has decided"),
        )
    }
    for row in found.streams:
        labels = [row.consumer, row.topic, str(row.partition)]
        by_name["stopped"].add_metric(labels, float(row.stopped is not None))
        for name in ("position", "lag"):
            if (value := getattr(row, name)) is not None:
                by_name[name].add_metric(labels, value)
    yield from by_name.values()
