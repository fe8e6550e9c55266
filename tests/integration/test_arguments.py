"""A body gets a copy of its arguments: changes to it reach neither `on_failed` nor a second run."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from celery import Celery
from sqlalchemy.orm import Session

from idempotency import IdempotentTask, Operation, PermanentError
from tests.support.deliveries import Deliveries
from tests.support.tasks import ROW, make_task


def used_up(items: list[int]) -> list[int]:
    taken = []
    while items:
        taken.append(items.pop(0))
    return taken


@pytest.mark.parametrize("keyword", [False, True])
def test_on_failed_is_told_the_arguments_as_they_were_sent(bank: Celery, deliveries: Deliveries, keyword: bool) -> None:
    told = []

    def body(self: IdempotentTask, items: list[int]) -> None:
        raise PermanentError(str(used_up(items)), "no")

    def on_failed(session: Session, operation: Operation, error: PermanentError) -> None:
        told.append((str(error), operation.arguments["items"]))

    task = make_task(bank, body, on_failed=on_failed)
    deliveries.deliver(task, key="k", items=[1, 2]) if keyword else deliveries.deliver(task, [1, 2], key="k")
    assert told == [("[1, 2]", [1, 2])]


def test_an_eager_call_that_runs_again_gets_its_arguments_as_they_were_given(bank: Celery) -> None:
    seen = []

    def body(self: IdempotentTask, items: list[int]) -> None:
        seen.append(used_up(items))
        if len(seen) < 3:
            raise ValueError

    items = [1, 2]
    make_task(bank, body, max_attempts=3).apply(([1, 2],), {}, idempotency_key="k")
    assert seen == [items] * 3


def test_a_body_that_runs_again_after_a_lost_commit_gets_its_arguments_as_they_were_sent(
    bank: Celery, deliveries: Deliveries, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def body(self: IdempotentTask, items: list[int]) -> None:
        seen.append(used_up(items))
        self.session.execute(ROW)
        if len(seen) == 1:
            driver: Any = self.session.connection().connection.driver_connection

            def lost() -> None:
                driver.pgconn.finish()
                raise psycopg.OperationalError("the connection is lost")

            monkeypatch.setattr(driver, "commit", lost)

    assert deliveries.deliver(make_task(bank, body), [1, 2], key="k").state == "SUCCESS"
    assert seen == [[1, 2]] * 2


@pytest.mark.parametrize("lines", [[1], 1])
def test_what_before_start_gives_the_request_reaches_the_body(bank: Celery, deliveries: Deliveries, lines: Any) -> None:
    seen = []

    class Discounted(IdempotentTask):
        abstract = True

        def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
            self.request.kwargs["discount"] = 10

    def body(self: Any, lines: Any, discount: int = 0) -> None:
        seen.append(discount)

    task = bank.task(base=Discounted, bind=True, name=f"test.{id(body)}", shared=False)(body)
    deliveries.deliver(task, key="k", lines=lines)
    assert seen == [10]
