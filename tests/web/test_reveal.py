"""What is revealed, and what a person may say or find in it."""

from __future__ import annotations

import pytest
from celery import Celery
from sqlalchemy import Connection, text

from tests.support import bank as b
from tests.support.deliveries import Deliveries
from tests.support.tasks import make_task
from tests.web.conftest import Open
from tests.web.test_changes import audited, letters


def test_a_reveal_that_is_sent_again_is_another_look(
    browser: Open, deliveries: Deliveries, connection: Connection
) -> None:
    """A reload, say: it shows what is there by now."""
    deliveries.deliver(b.failing, "a1", "permanent")
    (letter,) = letters(connection)
    otto = browser("otto")
    named = {"tenant": letter.tenant, "task": letter.task, "key": letter.key}
    for path, fields in ((f"/letters/{letter.id}/reveal", {}), ("/operation/reveal", named)):
        form = fields | {"reason": "ticket 7", "request_id": path}
        assert [otto.post(path, form).status_code for _ in range(2)] == [200, 200]
    assert len(audited(connection, "reveal")) == 4


@pytest.mark.long
def test_a_reason_that_postgres_cannot_store_is_refused(
    browser: Open, deliveries: Deliveries, connection: Connection
) -> None:
    deliveries.deliver(b.failing, "a1", "permanent")
    (letter,) = letters(connection)
    otto = browser("otto")
    for path in ("reveal", "discard", "replay"):
        answer = otto.post(f"/letters/{letter.id}/{path}", {"reason": "a\0b"})
        assert (answer.status_code, "without NUL" in answer.text) == (409, True)


@pytest.mark.long
def test_half_a_pair_of_surrogates_is_shown_as_such(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    task = make_task(bank, lambda self, n: {"name": "Zo\ud83d"})
    deliveries.deliver(task, n=1, key="k")
    named = {"tenant": "default", "task": task.name, "key": "k", "reason": "x"}
    answer = browser("otto").post("/operation/reveal", named)
    assert (answer.status_code, "Zo\\ud83d" in answer.text) == (200, True)


@pytest.mark.long
def test_what_only_has_a_letter_is_revealed_and_not_offered_to_be_cancelled(
    browser: Open, deliveries: Deliveries, connection: Connection
) -> None:
    deliveries.deliver(b.failing, "a1", "permanent")
    (letter,) = letters(connection)
    connection.execute(text("DELETE FROM idempotency.records"))
    otto = browser("otto")
    named = {"tenant": letter.tenant, "task": letter.task, "key": letter.key}
    page = otto.get("/operation", params=named).text
    assert ("/operation/reveal" in page, "/operation/cancel" in page) == (True, False)
    assert otto.post("/operation/reveal", named | {"reason": "x"}).status_code == 200


@pytest.mark.long
def test_a_reason_does_not_read_backwards_to_the_one_who_approves(
    browser: Open, deliveries: Deliveries, connection: Connection
) -> None:
    deliveries.deliver(b.failing, "a1", "permanent")
    (letter,) = letters(connection)
    asked = browser("otto").post(f"/letters/{letter.id}/discard", {"reason": "ok \u202egnp.tcepsus\u2066"})
    assert asked.status_code == 303
    for path in ("/approvals", f"/letters/{letter.id}"):
        page = browser("anna").get(path).text
        assert ("\u202e" in page, "gnp.tcepsus" in page) == (False, True)
