"""Each look at what is there has a row of its own in the audit."""

from __future__ import annotations

import pytest
from celery import Celery
from sqlalchemy import Connection, text

from tests.support.deliveries import Deliveries
from tests.support.tasks import make_task
from tests.web.conftest import Open
from tests.web.test_changes import audited


@pytest.mark.long
def test_a_reveal_sent_again_is_another_look(
    browser: Open,
    bank: Celery,
    deliveries: Deliveries,
    connection: Connection,
) -> None:
    def body(self: object, n: int) -> dict[str, str]:
        if n == 1 and not done:
            raise OSError("later")
        return {"iban": "DE89-the-customers"}

    done: list[int] = []
    task = make_task(bank, body)
    deliveries.deliver(task, n=1, key="k")
    named = {"tenant": "default", "task": task.name, "key": "k", "reason": "is it stuck?", "request_id": "mine"}
    otto = browser("otto")
    first = otto.post("/operation/reveal", named)
    assert (first.status_code, "DE89-the-customers" in first.text) == (200, False)
    assert len(audited(connection, "reveal")) == 1

    done.append(1)
    connection.execute(text("UPDATE idempotency.records SET available_at = clock_timestamp() - interval '1 second'"))
    deliveries.deliver(task, n=1, key="k")
    again = otto.post("/operation/reveal", named)
    assert (again.status_code, "DE89-the-customers" in again.text) == (200, True)
    assert len(audited(connection, "reveal")) == 2
