"""A place that refuses one result for good, and attempts that put no result because they do not commit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import BigInteger, Engine, Text, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from idempotency import IdempotentTask
from idempotency.application import close_runtime, runtime_of
from idempotency.attempt.runtime import OBJECTS_REST
from idempotency.objects.files import Files
from tests.support import operations as op
from tests.support.batches import message, run
from tests.support.deliveries import Deliveries
from tests.support.large_results import large
from tests.support.tasks import make_task

# Half of the rounds begin with the one that is refused.
ROUNDS = 40


class Limited(Files):
    """A place with a size limit of its own, such as a gateway in front of a bucket."""

    def put(self, name: str, data: bytes) -> None:
        if len(data) > 300 * 1024:
            raise OSError("413 entity too large")
        super().put(name, data)


@pytest.fixture
def place(bank: Celery, tmp_path: Path) -> Path:
    close_runtime(bank)
    bank.conf.idempotency_compress_results_above = None
    bank.conf.idempotency_large_results_at = f"file://{tmp_path}"
    return tmp_path


def test_one_result_that_is_refused_does_not_keep_another_of_its_process_for_ever(
    bank: Celery,
    engine: Engine,
    deliveries: Deliveries,
    place: Path,
    entries: Any,
    record: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Both are made again half a minute later, and a refusal lets the place rest: who comes first must not be fixed."""
    bank.conf.idempotency_large_results_at = Limited(str(place))

    def some(self: IdempotentTask, account: str) -> Any:
        return large() if account == "good" else {"document": "x" * 400 * 1024}

    task = make_task(bank, some, key="{account}", max_attempts=2)
    due = {"bad": 0.0, "good": 0.1}
    for _ in range(ROUNDS):
        rests_until = 0.0
        for account, at in sorted(due.items(), key=lambda each: each[1]):
            if at >= rests_until:
                runtime_of(bank)._objects_away_until = 0.0
            deliveries.deliver(task, account)
            if (found := record(account)).status == "completed":
                break
            if account == "bad":
                rests_until = at + OBJECTS_REST
            due[account] = found.available_at.timestamp()
            op.make_due(engine, account)
        else:
            continue
        break
    assert (record("good").status, record("bad").status) == ("completed", "released")
    assert "event=result_not_kept error=OSError" in caplog.text


class Base(DeclarativeBase):
    pass


class Entry(Base):
    __tablename__ = "entries"
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    account: Mapped[str] = mapped_column(Text)
    amount: Mapped[int] = mapped_column(BigInteger)


@pytest.mark.parametrize("options", [{}, {"batch": 10}])
def test_an_attempt_that_waits_for_a_lock_in_vain_leaves_no_large_result(
    bank: Celery, engine: Engine, deliveries: Deliveries, place: Path, record: Any, options: dict[str, Any]
) -> None:
    def some(self: IdempotentTask, account: str) -> Any:
        self.session.execute(text("SET LOCAL lock_timeout = '50ms'"))
        self.session.add(Entry(id=1, account=account, amount=1))  # flushed at the end, as an ORM does
        return large()

    task = make_task(bank, some, key="{account}", **options)
    with engine.connect() as other:
        other.exec_driver_sql("BEGIN")
        other.exec_driver_sql("INSERT INTO entries (id, account, amount) VALUES (1, 'x', 1)")
        if options:
            run(bank, task, message(bank, task, "a"))
        else:
            deliveries.deliver(task, "a")
        other.exec_driver_sql("ROLLBACK")
    assert record("a").status == "released"
    assert list(place.glob("*/*")) == []
