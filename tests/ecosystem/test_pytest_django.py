"""pytest-django runs the tests of examples/django, and others with its own fixtures."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

pytestmark = pytest.mark.ecosystem
EXAMPLE = Path(__file__).parents[2] / "examples" / "django" / "after"
TESTS = """
import pytest
from django.db import transaction
from orders.checkout import place_order
from orders.models import Customer
from orders.tasks import award_points


@pytest.mark.parametrize("name", ["ann", "ben"])
def test_a_task_runs_in_the_tests_transaction(db, name):
    Customer.objects.create(name=name)
    order = place_order(name, 12_000)
    assert award_points(order.pk) == award_points(order.pk)
    assert [each.points for each in Customer.objects.all()] == [120]


@pytest.mark.parametrize("name", ["ann", "ben"])
def test_a_task_commits(transactional_db, name):
    Customer.objects.create(name=name)
    with transaction.atomic():
        handle = award_points.enqueue(place_order(name, 12_000).pk)
    assert handle.status() == "accepted"


def test_what_the_block_sends_is_there_after_it(db, django_capture_on_commit_callbacks):
    Customer.objects.create(name="ann")
    with django_capture_on_commit_callbacks(execute=True), transaction.atomic():
        order = place_order("ann", 12_000)
        transaction.on_commit(lambda: award_points(order.pk))
    assert Customer.objects.get().points == 120
"""


@pytest.mark.parametrize("options", [["--numprocesses=0"], ["--numprocesses=2"], ["--nomigrations"]])
def test_the_examples_tests_pass(
    options: list[str], tmp_path: Path, database: str, environment: dict[str, str]
) -> None:
    project = tmp_path / "shop"
    shutil.copytree(EXAMPLE, project)
    (project / "test_with_fixtures.py").write_text(TESTS)
    (project / "pytest.ini").write_text("[pytest]\nDJANGO_SETTINGS_MODULE = shop.settings\n")
    url = make_url(database)
    environment |= {"PGHOST": str(url.host), "PGPORT": str(url.port), "PGDATABASE": str(url.database)}
    environment |= {"PGUSER": str(url.username), "PGPASSWORD": str(url.password), "PYTHONPATH": str(EXAMPLE.parents[2])}
    files = ("orders/tests.py", "test_with_fixtures.py")
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *files],
        cwd=project,
        env={name: value for name, value in environment.items() if not name.startswith("PYTEST_")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "10 passed" in ended.stdout
