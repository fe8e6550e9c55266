"""Prometheus counters, by task and never by key.

Flower shows a task that ran twice as one success; these counters show both runs. Processes share them through
`PROMETHEUS_MULTIPROC_DIR` (prometheus-client's multiprocess mode). Creating a counter opens its file, so they are not
created by importing this module but by `prepare`, or on first use. Without the extra `metrics`, nothing is counted.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..extras import extra
from ..reasons import OF_LETTERS

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Histogram

claims: Counter
batches: Counter
takeovers: Counter
completed: Counter
failed: Counter
retries: Counter
deferrals: Counter
duplicates: Counter
busy: Counter
waiting: Counter
put_back: Counter
mismatches: Counter
fenced: Counter
in_doubt: Counter
leases_lost: Counter
unknown_effects: Counter
recovered: Counter
set_aside: Counter
purged: Counter
published: Counter
publish_errors: Counter
stuck: Counter
resent: Counter
alerts: Counter
alerts_unsent: Counter
redis_unavailable: Counter
webhooks: Counter
stream_messages: Counter
stream_partitions_taken: Counter
stream_partitions_lost: Counter
attempt_seconds: Histogram
phase_seconds: Histogram

# An application's codes with a series of their own, of each task in one process: it may have put an id into them. The rest
# count as `OTHER`.
CODES, OTHER = 100, "other"

_lock = threading.Lock()
_codes: dict[str, set[str]] = {}
_made: _Metrics | _NoMetrics | None = None


class _NoMetrics:
    """Stands in for the counters, and for each of them, where prometheus-client is not installed."""

    def __getattr__(self, name: str) -> _NoMetrics:
        return self

    def labels(self, *_: object) -> _NoMetrics:
        return self

    def inc(self, _: float = 1) -> None: ...

    def observe(self, _: float) -> None: ...

    def time(self) -> AbstractContextManager[object]:
        return nullcontext()


class _Metrics:
    def __init__(self, directory: Path | None) -> None:
        from prometheus_client import REGISTRY, Counter, Histogram

        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)  # prometheus-client does not create it
        # Registered once all are made, so that a failure leaves nothing for the next try to collide with.
        counter, histogram = partial(Counter, registry=None), partial(Histogram, registry=None)
        self.claims = counter(
            "idempotency_claims", "Claims granted; an attempt whose commit is in doubt claims again", ["task"]
        )
        self.batches = counter(
            "idempotency_batches",
            "Batches, by how their bodies ran: each by itself, together, together again behind savepoints, alone",
            ["task", "ran"],
        )
        self.takeovers = counter(
            "idempotency_takeovers",
            "Claims of a started operation whose lease had run out. Operations that recovery released first count as "
            "idempotency_recovered instead",
            ["task"],
        )
        self.completed = counter("idempotency_completed", "Operations completed", ["task"])
        self.failed = counter("idempotency_failed", "Operations failed", ["task", "code"])
        self.retries = counter("idempotency_retries", "Attempts that ended with a retry", ["task"])
        self.deferrals = counter(
            "idempotency_deferrals", "Attempts released without being used up: deferrals and shutdowns", ["task"]
        )
        self.duplicates = counter("idempotency_duplicates", "Deliveries answered with the stored outcome", ["task"])
        self.busy = counter("idempotency_busy", "Duplicates acknowledged while the operation was in flight", ["task"])
        self.waiting = counter(
            "idempotency_claims_waiting", "Deliveries that had to wait for Postgres", ["task", "error"]
        )
        self.put_back = counter(
            "idempotency_put_back",
            "Deliveries put back because Postgres did not answer in time, or the broker to what follows, by where they wait",
            ["task", "to"],
        )
        self.mismatches = counter(
            "idempotency_mismatches", "Deliveries refused because their key was used with other arguments", ["task"]
        )
        self.fenced = counter(
            "idempotency_fenced_writes", "Writes refused because the attempt was no longer the holder", ["task"]
        )
        self.in_doubt = counter("idempotency_commits_in_doubt", "Commits whose reply was lost", ["task"])
        self.leases_lost = counter("idempotency_leases_lost", "Leases lost while the body ran", ["task"])
        self.unknown_effects = counter(
            "idempotency_unknown_effects", "Operations that failed as effect_unknown", ["task"]
        )
        self.recovered = counter(
            "idempotency_recovered",
            "Orphaned operations that recovery released, or failed because their attempts were used up",
            ["cause"],
        )
        self.set_aside = counter(
            "idempotency_set_aside", "Rows that a sweep could not handle and will try again later", ["sweep"]
        )
        self.purged = counter("idempotency_purged", "Operations deleted after their retention")
        self.published = counter("idempotency_outbox_published", "Outbox rows confirmed by the broker")
        self.publish_errors = counter(
            "idempotency_outbox_errors", "Failed attempts to publish an outbox row", ["error"]
        )
        self.stuck = counter("idempotency_outbox_stuck", "Failed attempts to publish an outbox row, from its fifth on")
        self.resent = counter(
            "idempotency_outbox_resent", "Operations resent because the broker had lost their message"
        )
        self.alerts = counter("idempotency_alerts", "Alerts and alarms raised", ["service", "reason"])
        self.alerts_unsent = counter("idempotency_alerts_unsent", "Alerts and alarms that the webhook did not accept")
        self.redis_unavailable = counter("idempotency_redis_unavailable", "Calls to Redis that failed or timed out")
        self.webhooks = counter(
            "idempotency_webhooks", "Attempts to deliver a webhook, by what came of them", ["answer"]
        )
        self.stream_messages = counter(
            "idempotency_stream_messages",
            "Messages that a stream's position has passed, by what came of them",
            ["stream", "as"],
        )
        self.stream_partitions_taken = counter(
            "idempotency_stream_partitions_taken", "Partitions that a process has begun to handle", ["stream"]
        )
        self.stream_partitions_lost = counter(
            "idempotency_stream_partitions_lost",
            "Partitions that another process, or a person's seek, has taken from one that held them",
            ["stream"],
        )
        self.attempt_seconds = histogram(
            "idempotency_attempt_seconds", "Time from the claim to the end of the attempt", ["task"]
        )
        self.phase_seconds = histogram(
            "idempotency_phase_seconds",
            "Time per phase of a delivery: claim, body, commit",
            ["task", "phase"],
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 300.0),
        )
        for each in vars(self).values():
            REGISTRY.register(each)


def _metrics() -> _Metrics | _NoMetrics:
    return _made or _prepared()


def _prepared() -> _Metrics | _NoMetrics:
    from ..environment import environment  # needs pydantic-settings, which importing the library does without

    global _made
    with _lock:
        if _made is None:
            directory = environment().prometheus_multiproc_dir
            if directory is None and find_spec("prometheus_client") is None:
                _made = _NoMetrics()
            else:
                with extra("metrics"):
                    _made = _Metrics(directory)
        return _made


def prepare() -> None:
    """Make the counters now, where a process can still refuse to start.

    Raises `OSError`, and `MissingExtra` if `PROMETHEUS_MULTIPROC_DIR` asks for counters that cannot be made.
    """
    _metrics()


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_metrics(), name)


def count_failed(task: str, code: str) -> None:
    """Count a failed operation."""
    known = _codes.setdefault(task, set())
    if len(known) < CODES and code not in OF_LETTERS:
        known.add(code)
    _metrics().failed.labels(task, code if code in known or code in OF_LETTERS else OTHER).inc()
    if code == "effect_unknown":
        _metrics().unknown_effects.labels(task).inc()


def phase(task: str, name: str) -> AbstractContextManager[object]:
    """Time a phase of a delivery, whether or not it succeeds."""
    return _phase(_metrics(), task, name).time()


@cache
def _phase(made: _Metrics | _NoMetrics, task: str, name: str) -> Histogram | _NoMetrics:
    """Found once for each task: a label that is looked up takes a lock and makes its name anew."""
    return made.phase_seconds.labels(task, name)


def combined_registry(directory: Path | None = None) -> CollectorRegistry:
    """The metrics of all processes, running or ended, that share a directory (default: `PROMETHEUS_MULTIPROC_DIR`).

    Raises `MissingExtra`.
    """
    with extra("metrics"):
        from prometheus_client import CollectorRegistry
        from prometheus_client.multiprocess import MultiProcessCollector

    class Collector(MultiProcessCollector):
        """Reads no file that is empty, as a process leaves that was killed while it made it: all others would be refused with it."""

        def collect(self) -> Any:
            files = [str(file) for file in Path(self._path).glob("*.db") if _has_content(file)]
            return self.merge(files, accumulate=True)  # type: ignore[no-untyped-call]

    shared = CollectorRegistry()
    Collector(shared, path=directory and str(directory))  # type: ignore[no-untyped-call]
    return shared


def _has_content(file: Path) -> bool:
    with suppress(FileNotFoundError):
        return file.stat().st_size > 0
    return False


def exposition() -> tuple[bytes, str]:
    """This process's metrics for Prometheus and their media type; those of all that share `PROMETHEUS_MULTIPROC_DIR`.

    Raises `MissingExtra`.
    """
    from ..environment import environment

    with extra("metrics"):
        from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest

    shared = environment().prometheus_multiproc_dir is not None
    return generate_latest(combined_registry() if shared else REGISTRY), CONTENT_TYPE_LATEST


def totals(directory: Path) -> dict[str, int]:
    """Counter totals by name, over all labels and all processes that share a directory."""
    samples = (sample for metric in combined_registry(directory).collect() for sample in metric.samples)
    found: dict[str, int] = {}
    for sample in samples:
        if sample.name.endswith("_total"):
            found[sample.name] = found.get(sample.name, 0) + int(sample.value)
    return dict(sorted(found.items()))
