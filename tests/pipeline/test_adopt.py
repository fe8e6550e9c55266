"""examples/adopt: the same small application before and after, under the same crash and the same duplicates."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from kombu import Connection
from sqlalchemy import text

from tests import crashing
from tests.processes import eventually

EXAMPLE = Path(__file__).parents[2] / "examples" / "adopt"
# An order that earns 120 points and a voucher; two more copies of its message; and an order that comes last.
CALLS = """
import shop
shop.Base.metadata.create_all(shop.engine)
with shop.Session.begin() as session:
    session.add_all([shop.Customer(id="ann"), shop.Customer(id="bob")])
shop.place_order("o1", "ann", 12_000)
shop.award_points.delay("o1")
shop.award_points.delay("o1")
"""
# kills the worker when the task has returned and its message is not acknowledged yet
CRASHES = """
from celery.signals import task_postrun
from tests import crashing

@task_postrun.connect(weak=False)
def reach(task, **_):
    crashing.reach(task.name)
"""


@pytest.fixture
def run(environment, processes, tmp_path, servers):
    """Run the shop in one of its two forms, kill its worker once, and leave another one running."""

    def run(form: str) -> None:
        (tmp_path / "crashes.py").write_text(CRASHES)
        environment["PYTHONPATH"] = f"{EXAMPLE / form}:{tmp_path}:{environment['PYTHONPATH']}"
        python(CALLS)
        directory = Path(environment["CRASH_DIRECTORY"])
        crashing.plan(directory, "shop.award_points", crashing.KILL_WORKER)
        options = ("--concurrency", "2", "--include", "crashes")
        killed = processes.start(*options, app="shop")
        if form == "after":
            for command in ("migrate", "relay"):
                processes.command(command)
        eventually((directory / "shop.award_points.reached").exists, what="worker killed")
        killed.process.wait(10)
        processes.worker(*options, app="shop")

    def python(code: str) -> None:
        subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)

    run.python = python
    yield run
    with Connection(servers.broker_url) as connection:
        for queue in ("shop", "orders", "dead_letters"):
            connection.default_channel.queue_delete(queue)
