"""Whether there are spans at all, and tracers that fail: no attempt ends otherwise because of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Sampler
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from idempotency.application import close_runtime, runtime_of
from idempotency.errors import SettingsError
from idempotency.settings import Settings
from tests.support import bank as b
from tests.support import batched
from tests.support.deliveries import Deliveries
from tests.support.operations import Record
from tests.support.spans import Spans
from tests.support.tasks import make_task
from tests.traces.test_attempts import run_batch

ROOT = Path(__file__).parents[2]
URL = "postgresql+psycopg://localhost/x"


class Broken(RuntimeError):
    pass


class BrokenProcessor(SpanProcessor):
    def on_start(self, span: Any, parent_context: Any = None) -> None:
        raise Broken("secret")

    def on_end(self, span: Any) -> None:
        raise Broken("secret")


class BrokenAtTheEnd(SpanProcessor):
    def on_end(self, span: Any) -> None:
        raise Broken("secret")


class BrokenSampler(Sampler):
    def should_sample(self, *_: Any, **__: Any) -> Any:
        raise Broken("secret")

    def get_description(self) -> str:
        return "broken"


def provider(processor: SpanProcessor) -> TracerProvider:
    made = TracerProvider()
    made.add_span_processor(processor)
    return made


def raising() -> Any:
    raise Broken("secret")


@pytest.mark.parametrize(
    "set_up",
    [
        lambda: provider(BrokenProcessor()),
        lambda: provider(BrokenAtTheEnd()),
        lambda: TracerProvider(sampler=BrokenSampler()),
        raising,
    ],
    ids=["at the start of a span", "at its end", "the sampler", "the function that sets it up"],
)
def test_a_tracer_that_raises_costs_spans_and_one_line_in_the_log(
    bank: Celery,
    deliveries: Deliveries,
    record: Record,
    caplog: pytest.LogCaptureFixture,
    set_up: Callable[[], Any],
    request: pytest.FixtureRequest,
) -> None:
    traced(bank, set_up, request)
    for key in ("a1", "a2"):
        assert deliveries.deliver(b.deposit, key).state == "SUCCESS"
        assert record(key).status == "completed"
    lines = [each.getMessage() for each in caplog.records if "traces_failed" in each.getMessage()]
    assert lines == ["event=traces_failed error=Broken"]


def test_a_time_limit_that_strikes_in_a_tracer_is_not_swallowed(
    bank: Celery, deliveries: Deliveries, record: Record, request: pytest.FixtureRequest
) -> None:
    """It is raised once for a job: lost, the body would run on without one."""

    class Striking(SpanProcessor):
        def on_start(self, span: Any, parent_context: Any = None) -> None:
            if span.name == "step":
                raise SoftTimeLimitExceeded

    def body(self: Any) -> None:
        self.step("open", b.enter, "x")

    traced(bank, lambda: provider(Striking()), request)
    assert deliveries.deliver(make_task(bank, body), key="k").state == "RETRY"
    assert "SoftTimeLimitExceeded" in record("k").first_error


def test_what_is_not_sampled_writes_nothing_on_the_record(
    bank: Celery, deliveries: Deliveries, record: Record, request: pytest.FixtureRequest
) -> None:
    traced(bank, lambda: TracerProvider(sampler=ALWAYS_OFF), request)
    assert deliveries.deliver(b.deposit, "a1").state == "SUCCESS"
    assert record("a1").trace is None


def test_without_the_column_there_are_spans_without_links(
    bank: Celery,
    deliveries: Deliveries,
    spans: Spans,
    superuser: Engine,
    record: Record,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Code is deployed before the migration, or the other way round."""
    with superuser.connect() as connection:
        connection.execute(text("ALTER TABLE idempotency.records DROP COLUMN trace"))
    for key in ("a1", "a2"):
        assert deliveries.deliver(b.deposit, key).state == "SUCCESS"
    assert len(spans.named("commit")) == 2
    lines = [each.getMessage() for each in caplog.records if "traces_not_linked" in each.getMessage()]
    assert len(lines) == 1


@pytest.mark.long
@pytest.mark.parametrize("links", ["without the column", "not sampled"])
def test_a_batch_ends_whether_its_spans_can_be_noted_or_not(
    bank: Celery, engine: Engine, superuser: Engine, record: Record, request: pytest.FixtureRequest, links: str
) -> None:
    traced(bank, lambda: TracerProvider(sampler=ALWAYS_OFF) if links == "not sampled" else TracerProvider(), request)
    if links == "without the column":
        with superuser.connect() as connection:
            connection.execute(text("ALTER TABLE idempotency.records DROP COLUMN trace"))
    for accounts in (("e1", "e2"), ("e3", "e4")):
        with Session(runtime_of(bank).engine) as session, session.begin():
            for account in accounts:
                batched.post_entry.enqueue(session, account)
        run_batch(bank, batched.post_entry, engine)
        with engine.connect() as connection:
            connection.execute(text("DELETE FROM idempotency.outbox"))
        for account in accounts:
            found = record(account)
            assert (found.status, found.attempts, getattr(found, "trace", None)) == ("completed", 1, None)


def test_by_default_there_are_none_where_no_provider_is_set_up(bank: Celery) -> None:
    assert runtime_of(bank).traces is None


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("traces.begin(None)", "None False"),
        ("traces.begin(False)", "None False"),
        ("import opentelemetry.trace; traces.begin(None)", "None True"),
        ("traces.begin(True)", "Traces True"),
        (
            "from opentelemetry import trace; from opentelemetry.sdk.trace import TracerProvider; "
            "trace.set_tracer_provider(TracerProvider()); traces.begin(None)",
            "Traces True",
        ),
        ("sys.modules['opentelemetry'] = None; traces.begin(None)", "None False"),
    ],
)
def test_when_there_are_spans_and_what_that_imports(code: str, expected: str) -> None:
    *before, last = code.split("; ")
    lines = ["import sys", "from idempotency.observe import traces", *before, f"found = {last}"]
    lines.append("print(type(found).__name__.replace('NoneType', 'None'), 'opentelemetry.trace' in sys.modules)")
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == expected, done.stderr


@pytest.mark.long
def test_traces_that_are_wanted_need_the_extra() -> None:
    code = """
import sys
sys.modules["opentelemetry"] = None
from idempotency.errors import MissingExtra
from idempotency.observe import traces
try:
    traces.begin(True)
except MissingExtra as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert "[otel]" in done.stdout, done.stderr


def named() -> None: ...


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (None, None),
        (True, True),
        ("false", False),
        ("True", True),
        (named, named),
        ("tests.traces.test_tracers:named", named),
    ],
)
def test_the_setting_is_a_switch_or_a_function_or_its_name(given: Any, read: Any) -> None:
    found = Settings.read({"database_url": URL, "traces": given}).traces
    assert found == read or getattr(found, "__name__", None) == "named"


@pytest.mark.parametrize("given", [3, "os:sep", "no.such:function"])
def test_anything_else_is_refused(given: Any) -> None:
    with pytest.raises(SettingsError, match="idempotency_traces"):
        Settings.read({"database_url": URL, "traces": given})


def traced(bank: Celery, set_up: Callable[[], Any], request: pytest.FixtureRequest) -> None:
    bank.conf.idempotency_traces = set_up
    close_runtime(bank)

    def undo() -> None:
        close_runtime(bank)
        bank.conf.idempotency_traces = None

    request.addfinalizer(undo)
