"""A small Celery application without Postgres: each task calls a provider that counts, and its record is in a store."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from typing import Any

from celery import Celery
from kombu import Exchange, Queue

from idempotency import DeduplicatedTask, Defer, PermanentError
from idempotency.queues import quorum_queue
from idempotency.worker.store_runtimes import close_store_runtimes
from tests.support import crashing

app = Celery("charges")


def configure(environment: dict[str, str]) -> None:
    """Point the application at one test's servers."""
    close_store_runtimes(app)
    name = environment["STORE_QUEUE"]
    # a queue with delays of its own needs exchanges that a worker declares
    plain = Queue(name, Exchange(name, type="topic"), routing_key=name)
    lease = float(environment.get("LEASE", "60"))
    app.conf.update(
        broker_url=environment["BROKER_URL"],
        broker_transport_options={"confirm_publish": True},
        task_queues=[quorum_queue(name, exchange=name) if "QUORUM" in environment else plain],
        task_default_queue=name,
        task_default_exchange=name,
        task_default_exchange_type="topic",
        task_default_routing_key=name,
        task_create_missing_queues=False,
        task_ignore_result=True,
        worker_prefetch_multiplier=1,
        worker_enable_prefetch_count_reduction=False,
        broker_connection_retry_on_startup=True,
        timezone="UTC",
        idempotency_store=environment["STORE"],
        idempotency_lease=lease,
        idempotency_heartbeat=lease / 4,
        idempotency_retry_base=0.05,
        idempotency_compress_results_above=64 * 1024,
        idempotency_store_results_at=None,
    )
    app.amqp.flush_routes()
    for each in ("queues", "_producer_pool", "router"):
        app.amqp.__dict__.pop(each, None)
    app.amqp._producer_pool = None
    app._pool = None
    app.amqp.__dict__.pop("send_task_message", None)


def call(url: str, *, idempotency_key: str) -> dict[str, Any]:
    """Not the one of `bank`: importing that would add its tasks, which need Postgres, to this application."""
    request = urllib.request.Request(url, b"{}", {"Idempotency-Key": idempotency_key})
    with urllib.request.urlopen(request, timeout=10) as answer:
        told: dict[str, Any] = json.load(answer)
    return told


@app.task(base=DeduplicatedTask, bind=True, shared=False, name="stores.charge", key="{account}")
def charge(self: DeduplicatedTask, account: str, url: str, amount: int = 1) -> dict[str, Any]:
    """A call outside."""
    answer = call(url, idempotency_key=self.outside_key)
    crashing.reach("called")
    return {"account": account, "amount": answer["amount"], "fence": self.fence}


@app.task(base=DeduplicatedTask, bind=True, shared=False, name="stores.hurried", key="{account}", time_limit=1.9)
def hurried(self: DeduplicatedTask, account: str, url: str) -> str:
    """Has less time than a lease lasts in these tests."""
    call(url, idempotency_key=self.outside_key)
    crashing.reach("called")
    return account


@app.task(base=DeduplicatedTask, bind=True, shared=False, name="stores.slow", key="{account}")
def slow(self: DeduplicatedTask, account: str, url: str, seconds: float) -> str:
    """Works for a while before it calls."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        crashing.reach("working")
        time.sleep(0.02)
    call(url, idempotency_key=self.outside_key)
    return account


@app.task(base=DeduplicatedTask, bind=True, shared=False, name="stores.failing", key="{account}", max_attempts=3)
def failing(self: DeduplicatedTask, account: str, how: str) -> None:
    """Fails in the way it is told."""
    match how:
        case "permanent":
            raise PermanentError("no such account", "no_account")
        case "defer":
            raise Defer(0.05, "not yet")
        case "retry":
            raise self.retry(countdown=0.01, exc=ValueError("again"))
        case "poison":
            os.kill(os.getpid(), 9)
        case _:
            raise ValueError(how)


@app.task(base=DeduplicatedTask, bind=True, shared=False, name="stores.returning")
def returning(self: DeduplicatedTask, value: Any = None) -> Any:
    """Returns what it is given; its key is given per call."""
    return value


if "STORE_QUEUE" in os.environ:
    configure(dict(os.environ))
    crashing.install()
