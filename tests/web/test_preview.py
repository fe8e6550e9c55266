"""What a letter's page says of a replay, beside what a replay does."""

from __future__ import annotations

import re
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, text

from idempotency import IdempotentTask, PermanentError, streams
from idempotency.sagas import saga
from tests.sagas.conftest import Stage
from tests.support.deliveries import Deliveries
from tests.support.tasks import make_task
from tests.web.conftest import Open, tick
from tests.web.test_changes import letters, shown

BEGUN = """jsonb_build_object('charge', jsonb_build_object(
    'kind', 'effect', 'state', 'begun', 'key', 'pk', 'number', 0, 'position', 0, 'begun_at', 1700000000))"""


def preview(page: Any) -> str:
    """What a page says below its heading."""
    said = re.sub(r"\s+", " ", shown(page))
    return said[said.index("What a replay would do") :]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("generation = 2", "its operation is failed in generation 2"),
        (f"status = 'completed', error = NULL, error_code = NULL, result = '1', effects = {BEGUN}", "its operation is completed in generation 1"),
    ],
)  # fmt: skip
def test_what_would_be_refused_is_not_said_to_run_or_to_call(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection, change: str, why: str
) -> None:
    def body(self: Any) -> None:
        raise PermanentError("no", "gone")

    deliveries.deliver(make_task(bank, body), key="k")
    (letter,) = letters(connection)
    otto = browser("otto")
    confirmed = tick(otto.get(f"/letters/{letter.id}"))
    connection.execute(text(f"UPDATE idempotency.records SET {change} WHERE key = 'k'"))
    said = preview(otto.get(f"/letters/{letter.id}"))
    assert f"It is not replayed: {why}" in said
    assert ("runs again" in said, "called" in said) == (False, False)
    sent = otto.post(f"/letters/{letter.id}/replay", {"reason": "x", "confirmed": confirmed})
    assert sent.status_code == 409


def test_the_replay_of_a_stopped_saga_names_the_undos_that_run_and_their_calls(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection, engine: Engine
) -> None:
    stage = Stage(bank, engine, deliveries)
    refunded: list[str] = []
    is_closed = [True]

    def give_back(self: Any, id: str, result: Any = None) -> None:
        def call(*, idempotency_key: str) -> str:
            refunded.append(idempotency_key)
            return "re_1"

        self.effect("fee", lambda *, idempotency_key: "fee_1")
        if is_closed:
            raise PermanentError("the provider is closed", "closed")
        self.effect("refund", call)

    refunds = bank.task(name="web.refund", base=IdempotentTask, bind=True, key="{id}", shared=False, max_attempts=1)(
        give_back
    )

    @saga("web.order", key="{id}", entity="id", app=bank)
    def order(saga: Any, id: str) -> None:
        saga.step("charge", lambda session, id: id, id, undo=refunds)
        raise PermanentError("sold out", "sold_out")

    stage.enqueue(order, "o1")
    stage.run()
    letter = next(row for row in letters(connection) if row.task == "web.order")
    undo = next(row for row in letters(connection) if row.task == "web.refund")
    otto = browser("otto")
    page = otto.get(f"/letters/{letter.id}")
    assert f"run first, and may call outside what is not recorded below: web.refund (dead letter {undo.id})" in preview(
        page
    )
    assert "web.refund: fee" in preview(page)
    is_closed.clear()
    found = re.search(r'name="confirmed" value="([^"]+)"', page.text)
    confirmed = {} if found is None else {"confirmed": found[1]}
    sent = otto.post(f"/letters/{letter.id}/replay", {"reason": "open again"} | confirmed)
    assert sent.status_code == 303
    stage.run()
    assert len(refunded) == 1


@pytest.mark.few(1)
@pytest.mark.parametrize("is_known", [True, False])
def test_a_message_that_cannot_be_read_is_not_said_to_run_and_has_no_button(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection, is_known: bool
) -> None:
    """Also that of a letter whose operation is not known, as of an `undecodable` one."""

    def body(self: Any) -> None:
        raise PermanentError("no", "gone")

    deliveries.deliver(make_task(bank, body), key="k")
    (letter,) = letters(connection)
    connection.execute(text("UPDATE idempotency.dead_letters SET payload = 'no message'"))
    connection.execute(text("UPDATE idempotency.records SET message = ''"))
    if not is_known:
        connection.execute(
            text("UPDATE idempotency.dead_letters SET tenant = NULL, task = NULL, key = NULL, fingerprint = NULL")
        )
    otto = browser("otto")
    page = otto.get(f"/letters/{letter.id}")
    assert "It is not replayed: what is stored is not a message" in preview(page)
    assert f'action="/letters/{letter.id}/replay"' not in page.text
    assert otto.post(f"/letters/{letter.id}/replay", {"reason": "x"}).status_code == 409


@pytest.mark.long
def test_the_letter_of_a_stream_is_said_to_be_run_by_its_processes(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    def body(self: Any) -> None:
        raise PermanentError("no", "gone")

    deliveries.deliver(make_task(bank, body), key="k")
    (letter,) = letters(connection)
    for table in ("dead_letters", "records"):
        connection.execute(text(f"UPDATE idempotency.{table} SET task = 'stream.orders'"))
    connection.execute(text("UPDATE idempotency.dead_letters SET payload = ''"))
    otto = browser("otto")
    assert "The application has no task 'stream.orders' now" in preview(otto.get(f"/letters/{letter.id}"))
    streams.stream("orders", source=streams.kafka("t"))(lambda stream, event: None)
    assert "A process of its stream runs it" in preview(otto.get(f"/letters/{letter.id}"))
