"""Proofs of a breaker: what people and sweeps do to sagas. Each asserts the good outcome."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import kombu
from sqlalchemy import text

from idempotency.application import runtime_of
from idempotency.letters import storing
from idempotency.operate import saga as operate
from idempotency.sagas import saga
from idempotency.store import saga_reading
from idempotency.wire.message import Message
from tests.sagas.conftest import Stage
from tests.sagas.test_people import id_of
from tests.support.operators import ANN

_TAKE = text("""
UPDATE idempotency.outbox SET status = 'published', published_at = clock_timestamp()
WHERE id = (SELECT min(id) FROM idempotency.outbox WHERE status = 'pending' AND task = :task) RETURNING *
""")


def dies(stage: Stage, task: str) -> None:
    """No worker took the message of a task for longer than the grace: it is in the dead-letter queue."""
    with stage.engine.connect() as connection:
        row = connection.execute(_TAKE, {"task": task}).one()
    message = Message.from_text(row.message).marked(origin=row.origin, outbox_id=row.message_id)
    death = [{"queue": stage.app.conf.task_default_queue, "reason": "rejected"}]
    storing.store(
        stage.app,
        kombu.Message(
            body=message.body,
            headers={**message.headers, "x-death": death},
            content_type="application/json",
            content_encoding="utf-8",
            properties={},
            delivery_info={"exchange": "", "routing_key": ""},
            accept={"application/json"},
        ),
    )


def test_the_list_does_not_name_what_is_no_longer_waited_for(stage: Stage) -> None:
    @saga("waiting", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def waiting(saga: Any, id: str) -> Any:
        saga.wait_for("picked", match=id, timeout=timedelta(days=5))

    handle = stage.enqueue(waiting, "r1")
    stage.run()
    operate.cancel_saga(stage.app, id_of(waiting), ANN)
    stage.run()
    assert handle.status() == "failed"
    with runtime_of(stage.app).autocommit() as connection:
        listed = saga_reading.list_sagas(connection, saga_reading.Filter("bank", waits_for="picked"), limit=10)
    assert [row.status for row in listed] == []
