"""What operators count, read from the endpoint as Prometheus reads it, after a real worker with duplicates."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
from celery import Celery
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import Engine, make_url, text

from idempotency import OperationId
from idempotency.relay.relay import Relay
from idempotency.wire import keys
from services.server import free_port
from tests.support import bank as bank_module
from tests.support import operations as op
from tests.support.deliveries import Deliveries
from tests.support.outside import OutsideWorld
from tests.support.processes import Processes, eventually
from tests.support.tasks import enqueued

COMMAND = [sys.executable, "-m", "idempotency.cli", "metrics", "--port"]


@contextmanager
def endpoint(directory: Path, *options: str, **environment: str) -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen(
        [*COMMAND, str(port), *options],
        env=os.environ | environment | {"PROMETHEUS_MULTIPROC_DIR": str(directory)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == f"metrics at http://127.0.0.1:{port}/metrics\n"
        yield f"http://127.0.0.1:{port}/metrics"
    finally:
        process.terminate()
        assert process.wait(60) == 0
        process.stdout.close()


def samples(url: str) -> dict[tuple[str, str, str], float]:
    """Every sample by name, task and the second label (code or phase)."""
    page = httpx.get(url).raise_for_status().text
    return {
        (sample.name, sample.labels.get("task", ""), sample.labels.get("code", sample.labels.get("phase", ""))): (
            sample.value
        )
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


def test_the_endpoint_shows_what_all_processes_of_a_worker_did(
    bank: Celery, processes: Processes, relay: Relay, tmp_path: Path
) -> None:
    directory = tmp_path / "made by the first"
    processes.worker("--concurrency", "2", PROMETHEUS_MULTIPROC_DIR=str(directory))
    deposit, failing = bank_module.deposit.name, bank_module.failing.name
    for account in (uuid4().hex, uuid4().hex):
        for _ in range(3):
            bank_module.deposit.delay(account=account)
    bank_module.failing.delay(account=uuid4().hex, how="retry")
    bank_module.failing.delay(account=uuid4().hex, how="permanent")

    with endpoint(directory) as url:

        def all_counted() -> dict[tuple[str, str, str], float] | None:
            seen = samples(url)
            deliveries = sum(
                seen.get((f"idempotency_{kind}_total", deposit, ""), 0) for kind in ("claims", "duplicates", "busy")
            )
            exhausted = seen.get(("idempotency_failed_total", failing, "attempts_exhausted"), 0)
            return seen if deliveries == 6 and exhausted == 1 else None

        seen = eventually(all_counted, what="six deliveries and a last attempt")
        assert seen["idempotency_claims_total", deposit, ""] == 2
        assert seen["idempotency_completed_total", deposit, ""] == 2
        # max_attempts=3: two come after another one, the third ends the operation
        assert seen["idempotency_claims_total", failing, ""] == 4
        assert ("idempotency_takeovers_total", failing, "") not in seen  # a retry takes nothing over
        assert seen["idempotency_retries_total", failing, ""] == 2
        assert seen["idempotency_failed_total", failing, "no_account"] == 1
        assert seen["idempotency_phase_seconds_count", deposit, "claim"] == 6
        assert seen["idempotency_phase_seconds_count", deposit, "body"] == 2
        assert seen["idempotency_phase_seconds_count", deposit, "commit"] == 2
        assert seen["idempotency_phase_seconds_sum", deposit, "commit"] > 0


def gauges(url: str) -> dict[tuple[str, ...], float]:
    """The backlog's samples by name and labels."""
    page = httpx.get(url, timeout=10).raise_for_status().text
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page)
        if family.type == "gauge"
        for sample in family.samples
    }


@pytest.mark.long
def test_the_endpoint_shows_what_waits_in_the_database(
    bank: Celery, engine: Engine, environment: dict[str, str], tmp_path: Path
) -> None:
    with endpoint(tmp_path, "-A", "tests.support.bank", **environment) as url, engine.connect() as connection:
        queue = bank.conf.task_default_queue
        assert gauges(url) == nothing_waits(queue)
        for account, countdown in (("a", 0), ("b", 0), ("c", 0), ("later", 600)):
            enqueued(connection, bank_module.deposit, account=account, countdown=countdown)
        change = "UPDATE idempotency.outbox SET {} WHERE key = '{}'"
        connection.execute(text(change.format("available_at = clock_timestamp() - interval '100 s'", "b")))
        # a row that cannot be published waits for its next try, and has waited since the beginning
        backing_off = "attempts = 9, available_at = clock_timestamp() + interval '1 min'"
        created = "created_at = clock_timestamp() - interval '500 s'"
        connection.execute(text(change.format(f"{backing_off}, {created}", "c")))
        for reason in ("envelope", "envelope", "expired", "effect_unknown"):
            letter = "INSERT INTO idempotency.dead_letters (source, consumer_service, reason, payload) VALUES "
            connection.execute(text(letter + f"('broker', 'bank', '{reason}', '')"))
        discard = "UPDATE idempotency.dead_letters SET status = 'discarded', closed_at = now() WHERE id = 1"
        connection.execute(text(discard))
        op.started(connection, queue=queue)
        op.early(connection, queue=queue)  # with its next delivery in the outbox, due in ten minutes

        seen = gauges(url)
        assert 500 <= seen["idempotency_outbox_oldest_seconds",] < 600
        assert 500 <= seen.pop(("idempotency_accepted_oldest_seconds", queue)) < 600
        assert 0 < seen.pop(("idempotency_released_next_due_seconds", queue)) <= 600
        assert seen == nothing_waits(queue) | {
            ("idempotency_outbox_unpublished",): 3,
            ("idempotency_outbox_oldest_seconds",): seen["idempotency_outbox_oldest_seconds",],
            ("idempotency_accepted", queue): 3,
            ("idempotency_scheduled", queue): 1,
            ("idempotency_running", queue): 1,
            ("idempotency_released", queue): 1,
            ("idempotency_dead_letters_open", "envelope", "bank"): 1,
            ("idempotency_dead_letters_open", "expired", "bank"): 1,
            ("idempotency_dead_letters_open", "effect_unknown", "bank"): 1,
            ("idempotency_unknown_effects_open",): 1,
        }


@pytest.mark.long
def test_a_broker_that_is_away_leaves_its_gauges_out(bank: Celery, environment: dict[str, str], tmp_path: Path) -> None:
    away = environment | {"BROKER_URL": "amqp://guest:guest@127.0.0.1:1//"}
    with endpoint(tmp_path, "-A", "tests.support.bank", **away) as url:
        seen = gauges(url)
    assert (seen["idempotency_broker_up",], seen["idempotency_database_up",]) == (0, 1)
    assert not {name for name, *_ in seen} & {"idempotency_queue_ready", "idempotency_queue_consumers"}
    assert seen["idempotency_accepted", bank.conf.task_default_queue] == 0


@pytest.mark.long
def test_a_broker_that_never_answers_does_not_hold_up_a_scrape(
    bank: Celery, environment: dict[str, str], tmp_path: Path
) -> None:
    with socket.socket() as silent:  # takes connections, and never says a word
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        hanging = environment | {"BROKER_URL": f"amqp://guest:guest@127.0.0.1:{silent.getsockname()[1]}//"}
        with endpoint(tmp_path, "-A", "tests.support.bank", **hanging) as url:
            assert gauges(url)["idempotency_broker_up",] == 0  # httpx waits as long as Prometheus would


@pytest.mark.long
def test_the_endpoint_may_be_started_before_anything_has_counted(tmp_path: Path) -> None:
    directory = tmp_path / "not" / "there yet"
    with endpoint(directory) as url:
        assert gauges(url) == {}
    assert directory.is_dir()


@pytest.mark.long
def test_the_application_may_be_named_in_the_environment(
    bank: Celery, environment: dict[str, str], tmp_path: Path
) -> None:
    with endpoint(tmp_path, **environment, CELERY_APP="tests.support.bank") as url:
        assert gauges(url)["idempotency_database_up",] == 1
    with endpoint(tmp_path, **environment) as url:
        assert gauges(url) == {}


def nothing_waits(queue: str) -> dict[tuple[str, ...], float]:
    """The gauges of an application without work and workers."""
    names = ("accepted", "scheduled", "running", "lease_over", "released", "queue_ready", "queue_consumers")
    return {(f"idempotency_{name}", queue): 0.0 for name in names} | {
        ("idempotency_database_up",): 1,
        ("idempotency_database_writable",): 1,
        ("idempotency_broker_up",): 1,
        ("idempotency_outbox_unpublished",): 0,
        ("idempotency_outbox_failed",): 0,
        ("idempotency_results_not_kept",): 0,
        ("idempotency_webhooks_disabled",): 0,
        ("idempotency_outbox_oldest_seconds",): 0,
        ("idempotency_unknown_effects_open",): 0,
        ("idempotency_dead_letters_archived",): 0,
    }


@pytest.mark.long
def test_a_scrape_does_not_fail_or_hang_with_the_database(
    engine: Engine, environment: dict[str, str], tmp_path: Path
) -> None:
    down = {("idempotency_database_up",): 0.0}
    with endpoint(tmp_path, "-A", "tests.support.bank", **environment) as url, engine.connect() as connection:
        connection.execute(text("SELECT 1"))
        with engine.execution_options(isolation_level="READ COMMITTED").begin() as transaction:
            transaction.execute(text("LOCK TABLE idempotency.dead_letters"))
            began = time.monotonic()
            assert gauges(url) == down
            assert time.monotonic() - began < 10
        assert gauges(url)["idempotency_database_up",] == 1
    away = make_url(environment["DATABASE_URL"]).set(port=1).render_as_string(hide_password=False)
    with endpoint(tmp_path, "-A", "tests.support.bank", **(environment | {"DATABASE_URL": away})) as url:
        assert gauges(url) == down


def counted(name: str, task: str) -> float:
    return REGISTRY.get_sample_value(f"idempotency_{name}_total", {"task": task}) or 0.0


def test_only_a_claim_from_a_holder_whose_lease_is_over_is_a_takeover(
    bank: Celery, deliveries: Deliveries, engine: Engine
) -> None:
    deposit, failing = bank_module.deposit, bank_module.failing
    before = counted("takeovers", deposit.name), counted("takeovers", failing.name)
    with engine.connect() as connection:
        for leave in (op.expired, op.due):
            held = leave(connection, OperationId("default", deposit.name, leave.__name__), fingerprint="")
            change = "UPDATE idempotency.records SET fingerprint = :fingerprint WHERE key = :key"
            given = {"fingerprint": keys.fingerprint({"account": held.id.key}), "key": held.id.key}
            connection.execute(text(change), given)
            assert deliveries.deliver(deposit, held.id.key).state == "SUCCESS"
        deliveries.deliver(failing, "a", "flaky")
        op.age(connection, OperationId("default", failing.name, "a"), available_at=-1)
        deliveries.deliver(failing, "a", "flaky", origin="retry")
    assert counted("takeovers", deposit.name) == before[0] + 1
    assert counted("takeovers", failing.name) == before[1]


@pytest.mark.long
def test_an_operation_that_asks_twice_and_ends_unknown_counts_once(
    bank: Celery, deliveries: Deliveries, engine: Engine, outside: OutsideWorld
) -> None:
    transfer = bank_module.transfer
    outside.script = ["fail before"] * 2
    before = counted("unknown_effects", transfer.name)
    for _ in range(2):  # begun, then found begun
        deliveries.deliver(transfer, "a", outside.url)
        with engine.connect() as connection:
            op.age(connection, OperationId("default", transfer.name, "a"), available_at=-1)
    assert counted("unknown_effects", transfer.name) == before
    with engine.connect() as connection:  # longer ago than the provider keeps keys
        change = "UPDATE idempotency.records SET effects = jsonb_set(effects, '{call,begun_at}', '1')"
        connection.execute(text(change))
    deliveries.deliver(transfer, "a", outside.url)
    assert counted("unknown_effects", transfer.name) == before + 1


def test_everything_an_operator_counts_has_its_name() -> None:
    names = {family.name for family in REGISTRY.collect()}
    kinds = (
        "claims takeovers completed failed retries deferrals duplicates busy fenced_writes leases_lost unknown_effects"
    )
    assert names >= {f"idempotency_{kind}" for kind in [*kinds.split(), "recovered", "phase_seconds"]}


def run(port: int, **environment: str) -> subprocess.CompletedProcess[str]:
    bare = {name: value for name, value in os.environ.items() if name != "PROMETHEUS_MULTIPROC_DIR"}
    return subprocess.run([*COMMAND, str(port)], env=bare | environment, capture_output=True, text=True, timeout=30)


@pytest.mark.long
def test_without_a_shared_directory_one_line_says_so() -> None:
    done = run(free_port())
    assert done.returncode == 1
    assert done.stderr.startswith("idempotency: PROMETHEUS_MULTIPROC_DIR: not set")
    assert done.stderr.count("\n") == 1


@pytest.mark.long
def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        done = run(port, PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == f"idempotency: --address 127.0.0.1 --port {port}: Address already in use\n"
