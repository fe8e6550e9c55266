"""The pytest plug-in of one side's run: our base if it is our side, a time limit for each test, and the outcomes as JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.celery_suite import tasks
from tests.celery_suite.configuration import configuration

# Seconds.
TIME_LIMIT = 180
# Starts twenty workers of its own: ended at its limit, it would leave the process in a state that fails the others.
LAST = "test_fixture_teardown_releases_backend_connections"


def pytest_configure(config: pytest.Config) -> None:
    if os.environ["CELERY_SUITE_SIDE"] == "ours":
        tasks.install(configuration())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.name == LAST)  # stable
    for item in items:
        item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "timeout"]
        item.add_marker(pytest.mark.timeout(TIME_LIMIT), append=False)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """One line for each phase that decides something: the call, and whatever fails or is skipped around it."""
    if report.when != "call" and report.outcome == "passed":
        return
    seen = {
        "test": report.nodeid,
        "outcome": "xfailed" if hasattr(report, "wasxfail") and report.skipped else report.outcome,
        "when": report.when,
        "seconds": round(report.duration, 2),
        "error": _last_line(report),
    }
    with Path(os.environ["CELERY_SUITE_OUTCOMES"]).open("a") as file:
        file.write(json.dumps(seen) + "\n")


def _last_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return str(crash.message).partition("\n")[0]
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    return "" if report.longrepr is None else str(report.longrepr).strip().rpartition("\n")[2]
