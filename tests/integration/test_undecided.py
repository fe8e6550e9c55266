"""A provider that accepts a call and decides later: the operation waits, and is woken."""

from __future__ import annotations

import math
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from idempotency import DidNotHappen, Handle, Happened, InvalidArguments, OperationId, StoredRefusal, Undecided
from idempotency.application import runtime_of, settings_of
from tests.support.deliveries import Deliveries
from tests.support.documents import blocks
from tests.support.operations import Record, make_due
from tests.support.tasks import make_task


class Provider:
    """Accepts what it is asked, and answers `decision` when it is asked about it."""

    def __init__(self) -> None:
        self.calls, self.questions, self.seconds = 0, 0, 3600.0
        self.decision: Any = None
        self.meanwhile: Any = lambda: None

    def charge(self, *, idempotency_key: str) -> str:
        self.calls += 1
        self.meanwhile()
        raise Undecided(self.seconds, "processing")

    def find(self, *, doubt: Any) -> Any:
        self.questions += 1
        if self.decision is None:
            raise Undecided(self.seconds, "processing")
        return self.decision


@pytest.fixture
def provider() -> Provider:
    return Provider()


@pytest.fixture
def task(bank: Celery, provider: Provider) -> Any:
    def body(self: Any) -> dict[str, Any]:
        may_have = self.may_have_happened("charge")
        return {"charge": self.effect("charge", provider.charge, reconcile=provider.find), "may_have": may_have}

    return make_task(bank, body)


def due_in(engine: Engine) -> float:
    with engine.connect() as connection:
        seconds = "SELECT extract(epoch FROM available_at - clock_timestamp()) FROM idempotency.records WHERE key = 'k'"
        return float(connection.execute(text(seconds)).scalar_one())


def sent_in(engine: Engine) -> float:
    with engine.connect() as connection:
        seconds = """SELECT extract(epoch FROM available_at - clock_timestamp()) FROM idempotency.outbox
            WHERE key = 'k' AND status = 'pending'"""
        return float(connection.execute(text(seconds)).scalar_one())


def wake(bank: Celery, task: Any, *, tenant: str = "default", commit: bool = True) -> None:
    with Session(runtime_of(bank).engine) as session:
        Handle(bank, OperationId(tenant, task.name, "k")).wake(session)
        if commit:
            session.commit()


def test_what_a_webhook_alone_decides_waits_for_that(
    bank: Celery, deliveries: Deliveries, record: Record, engine: Engine, provider: Provider, task: Any
) -> None:
    provider.seconds = math.inf
    for _ in range(settings_of(bank).max_attempts + 2):
        deliveries.deliver(task, key="k")
        assert due_in(engine) > 9 * 365 * 86400
        make_due(engine, "k")
    assert (record("k").status, record("k").attempts, provider.calls) == ("released", 0, 1)
    provider.decision = Happened("ch_1")
    wake(bank, task)
    assert deliveries.deliver(task, key="k").state == "SUCCESS"


def test_it_is_called_once_and_asked_for_as_long_as_the_provider_takes(
    bank: Celery, deliveries: Deliveries, record: Record, engine: Engine, provider: Provider, task: Any
) -> None:
    assert deliveries.deliver(task, key="k").state == "RETRY"
    beyond = settings_of(bank).defer_budget + 1
    for _ in range(settings_of(bank).max_attempts + 2):
        with engine.connect() as connection:
            older = "UPDATE idempotency.records SET opened_at = opened_at - make_interval(secs => :s) WHERE key = 'k'"
            connection.execute(text(older), {"s": beyond})
        make_due(engine, "k")
        assert deliveries.deliver(task, key="k").state == "RETRY"
        assert (record("k").status, record("k").attempts) == ("released", 0)
        assert 3500 < due_in(engine) <= 3600
    provider.decision = Happened("ch_1")
    make_due(engine, "k")
    assert deliveries.deliver(task, key="k").state == "SUCCESS"
    assert provider.calls == 1
    assert record("k").result == '{"charge": "ch_1", "may_have": true}'


def test_what_the_provider_refuses_later_ends_the_operation_and_is_not_called_again(
    deliveries: Deliveries, record: Record, engine: Engine, provider: Provider, task: Any
) -> None:
    deliveries.deliver(task, key="k")
    provider.decision = DidNotHappen(StoredRefusal("the bank has refused it", "debit_refused"))
    make_due(engine, "k")
    assert deliveries.deliver(task, key="k").state == "FAILURE"
    assert (record("k").status, record("k").error_code) == ("failed", "debit_refused")
    assert provider.calls == 1


def test_what_a_refused_repeat_leads_to_is_what_was_found(
    bank: Celery, deliveries: Deliveries, record: Record, engine: Engine
) -> None:
    calls: list[str] = []

    def charge(*, idempotency_key: str) -> str:
        calls.append(idempotency_key)
        if len(calls) == 1:
            raise ConnectionError("no answer")
        raise StoredRefusal("declined", "declined")

    def find(*, doubt: Any) -> Any:
        return DidNotHappen(StoredRefusal("its account is closed", "account_closed"))

    closed = make_task(bank, lambda self: self.effect("charge", charge, reconcile=find))
    deliveries.deliver(closed, key="k")
    make_due(engine, "k")
    assert deliveries.deliver(closed, key="k").state == "FAILURE"
    assert (record("k").error_code, len(calls)) == ("account_closed", 1)


def test_a_wake_makes_it_due_with_its_message_and_counts_only_with_its_commit(
    bank: Celery, deliveries: Deliveries, record: Record, engine: Engine, task: Any
) -> None:
    deliveries.deliver(task, key="k")
    wake(bank, task, commit=False)
    wake(bank, task, tenant="other")
    assert due_in(engine) > 3500
    assert sent_in(engine) > 3500
    wake(bank, task)
    assert due_in(engine) <= 0
    assert sent_in(engine) <= 0


def test_a_wake_while_it_asks_lets_it_ask_once_more(
    bank: Celery, deliveries: Deliveries, engine: Engine, provider: Provider, task: Any
) -> None:
    provider.meanwhile = lambda: wake(bank, task)
    deliveries.deliver(task, key="k")
    assert due_in(engine) <= 0
    deliveries.deliver(task, key="k")
    assert due_in(engine) > 3500
    assert (provider.calls, provider.questions) == (1, 1)


def test_what_has_ended_or_has_not_begun_is_not_woken(
    bank: Celery, deliveries: Deliveries, record: Record, engine: Engine, provider: Provider, task: Any
) -> None:
    wake(bank, task)
    deliveries.deliver(task, key="k")
    provider.decision = Happened("ch_1")
    make_due(engine, "k")
    deliveries.deliver(task, key="k")
    before = record("k")
    wake(bank, task)
    assert record("k") == before
    with pytest.raises(InvalidArguments, match="session"):
        Handle(bank, OperationId("default", task.name, "k")).wake("not a session")  # type: ignore[arg-type]


def test_after_a_restore_what_only_a_webhook_decides_is_asked_about(
    bank: Celery, engine: Engine, deliveries: Deliveries, provider: Provider, task: Any
) -> None:
    """The backup is of before the webhook, which was answered with 200 and does not come again."""
    provider.seconds = math.inf
    assert deliveries.deliver(task, key="k").state == "RETRY"
    assert min(due_in(engine), sent_in(engine)) > 365 * 86400
    for statement in blocks("docs/restore.md", "sql"):
        with engine.begin() as owner:
            owner.exec_driver_sql(statement)
    assert max(due_in(engine), sent_in(engine)) <= 0
    provider.decision = Happened("ch_1")
    assert deliveries.deliver(task, key="k", origin="retry").state == "SUCCESS"
    assert (provider.calls, provider.questions) == (1, 1)
