"""celery-redbeat: a real beat process reads its schedule from Redis and sends idempotent tasks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from celery import Celery
from celery.schedules import schedule

from tests.ecosystem import application
from tests.support import bank as app_module
from tests.support.operations import Entries, Record
from tests.support.processes import Worker, eventually

redbeat = pytest.importorskip("redbeat")
pytestmark = pytest.mark.ecosystem


@pytest.fixture
def entry(bank: Celery, redis_url: str) -> None:
    """Every second, the same deposit."""
    application.configure(bank, redis_url)
    redbeat.RedBeatSchedulerEntry("tick", app_module.deposit.name, schedule(1.0), args=["a"], app=bank).save()


@pytest.fixture
def beat(entry: None, environment: dict[str, str]) -> Iterator[None]:
    command = [sys.executable, "-m", "celery", "-A", "tests.ecosystem.application", "beat"]
    command += ["--scheduler", "redbeat.RedBeatScheduler", "--max-interval", "1", "--pidfile", ""]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    yield
    process.terminate()
    process.wait(20)


@pytest.mark.usefixtures("beat")
def test_redbeat_sends_each_tick_under_the_key_of_its_arguments(
    bank: Celery, worker: Worker, entries: Entries, record: Record
) -> None:
    eventually(lambda: worker.log.count("succeeded in") >= 3, what="three ticks")
    assert (record("a").status, entries("a")) == ("completed", 1)
