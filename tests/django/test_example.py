"""examples/django: the same project before and after, with real processes."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from kombu import Connection
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url

import services
from tests.support.processes import Processes, eventually

EXAMPLE = Path(__file__).parents[2] / "examples" / "django"
# Ann's order, and three more copies of its message; and an order that is rolled back.
ORDERS = """
from django.db import transaction
from orders.checkout import place_order
from orders.models import Customer
from orders.tasks import award_points
Customer.objects.create(name="ann")
order = place_order("ann", 12_000)
try:
    with transaction.atomic():
        place_order("ann", 50_000)
        raise ValueError
except ValueError:
    pass
"""
Manage = Callable[..., str]


@pytest.fixture
def database(servers: services.Services) -> Iterator[str]:
    """The address of an empty database: the example's own commands fill it."""
    name = f"shop_{uuid4().hex[:8]}"
    yield servers.create_database(name)
    servers.drop_database(name)


@pytest.fixture
def points(database: str) -> Iterator[Callable[[], int | None]]:
    """Ann's points."""
    engine = create_engine(database)

    def read() -> int | None:
        with engine.connect() as connection:
            points: int | None = connection.execute(text("SELECT points FROM orders_customer")).scalar_one_or_none()
            return points

    yield read
    engine.dispose()


@pytest.fixture
def manage(application_database: str, environment: dict[str, str]) -> Manage:
    """Runs `manage.py` of one form of the example, and returns what it has printed."""
    url = make_url(application_database)
    environment |= {"PGHOST": str(url.host), "PGPORT": str(url.port), "PGDATABASE": str(url.database)}
    environment |= {"PGUSER": str(url.username), "PGPASSWORD": str(url.password)}
    for name in ("DATABASE_URL", "REDIS_URL", "BANK_QUEUE"):
        environment.pop(name)  # the shop has no such thing

    def run(form: str, *arguments: str, stdin: str = "") -> str:
        ended = subprocess.run(
            [sys.executable, "-W", "error", "manage.py", *arguments],
            cwd=EXAMPLE / form,
            env=environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=90,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout + ended.stderr

    return run


def test_the_change_is_at_most_ten_lines() -> None:
    changed = []
    for before in sorted((EXAMPLE / "before").rglob("*.py")):
        after = EXAMPLE / "after" / before.relative_to(EXAMPLE / "before")
        lines = difflib.ndiff(before.read_text().splitlines(), after.read_text().splitlines())
        changed += [line for line in lines if line[0] in "+-" and line[2:].strip()]
    new = [line for line in changed if line.startswith("+")]
    deleted = len(changed) - 2 * len(new)
    assert len(new) + max(deleted, 0) <= 10, changed


@pytest.mark.long
def test_before_a_repeated_message_awards_the_points_again(manage: Manage, points: Callable[[], int | None]) -> None:
    manage("before", "migrate", "--verbosity", "0")
    manage("before", "shell", stdin="import shop.celery; shop.celery.app.conf.task_always_eager = True\n" + ORDERS)
    manage("before", "shell", stdin="from orders.tasks import *\naward_points(1)\n")
    assert points() == 240


@pytest.mark.long
def test_after_it_they_are_awarded_once(
    manage: Manage,
    points: Callable[[], int | None],
    processes: Processes,
    environment: dict[str, str],
    servers: services.Services,
) -> None:
    assert "idempotency.0001_schema_0011... OK" in manage("after", "migrate")
    manage("after", "idempotency", "doctor", "--json")
    environment["PYTHONPATH"] = f"{EXAMPLE / 'after'}{os.pathsep}{environment['PYTHONPATH']}"
    command = [sys.executable, "manage.py", "idempotency", "relay"]
    relay = subprocess.Popen(command, cwd=EXAMPLE / "after", env=environment, stderr=subprocess.DEVNULL)
    worker = processes.start("--concurrency", "1", app="shop")
    try:
        worker.wait_until_ready()
        manage("after", "shell", stdin=ORDERS + "for _ in range(3):\n    award_points.delay(order.pk)\n\n")
        eventually(points, timeout=60)
        eventually(lambda: worker.log.count(" succeeded in ") >= 4, timeout=60)
        assert points() == 120
        environment["CELERY_APP"] = "elsewhere"  # as in a shell of another project
        listed = manage("after", "idempotency", "list", "--json")
        command = [sys.executable, "-m", "idempotency.cli", "list", "-A", "shop", "--json"]
        assert subprocess.check_output(command, cwd=EXAMPLE / "after", env=environment, text=True) == listed
        assert listed.count('"orders.award_points"') == 1  # and none for the order that was rolled back
    finally:
        relay.terminate()
        relay.wait(20)
        processes.kill_all()
        with Connection(servers.broker_url) as connection:
            for queue in ("orders", "dead_letters"):
                connection.default_channel.queue_delete(queue)


@pytest.mark.long
@pytest.mark.direct  # Django drops the test database, which the pooler still has connections to
def test_after_it_the_projects_own_tests_run_on_the_test_database(manage: Manage) -> None:
    output = manage("after", "test", "--noinput", "--parallel", "2")
    assert "Ran 5 tests" in output
    assert "OK" in output
