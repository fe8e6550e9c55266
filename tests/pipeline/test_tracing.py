"""Real tracing tools: one trace from the caller through the outbox to every attempt, and headers that none of them hides."""

from __future__ import annotations

import subprocess
import sys
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from sqlalchemy import Engine, text

from idempotency.wire.message import Message
from tests.pipeline.test_revoke import revoke
from tests.support.operations import Record
from tests.support.processes import Processes, eventually


def call(environment: dict[str, str], *arguments: str) -> str:
    """Call the traced task both ways in a process of its own; returns the trace of the caller."""
    command = [sys.executable, "-W", "error", "-m", "tests.support.traced", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.long
@pytest.mark.parametrize("tool", ["sentry", "opentelemetry"])
def test_one_trace_goes_from_the_caller_to_every_attempt(
    tool: str,
    bank: Celery,
    processes: Processes,
    environment: dict[str, str],
    relay: Any,
    engine: Engine,
    record: Record,
) -> None:
    processes.worker(app="tests.support.traced", TRACER=tool)
    trace = call(environment | {"TRACER": tool}, "a", "1")
    assert len(trace) == 32
    for key in ("a", "sent-a"):
        eventually(lambda key=key: record(key) and record(key).status == "completed")
        # the caller's own header has come through the retry, too
        assert (record(key).attempts, record(key).result) == (2, '"r-1"')
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT account, count(*) FROM entries GROUP BY account ORDER BY account")).all()
    assert [tuple(row) for row in rows] == [(f"a {trace}", 2), (f"sent-a {trace}", 2)]


@pytest.mark.long
def test_a_message_whose_headers_sentry_has_nested_is_revoked(
    bank: Celery, processes: Processes, environment: dict[str, str], engine: Engine, record: Record
) -> None:
    processes.worker(app="tests.support.traced", TRACER="sentry")
    id = str(uuid4())
    revoke(bank, id)
    call(environment | {"TRACER": "sentry"}, "a", "0", id)
    row = eventually(lambda: (row := record("sent-a")) and row.status != "started" and row)
    assert (row.status, row.error_code) == ("failed", "revoked")
    sent = Message.from_text(row.message).headers
    assert sent["sentry-trace"] == sent["headers"]["sentry-trace"]
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM entries")).scalar_one() == 0
