"""Real processes that export over OTLP: from an HTTP request to the customer's webhook, and what a crash leaves of a trace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from idempotency.application import runtime_of
from idempotency.attempt.runtime import Runtime
from idempotency.operate.webhooks import add_endpoint, enable_endpoint
from idempotency.relay.relay import Relay
from idempotency.settings import Settings
from sandbox import process as sandbox
from tests.support import bank as b
from tests.support import crashing
from tests.support import receiver as receivers
from tests.support.collector import Collector, Exported, collecting
from tests.support.operations import Record
from tests.support.operators import ANN
from tests.support.processes import Processes, eventually
from tests.support.server import Server, api_key, client

SET_UP = "tests.support.telemetry:set_up"
SECRET = "whsec_of_the_provider"
# of a caller in this process, which makes no spans
CALLER = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
CUSTOMER, PAYMENT = "canary-customer-2468", "canary-payment-1357"
# The spans of a payment that its provider decides later, by the process that each is of, in order of their beginnings. Left out is
# what happens beside this.
WHOLE_PATH = (
    ("api", "keyed request"),
    ("api", "enqueue payments"),
    ("relay", "publish payments"),
    ("worker", "process payments"),
    ("worker", "claim"),
    ("worker", "body"),
    ("worker", "effect"),
    ("api", "payment webhook"),
    # by the report, or by the attempt that it has woken
    ("api or worker", "enqueue webhooks"),
    ("relay", "publish webhooks"),
    ("worker", "process webhooks"),
    ("worker", "enqueue webhooks"),
    ("relay", "publish webhooks"),
    ("worker", "process webhooks"),
    ("worker", "effect"),
    ("worker", "POST"),
)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest.mark.long
def test_one_trace_goes_from_the_request_to_the_customers_webhook(
    environment: dict[str, str], engine: Engine, processes: Processes, collector: Collector, tmp_path: Path
) -> None:
    receiver = receivers.start(receivers.certificate(tmp_path))
    environment |= {
        "STRIPE_WEBHOOK_SECRETS": SECRET,
        "STRIPE_FIRST_POLL": "3600",
        "IDEMPOTENCY_MESSAGE_SECRETS": "0123456789abcdef0123456789abcdef",
        "IDEMPOTENCY_WEBHOOK_ALLOWED_HOSTS": "127.0.0.1",
        "IDEMPOTENCY_WEBHOOK_CA_FILE": str(receiver.ca_file),
        "IDEMPOTENCY_TRACES": SET_UP,
    }
    server = Server(environment, factory="api.application:create_app")
    undecided = ("--faults", "undecided=1,decision_ms=800", "--webhook-secret", SECRET)
    with ExitStack() as stack:
        stack.callback(receiver.close)
        stack.callback(server.stop)
        provider = sandbox.running(
            "provider", tmp_path / "provider", *undecided, "--webhook-url", f"{server.url}/webhooks/stripe"
        )
        environment["STRIPE_API_BASE"] = stack.enter_context(provider).url
        run(environment, "-m", "tasks.migrate")
        stack.enter_context(relaying("tasks", environment | collector.environment("relay")))
        processes.environment = environment
        worker = processes.start(
            "--concurrency", "2", "-Q", "payments,webhooks", app="tasks", **collector.environment("worker")
        )
        server.start(**environment, **collector.environment("api"))
        worker.wait_until_ready()
        settings = {
            "database_url": environment["DATABASE_URL"],
            "service": "tasks",
            "webhook_allowed_hosts": "127.0.0.1",
            "webhook_ca_file": str(receiver.ca_file),
        }
        runtime = Runtime(Settings.read(settings))
        stack.callback(runtime.close)
        endpoint = add_endpoint(runtime, ANN, "acme", url=receiver.url, events=["payment.captured"])
        enable_endpoint(runtime, ANN, endpoint.id)
        key = api_key(engine, "acme")
        with client(server, key) as acme:
            body = {"customer_id": CUSTOMER, "amount": 1000, "currency": "EUR"}
            assert acme.post("/payments", json=body, headers={"Idempotency-Key": PAYMENT}).status_code == 202
        eventually(lambda: receiver.webhooks, timeout=60, what="the customer's webhook")
        eventually(lambda: collector.named("POST"), timeout=20, what="the last spans")
        eventually(lambda: len(captures(collector.spans)) > 1, timeout=20, what="the attempt that the report has woken")

    requested = collector.named("keyed request")[0]
    trace = sorted((span for span in collector.spans if span.trace == requested.trace), key=lambda span: span.begun)
    assert in_order(WHOLE_PATH, trace), picture(trace)
    roots = [span for span in trace if span.parent not in {other.id for other in trace}]
    assert roots == [requested], picture(trace)
    assert {span.scope for span in trace} == {"idempotency"}
    first, second = captures(trace)[:2]
    assert second.links[0] == (first.trace, first.id, "earlier_attempt")
    report = next(span for span in trace if span.name == "payment webhook")
    assert report.parent in (first.id, second.id)
    assert next(span for span in trace if span.name == "POST").attributes["http.response.status_code"] == 204
    exported = b"".join(collector.raw)
    secrets = (CUSTOMER, PAYMENT, SECRET, key, endpoint.verifier, receiver.url, "EUR", "acme")
    assert [secret for secret in secrets if secret.encode() in exported] == []
    if kept := os.environ.get("TRACE_PICTURE"):
        Path(kept).write_text(picture(trace))


@pytest.mark.long
def test_an_attempt_killed_in_its_body_is_linked_to_by_the_redelivery(
    bank: Celery, processes: Processes, environment: dict[str, str], relay: Relay, collector: Collector, record: Record
) -> None:
    """The span of the dead attempt was never exported: its claim was, and names it as its parent."""
    crashing.plan(environment["CRASH_DIRECTORY"], "body.entered", crashing.HOLD)
    processes.worker("--concurrency", "1", TRACES=SET_UP, **collector.environment("worker"))
    enqueue("a1")
    held = Path(environment["CRASH_DIRECTORY"]) / "body.entered.held"
    eventually(held.exists)
    eventually(lambda: collector.named("claim"))
    os.kill(int(held.read_text()), signal.SIGKILL)
    eventually(lambda: record("a1") and record("a1").status == "completed", timeout=60)
    process = f"process {environment['BANK_QUEUE']}"
    again = eventually(lambda: next((each for each in collector.named(process) if said(each) == "completed"), None))
    dead = collector.named("claim")[0].parent
    assert dead not in {span.id for span in collector.spans}
    assert again.links == ((again.trace, dead, "earlier_attempt"),)
    # the broker's redelivery may come before the lease of the dead attempt is known to be over
    met = [span for span in collector.named(process) if said(span) == "busy"]
    assert [span.links for span in met] == [((again.trace, dead, "other_delivery"),)] * len(met)
    assert {span.trace for span in collector.spans} == {again.trace}
    assert again.attributes["idempotency.attempt"] == 2


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("status", "delay"), [(200, 60.0), (503, 0.0), (400, 0.0)], ids=["hanging", "away", "refusing"]
)
def test_an_export_that_fails_or_hangs_holds_up_no_attempt(
    bank: Celery,
    processes: Processes,
    relay: Relay,
    collector: Collector,
    record: Record,
    status: int,
    delay: float,
) -> None:
    collector.status, collector.delay = status, delay
    processes.worker("--concurrency", "1", TRACES=SET_UP, **collector.environment("worker"))
    begun = time.monotonic()
    for number in range(20):
        enqueue(f"a{number}")
    eventually(lambda: all(record(f"a{n}") and record(f"a{n}").status == "completed" for n in range(20)), timeout=30)
    assert time.monotonic() - begun < 15
    assert [record(f"a{n}").attempts for n in range(20)] == [1] * 20
    assert collector.spans == []


@pytest.mark.long
def test_a_child_exports_what_it_has_left_when_its_worker_stops(
    bank: Celery, processes: Processes, relay: Relay, environment: dict[str, str], collector: Collector, record: Record
) -> None:
    """Set up after the fork, in each child; and the exporter's own thread would have waited for a minute."""
    worker = processes.worker(
        "--concurrency", "2", TRACES=SET_UP, **collector.environment("worker") | {"OTEL_BSP_SCHEDULE_DELAY": "60000"}
    )
    enqueue("a1")
    eventually(lambda: record("a1") and record("a1").status == "completed")
    assert collector.spans == []
    worker.terminate()
    eventually(lambda: worker.process.poll() is not None, timeout=60)
    assert [span.name for span in collector.named(f"process {environment['BANK_QUEUE']}")] != []


@pytest.mark.long
def test_spans_of_celerys_instrumentation_and_ours_are_one_tree(
    bank: Celery, processes: Processes, environment: dict[str, str], relay: Relay, collector: Collector, record: Record
) -> None:
    """Each attempt of ours is inside Celery's, and what Celery sends is inside our call. No name is there twice for one thing."""
    application = "tests.support.instrumented"
    processes.worker("--concurrency", "1", app=application, **collector.environment("worker"))
    run(environment | collector.environment("caller"), "-m", application, "a1")
    for key in ("a1", "sent-a1"):
        eventually(lambda key=key: record(key) and record(key).status == "completed")
    run_by_celery = eventually(lambda: all_of(collector, "run/tests.support.bank.deposit", 2))
    by_id = {span.id: span for span in collector.spans}

    def chain(span: Exported) -> list[str]:
        return [span.name, *(chain(by_id[span.parent]) if span.parent in by_id else ())]

    queue, task = environment["BANK_QUEUE"], "tests.support.bank.deposit"
    found = sorted(chain(span) for span in collector.named(f"process {queue}"))
    assert found == [
        [f"process {queue}", f"run/{task}", f"apply_async/{task}", f"enqueue {queue}", "request"],
        [f"process {queue}", f"run/{task}", f"apply_async/{task}", "send", "request"],
    ]
    assert {span.trace for span in run_by_celery} == {collector.named("request")[0].trace}
    names = {(span.parent, span.name) for span in collector.spans}
    assert len(names) == len(collector.spans)


def enqueue(account: str) -> None:
    with Session(runtime_of(b.app).engine) as session, session.begin():
        b.deposit.using(headers=CALLER).enqueue(session, account)


def captures(spans: list[Exported]) -> list[Exported]:
    """The attempts to capture the payment, in order."""
    found = [span for span in spans if span.name == "process payments" and span.task == "payments.capture_payment"]
    return sorted(found, key=lambda span: span.begun)


def said(span: Exported) -> Any:
    return span.attributes.get("idempotency.outcome")


def all_of(collector: Collector, name: str, many: int) -> list[Exported]:
    found = collector.named(name)
    return found if len(found) >= many else []


def run(environment: dict[str, str], *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


@contextmanager
def relaying(app: str, environment: dict[str, str]) -> Iterator[None]:
    command = [sys.executable, "-m", "idempotency.cli", "relay", "-A", app]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.terminate()


def in_order(expected: tuple[tuple[str, str], ...], spans: list[Exported]) -> bool:
    """Whether all of these are there, each beginning after the one before it."""
    left = iter(spans)
    return all(
        any(span.name == name and span.service in services.split(" or ") for span in left)
        for services, name in expected
    )


def picture(spans: list[Exported]) -> str:
    """A trace as text: when each span began, in ms, of which process it is, and below which span."""
    children: dict[str, list[Exported]] = {}
    known = {span.id for span in spans}
    for span in spans:
        children.setdefault(span.parent if span.parent in known else "", []).append(span)
    begin, lines = min(span.begun for span in spans), list[str]()

    def draw(span: Exported, depth: int) -> None:
        at, took = (span.begun - begin) / 1e6, (span.ended - span.begun) / 1e6
        about: Any = span.attributes.get("idempotency.outcome") or span.attributes.get("idempotency.effect") or ""
        task = f" {span.task}" if span.task and span.name.startswith(("process", "enqueue")) else ""
        lines.append(f"{at:8.0f} {took:7.0f}  {span.service:<7} {'  ' * depth}{span.name}{task} {about}".rstrip())
        for child in children.get(span.id, ()):
            draw(child, depth + 1)

    for root in children.get("", ()):
        draw(root, 0)
    return "\n".join(["      ms    took  process", *lines, ""])
