"""The bank with traces: in this process, with a provider of the test's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery import Celery
from sqlalchemy import Engine

from idempotency.application import close_runtime
from tests.sagas.conftest import Stage
from tests.support.deliveries import Deliveries
from tests.support.spans import Spans


@pytest.fixture
def spans(bank: Celery) -> Iterator[Spans]:
    """Nothing global is set: other tests of this process are not traced."""
    spans = Spans()
    bank.conf.idempotency_traces = spans.set_up
    close_runtime(bank)
    yield spans
    close_runtime(bank)
    bank.conf.idempotency_traces = None


@pytest.fixture
def stage(bank: Celery, engine: Engine, deliveries: Deliveries, spans: Spans) -> Stage:
    """Messages as the outbox has them, delivered here one by one."""
    return Stage(bank, engine, deliveries)
