"""The application over HTTP with the address of Sentinels, as the production overlay for Kubernetes gives it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from idempotency.settings import Settings
from idempotency.testing.database import forget_hints
from idempotency.wire.keys import OperationId
from services import cluster
from services.cluster_redis import SentinelSet
from tests.pipeline.test_admin import Admin, admin, configure  # noqa: F401
from tests.support.processes import eventually

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def trio() -> Iterator[SentinelSet]:
    with cluster.running(needs=("redis",)) as running:
        yield running.redis


def test_it_is_ready_and_says_that_redis_answers_after_a_failover_too(
    admin: Admin,  # noqa: F811
    configure: Callable[..., None],  # noqa: F811
    trio: SentinelSet,
) -> None:
    configure(redis_url=trio.url)
    answer = admin.ask("GET", "/readyz", None)
    assert (answer.status_code, answer.json()["parts"]["redis"]["ok"]) == (200, True)
    former = trio.primary
    former.kill()
    try:
        assert admin.ask("GET", "/readyz", None).status_code == 200
        trio.wait_for_failover(former)
    finally:
        former.start()
    eventually(lambda: admin.ask("GET", "/readyz", None).json()["parts"]["redis"]["ok"], what="it answers again")


def test_hints_behind_sentinels_are_forgotten(trio: SentinelSet) -> None:
    settings = Settings.read({"database_url": "postgresql+psycopg://localhost/x", "redis_url": trio.url})
    forget_hints(settings, [OperationId("default", "a", "b")])
