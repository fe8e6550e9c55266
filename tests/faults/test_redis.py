"""F9, F10, F11: Redis loses everything, cannot be reached, or tells another time. It decides nothing, so nothing is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis as client

from idempotency.upkeep import maintenance
from services.redis import Redis
from tests.faults import clocks
from tests.faults.conftest import SeenCell
from tests.faults.scene import Scene
from tests.support.processes import eventually


@pytest.fixture
def own_redis(tmp_path: Path, environment: dict[str, str]) -> Iterator[Redis]:
    """A Redis of this test's own, which may be killed; the workers use it."""
    server = Redis(tmp_path / "redis")
    server.start()
    environment["REDIS_URL"] = server.url
    yield server
    server.discard()


def leases(server: Redis) -> list[str]:
    with client.Redis.from_url(server.url, decode_responses=True) as connection:
        return [connection.get(name) for name in connection.keys("idempotency:hint:*")]


def restart_empty(server: Redis) -> None:
    server.kill()
    server.start()


def flush(server: Redis) -> None:
    with client.Redis.from_url(server.url) as connection:
        connection.flushall()


@pytest.mark.parametrize(
    ("phase", "lose"),
    [
        pytest.param("P1", flush, marks=pytest.mark.cell("F9", "P1")),
        pytest.param("P2", restart_empty, marks=pytest.mark.cell("F9", "P2")),
        pytest.param("P3", restart_empty, marks=[pytest.mark.cell("F9", "P3"), pytest.mark.quick]),
    ],
)
def test_with_redis_empty_the_record_still_keeps_a_duplicate_away(
    phase: Any, lose: Any, scene: Scene, own_redis: Redis, cell: SeenCell
) -> None:
    scene.worker()
    scene.bring_to(phase)
    assert len(leases(own_redis)) == 1
    lose(own_redis)
    assert leases(own_redis) == []

    scene.duplicate()
    eventually(lambda: scene.record().duplicates == 1, what="the duplicate was counted")
    scene.let_go(phase)
    scene.completed()
    cell.saw(scene.outcome())


@pytest.mark.parametrize(
    "phase", [pytest.param(phase, marks=pytest.mark.cell("F10", phase)) for phase in ("P0", "P1", "P2", "P3")]
)
def test_without_redis_throughout_postgres_claims_renews_and_decides_alone(
    phase: Any, scene: Scene, redis_url: str, cell: SeenCell
) -> None:
    proxy = scene.redis_proxy()
    if phase == "P3":
        proxy.refuse()
    else:
        proxy.black_hole("requests")  # a Redis that hangs is worse than one that is gone
    worker = scene.worker(LEASE="2")
    scene.bring_to(phase)
    if phase == "P0":
        assert scene.status() is None
    else:
        first = scene.record()
        scene.duplicate()
        eventually(lambda: scene.record().locked_until > first.locked_until, what="renewed in Postgres")
        eventually(lambda: scene.record().duplicates == 1, what="the duplicate was counted")
        assert scene.record().fence == first.fence
    scene.let_go(phase)
    scene.completed()
    assert proxy.swallowed or proxy.refusals
    assert "event=redis_unavailable" in worker.log
    cell.saw(scene.outcome())


@pytest.fixture
def clock(own_redis: Redis, tmp_path: Path, cell: SeenCell, monkeypatch: pytest.MonkeyPatch) -> clocks.Clock:
    """The clock of the test's own Redis."""
    if not clocks.can_be_built():
        cell.not_run("no C compiler")
    clock = clocks.Clock(tmp_path)
    own_redis.discard()
    environment = own_redis._environment
    monkeypatch.setattr(own_redis, "_environment", lambda: environment() | clock.environment)
    own_redis.start()
    return clock


def redis_time(server: Redis) -> float:
    with client.Redis.from_url(server.url) as connection:
        return float(connection.time()[0])


@pytest.mark.parametrize(
    "phase", [pytest.param(phase, marks=pytest.mark.cell("F11", phase)) for phase in ("P1", "P2", "P3")]
)
def test_a_redis_whose_clock_jumps_forgets_a_hint_but_postgres_keeps_it(
    phase: Any, scene: Scene, own_redis: Redis, clock: clocks.Clock, cell: SeenCell
) -> None:
    scene.worker()
    scene.bring_to(phase)
    assert len(leases(own_redis)) == 1
    before = redis_time(own_redis)
    clock.shift(61)
    assert redis_time(own_redis) - before >= 61
    assert leases(own_redis) == []

    scene.duplicate()
    eventually(lambda: scene.record().duplicates == 1, what="the duplicate was counted")
    scene.let_go(phase)
    scene.completed()
    cell.saw(scene.outcome())


@pytest.mark.cell("F11", "P0")
def test_a_redis_clock_an_hour_back_holds_up_a_delivery_until_recovery(
    scene: Scene, own_redis: Redis, clock: clocks.Clock, cell: SeenCell
) -> None:
    scene.worker()
    scene.bring_to("P1")
    scene.duplicate()
    eventually(lambda: [each for each in leases(own_redis) if each.endswith(" counted")], what="the counted mark")
    clock.shift(-3600)
    # Its holder dies, and its lease in Postgres ends: only Redis still has a hint about it.
    os.kill(scene.held("P1"), signal.SIGKILL)
    eventually(lambda: scene.record().duplicates == 2, what="the redelivery was counted")
    scene.age()
    seen = len(scene.trace("hint.left"))
    ignored = scene.logged(" ignored")
    scene.duplicate()
    eventually(lambda: scene.logged(" ignored") > ignored, what="acknowledged on Redis' word alone")
    assert len(scene.trace("hint.left")) == seen, "it did not even ask Postgres"
    assert scene.status() == "started"

    assert maintenance.recover(scene.app) == 1
    scene.completed()
    # R is the death of the first holder; the delivery before its claim, which met the clock, needed the sweeper
    assert scene.outcome() == "R,S"
    cell.saw("S")
