"""The pytest plug-in of one side's run: our base if it is our side, a time limit for each test, and the outcomes as JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

from tests.celery_suite import tasks
from tests.celery_suite.configuration import configuration

# Seconds: for a test with what is around it, and for what is around one that is given another time.
TIME_LIMIT, SETTING_UP = 180, 30
# Starts twenty workers of its own: ended at its limit, it would leave the process in a state that fails the others.
LAST = "test_fixture_teardown_releases_backend_connections"


def pytest_configure(config: pytest.Config) -> None:
    if os.environ["CELERY_SUITE_SIDE"] == "ours":
        tasks.install(configuration())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.name == LAST)  # stable
    patience = float(os.environ.get("CELERY_SUITE_PATIENCE", 0))
    limit = TIME_LIMIT if not patience else patience + SETTING_UP
    for module in {item.module for item in items if patience and isinstance(item, pytest.Function)}:
        _have_patience(module, patience)
    for item in items:
        item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "timeout"]
        item.add_marker(pytest.mark.timeout(limit), append=False)


def _have_patience(module: ModuleType, seconds: float) -> None:
    """Make the module's tests and helpers wait so long where they say TIMEOUT; a time that one names itself stays."""
    usual = getattr(module, "TIMEOUT", None)
    if usual is None:
        return
    module.TIMEOUT = seconds  # type: ignore[attr-defined]
    for function in vars(module).values():
        if isinstance(function, FunctionType) and "timeout" in function.__code__.co_varnames:
            function.__defaults__ = tuple(seconds if value == usual else value for value in function.__defaults__ or ())


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
