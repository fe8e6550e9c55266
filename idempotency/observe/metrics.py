"""What operators count: prometheus counters, by operation, never by key.

Flower shows a task that ran twice as one success; these show it as it was. Prefork workers share them through
`PROMETHEUS_MULTIPROC_DIR` (prometheus-client's multiprocess mode).
"""

import os
from contextlib import AbstractContextManager
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.multiprocess import MultiProcessCollector

if directory := os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
    # prometheus-client opens its files as soon as a counter is made, and does not make the directory
    Path(directory).mkdir(parents=True, exist_ok=True)

claims = Counter("idempotency_claims", "Claims granted; after a doubt an attempt claims again", ["operation"])
takeovers = Counter(
    "idempotency_takeovers",
    "Claims of a started operation whose holder's lease was over. What recovery released first is claimed as any released "
    "operation and counts in idempotency_recovered",
    ["operation"],
)
completed = Counter("idempotency_completed", "Operations completed", ["operation"])
failed = Counter("idempotency_failed", "Operations failed", ["operation", "code"])
retries = Counter("idempotency_retries", "Attempts released for another one", ["operation"])
deferrals = Counter("idempotency_deferrals", "Attempts given back: not the operation's fault", ["operation"])
duplicates = Counter("idempotency_duplicates", "Deliveries answered with the stored outcome", ["operation"])
busy = Counter("idempotency_busy", "Deliveries acknowledged while the operation was in flight", ["operation"])
waiting = Counter(
    "idempotency_claims_waiting", "Deliveries that had to wait for Postgres' answer", ["operation", "error"]
)
put_back = Counter(
    "idempotency_put_back",
    "Deliveries that Postgres did not answer in time, by where they wait now",
    ["operation", "to"],
)
mismatches = Counter("idempotency_mismatches", "Deliveries refused for their fingerprint", ["operation"])
fenced = Counter("idempotency_fenced_writes", "Writes of a former holder that matched nothing", ["operation"])
in_doubt = Counter("idempotency_commits_in_doubt", "Commits whose answer was lost", ["operation"])
leases_lost = Counter("idempotency_leases_lost", "Leases lost while the body ran", ["operation"])
unknown_effects = Counter("idempotency_unknown_effects", "Operations that ended as effect_unknown", ["operation"])
recovered = Counter("idempotency_recovered", "Orphaned operations released by recovery, or ended as spent", ["cause"])
set_aside = Counter("idempotency_set_aside", "Rows that a sweep could not handle and tries again later", ["sweep"])
purged = Counter("idempotency_purged", "Records deleted past retention")
published = Counter("idempotency_outbox_published", "Outbox rows confirmed by the broker")
publish_errors = Counter("idempotency_outbox_errors", "Outbox rows whose publish failed", ["error"])
stuck = Counter("idempotency_outbox_stuck", "Tries from the fifth on to publish an outbox row that the broker refuses")
resent = Counter("idempotency_outbox_resent", "Operations sent again because their queue lacked them")
alerts = Counter("idempotency_alerts", "Alerts about dead letters, and alarms", ["service", "reason"])
alerts_unsent = Counter("idempotency_alerts_unsent", "Alerts that their receiver did not take")
redis_unavailable = Counter("idempotency_redis_unavailable", "Calls to Redis that failed or timed out")
attempt_seconds = Histogram("idempotency_attempt_seconds", "From a claim to the end of its attempt", ["operation"])
phase_seconds = Histogram(
    "idempotency_phase_seconds",
    "Time of a delivery in each phase: claim, body, commit",
    ["operation", "phase"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 300.0),
)


def count_failed(operation: str, code: str) -> None:
    """Count an operation that has ended without success."""
    failed.labels(operation, code).inc()
    if code == "effect_unknown":
        unknown_effects.labels(operation).inc()


def phase(operation: str, name: str) -> AbstractContextManager[object]:
    """Time a phase of a delivery, however it ends."""
    return phase_seconds.labels(operation, name).time()


def of_all_processes(directory: Path | None = None) -> CollectorRegistry:
    """What all processes that share a directory (by default `PROMETHEUS_MULTIPROC_DIR`) have counted, ended ones too."""
    shared = CollectorRegistry()
    MultiProcessCollector(shared, path=directory and str(directory))  # type: ignore[no-untyped-call]
    return shared


def totals(directory: Path) -> dict[str, int]:
    """The counters of all processes that share a directory, by name, over all labels."""
    samples = (sample for metric in of_all_processes(directory).collect() for sample in metric.samples)
    found: dict[str, int] = {}
    for sample in samples:
        if sample.name.endswith("_total"):
            found[sample.name] = found.get(sample.name, 0) + int(sample.value)
    return dict(sorted(found.items()))
