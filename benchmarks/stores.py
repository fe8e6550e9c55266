"""What an attempt costs whose record is in a store, beside one in Postgres: claim, an empty body, and its end.

Each attempt runs in this process, without a broker, so that nothing else is timed; the stores take turns. Redis is a real
server. For DynamoDB it is the one that AWS_ENDPOINT_URL_DYNAMODB names, in a table that is made; without it, it is left out,
because the time of a stand-in would say nothing.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

from rich.progress import track

import services
from idempotency.attempt.claim import at_once
from idempotency.attempt.endings import Finished
from idempotency.attempt.policy import Policy
from idempotency.attempt.run import run
from idempotency.attempt.runtime import Runtime
from idempotency.settings import Settings
from idempotency.stores import run as in_store
from idempotency.stores.dynamodb import DynamoDBStore
from idempotency.stores.runtime import StoreRuntime
from idempotency.stores.store import TIMEOUT
from idempotency.wire.delivery import Delivery
from idempotency.wire.keys import OperationId, fingerprint

POSTGRES, REDIS, DYNAMODB = "postgres", "redis", "dynamodb"
REGION, TABLE = "eu-west-1", "idempotency-benchmark"
_numbers = itertools.count()


def measure(running: services.Services, *, rounds: int, many: int) -> dict[str, list[float]]:
    """Milliseconds for an attempt of each store, by round: the mean of `many`."""
    settings = Settings.read({"database_url": running.database_url, "service": "benchmarks"})
    policy = Policy.by_settings(settings)
    postgres = Runtime(settings)
    opened = {REDIS: StoreRuntime(settings, running.redis_url)}
    if "AWS_ENDPOINT_URL_DYNAMODB" in os.environ:
        _make_table()
        opened[DYNAMODB] = StoreRuntime(settings, f"dynamodb://{REGION}/{TABLE}")

    def in_postgres() -> Any:
        return run(postgres, _delivery(), policy, _body)

    sides: dict[str, Callable[[], Any]] = {POSTGRES: in_postgres}
    for name, runtime in opened.items():
        sides[name] = lambda runtime=runtime: in_store.run(runtime, _delivery(), policy, _body, at_once)  # type: ignore[misc]
    took: dict[str, list[float]] = {name: [] for name in sides}
    try:
        for _ in range(max(many // 10, 1)):  # connections, plans, imports
            for attempt in sides.values():
                attempt()
        for _ in track(range(rounds), description="stores: in turns"):
            for name, attempt in sides.items():
                began = time.perf_counter()
                for _ in range(many):
                    if not isinstance(attempt(), Finished):
                        raise SystemExit(f"{name}: an attempt has not finished")
                took[name].append(1e3 * (time.perf_counter() - began) / many)
    finally:
        postgres.close()
        for runtime in opened.values():
            runtime.close()
    return took


def _make_table() -> None:
    """Make the table, unless an earlier run has left it."""
    from botocore.exceptions import ClientError

    store = DynamoDBStore(REGION, TABLE, service="benchmarks", timeout=TIMEOUT)
    try:
        store.create_table()
    except ClientError as error:
        if error.response["Error"]["Code"] != "ResourceInUseException":
            raise
    finally:
        store.close()


def _delivery() -> Delivery:
    number = next(_numbers)
    arguments = {"number": number}
    id = OperationId("default", "benchmarks.stores", f"{os.getpid()}-{number}")
    return Delivery(id, fingerprint(arguments), arguments, message="{}", task_id="t")


def _body(_: Any) -> dict[str, int]:
    return {"number": 1}
