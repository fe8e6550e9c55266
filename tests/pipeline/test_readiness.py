"""Readiness: behind Sentinels, as the production overlay for Kubernetes has them, and where the backlog does not answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import text

from api import health
from idempotency.settings import Settings
from idempotency.testing.database import forget_hints
from idempotency.wire.keys import OperationId
from services import cluster
from services.cluster_redis import SentinelSet
from tests.pipeline.test_admin import Admin, admin, configure  # noqa: F401
from tests.support.processes import eventually


@pytest.fixture(scope="module")
def trio() -> Iterator[SentinelSet]:
    with cluster.running(needs=("redis",)) as running:
        yield running.redis


@pytest.mark.long
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


@pytest.mark.long
def test_hints_behind_sentinels_are_forgotten(trio: SentinelSet) -> None:
    settings = Settings.read({"database_url": "postgresql+psycopg://localhost/x", "redis_url": trio.url})
    forget_hints(settings, [OperationId("default", "a", "b")])


@pytest.mark.long
def test_what_is_not_needed_holds_up_no_probe(
    admin: Admin,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Statements about the backlog that are slow, or wait for a lock."""
    monkeypatch.setattr(health, "DEADLINE_OF_WORK", 0.5)
    with admin.engine.connect() as connection:
        connection.execute(text("BEGIN"))
        connection.execute(text("LOCK TABLE idempotency.outbox"))
        # `ask` waits for the threads of its event loop
        release = threading.Timer(2.0, lambda: connection.execute(text("ROLLBACK")))
        release.start()
        answer = admin.ask("GET", "/readyz", None)
        release.join()
    assert answer.status_code == 200
    assert {answer.json()["parts"][name]["detail"] for name in ("broker", "relay", "consumers")} == {
        "not known within 0.5 s"
    }
