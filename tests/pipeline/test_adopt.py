"""examples/adopt: the same small application before and after, under the same crash and the same duplicates."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kombu import Connection
from sqlalchemy import text
from sqlalchemy.engine import Engine

import services
from tests.support import crashing
from tests.support.processes import Processes, eventually

EXAMPLE = Path(__file__).parents[2] / "examples" / "adopt"
# An order that earns 120 points and a voucher, and two more copies of its message.
CALLS = """
import shop
shop.Base.metadata.create_all(shop.engine)
with shop.Session.begin() as session:
    session.add_all([shop.Customer(id="ann"), shop.Customer(id="bob")])
shop.place_order("o1", "ann", 12_000)
shop.award_points.delay("o1")
shop.award_points.delay("o1")
"""
LATER = "import shop; shop.place_order('o2', 'bob', 100); shop.award_points.delay('o1')"
# kills the worker when the task has returned and its message is not acknowledged yet
CRASHES = """
from celery.signals import task_postrun
from tests.support import crashing

@task_postrun.connect(weak=False)
def reach(task, **_):
    crashing.reach(task.name)
"""


@pytest.fixture
def adopted(
    environment: dict[str, str], processes: Processes, tmp_path: Path, servers: services.Services, engine: Engine
) -> Iterator[Callable[[str], tuple[int, int]]]:
    """Runs one form of the shop through duplicates and a killed worker; returns Ann's points and vouchers."""
    relays = []

    def run(form: str) -> tuple[int, int]:
        (tmp_path / "crashes.py").write_text(CRASHES)
        environment["PYTHONPATH"] = f"{EXAMPLE / form}:{tmp_path}:{environment['PYTHONPATH']}"
        for name in ("BANK_QUEUE", "REDIS_URL"):
            environment.pop(name)  # the shop has no such thing
        if form == "after":
            call("-m", "idempotency.cli", "migrate", "-A", "shop")
            command = [sys.executable, "-m", "idempotency.cli", "relay", "-A", "shop"]
            relays.append(subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL))
        call("-c", CALLS)
        plan = crashing.plan(environment["CRASH_DIRECTORY"], "shop.award_points", crashing.KILL_WORKER)
        options = ("--concurrency", "1", "--include", "crashes")
        worker = processes.start(*options, app="shop")
        worker.process.wait(60)
        assert not plan.exists(), worker.log[-2000:]
        processes.start(*options, app="shop")
        call("-c", LATER)
        eventually(lambda: scalar("SELECT points FROM customers WHERE id = 'bob'"), timeout=60)
        queue, issued = ("shop", 2) if form == "before" else ("orders", 1)
        eventually(lambda: empty(queue))
        eventually(lambda: scalar("SELECT count(*) FROM vouchers") >= issued)
        points = scalar("SELECT points FROM customers WHERE id = 'ann'")
        return points, scalar("SELECT count(*) FROM vouchers")

    def call(*arguments: str) -> None:
        subprocess.run([sys.executable, *arguments], env=environment, check=True, timeout=60)

    def scalar(query: str) -> int:
        with engine.connect() as connection:
            return int(connection.execute(text(query)).scalar_one())

    def empty(queue: str) -> bool:
        with Connection(servers.broker_url) as connection:
            return bool(connection.default_channel.queue_declare(queue, passive=True).message_count == 0)

    yield run
    for relay in relays:
        relay.terminate()
        relay.wait(20)
    processes.kill_all()
    with Connection(servers.broker_url) as connection:
        for queue in ("shop", "orders", "orders.dead_letters"):
            connection.default_channel.queue_delete(queue)


@pytest.mark.long
def test_before_crashes_and_duplicates_award_points_again_and_again(
    adopted: Callable[[str], tuple[int, int]],
) -> None:
    points, vouchers = adopted("before")
    assert points > 120
    assert vouchers > 1


@pytest.mark.long
def test_after_a_crash_and_duplicates_award_them_once(
    adopted: Callable[[str], tuple[int, int]], engine: Engine
) -> None:
    assert adopted("after") == (120, 1)
    with engine.connect() as connection:
        query = "SELECT task, key, status FROM idempotency.records ORDER BY task, key"
        assert [tuple(row) for row in connection.execute(text(query))] == [
            ("shop.award_points", "o1", "completed"),
            ("shop.award_points", "o2", "completed"),
            ("shop.issue_voucher", "o1", "completed"),
        ]
