"""What operators count, read from the endpoint as Prometheus reads it, after a real worker with duplicates."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import httpx
from celery import Celery
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

import idempotency.metrics  # noqa: F401  registers what it counts
from idempotency.relay import Relay
from tests import bank as bank_module
from tests.processes import Processes, eventually

COMMAND = [sys.executable, "-m", "idempotency.cli", "metrics", "--port"]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def endpoint(directory: Path) -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen(
        [*COMMAND, str(port)],
        env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(directory)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == f"metrics at http://127.0.0.1:{port}/metrics\n"
        yield f"http://127.0.0.1:{port}/metrics"
    finally:
        process.terminate()
        assert process.wait(10) == 0
        process.stdout.close()


def samples(url: str) -> dict[tuple[str, str, str], float]:
    """Every sample by name, task and the second label (code or phase)."""
    text = httpx.get(url).raise_for_status().text
    return {
        (sample.name, sample.labels.get("operation", ""), sample.labels.get("code", sample.labels.get("phase", ""))): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


def test_the_endpoint_shows_what_all_processes_of_a_worker_did(
    bank: Celery, processes: Processes, relay: Relay, tmp_path: Path
) -> None:
    directory = tmp_path / "made by whoever comes first"
    processes.worker("--concurrency", "2", PROMETHEUS_MULTIPROC_DIR=str(directory))
    deposit, failing = bank_module.deposit.name, bank_module.failing.name
    for account in (uuid4().hex, uuid4().hex):
        for _ in range(3):
            bank_module.deposit.delay(account=account)
    bank_module.failing.delay(account=uuid4().hex, how="retry")
    bank_module.failing.delay(account=uuid4().hex, how="permanent")

    with endpoint(directory) as url:

        def settled() -> dict[tuple[str, str, str], float] | None:
            seen = samples(url)
            deliveries = sum(
                seen.get((f"idempotency_{kind}_total", deposit, ""), 0) for kind in ("claims", "duplicates", "busy")
            )
            exhausted = seen.get(("idempotency_failed_total", failing, "attempts_exhausted"), 0)
            return seen if deliveries == 6 and exhausted == 1 else None

        seen = eventually(settled, what="six deliveries and a last attempt")
        assert seen["idempotency_claims_total", deposit, ""] == 2
        assert seen["idempotency_completed_total", deposit, ""] == 2
        # max_attempts=3: two come after another one, the third ends the operation
        assert seen["idempotency_claims_total", failing, ""] == 4
        assert seen["idempotency_takeovers_total", failing, ""] == 2
        assert seen["idempotency_retries_total", failing, ""] == 2
        assert seen["idempotency_failed_total", failing, "no_account"] == 1
        assert seen["idempotency_phase_seconds_count", deposit, "claim"] == 6
        assert seen["idempotency_phase_seconds_count", deposit, "body"] == 2
        assert seen["idempotency_phase_seconds_count", deposit, "commit"] == 2
        assert seen["idempotency_phase_seconds_sum", deposit, "commit"] > 0


def test_everything_an_operator_counts_has_its_name() -> None:
    names = {family.name for family in REGISTRY.collect()}
    kinds = (
        "claims takeovers completed failed retries deferrals duplicates busy fenced_writes leases_lost unknown_effects"
    )
    assert names >= {f"idempotency_{kind}" for kind in [*kinds.split(), "recovered", "phase_seconds"]}


def run(port: int, **environment: str) -> subprocess.CompletedProcess[str]:
    bare = {name: value for name, value in os.environ.items() if name != "PROMETHEUS_MULTIPROC_DIR"}
    return subprocess.run([*COMMAND, str(port)], env=bare | environment, capture_output=True, text=True, timeout=30)


def test_without_a_shared_directory_one_line_says_so() -> None:
    done = run(free_port())
    assert done.returncode == 1
    assert done.stderr.startswith("idempotency: PROMETHEUS_MULTIPROC_DIR: not set")
    assert done.stderr.count("\n") == 1


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        done = run(port, PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == f"idempotency: --address 127.0.0.1 --port {port}: Address already in use\n"
