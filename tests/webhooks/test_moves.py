"""In partitions: a delivery whose record moves at this moment is made now, as its audit row says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import Celery
from sqlalchemy import Engine, text

from idempotency.operate import webhooks as operate
from idempotency.testing import Outbox
from tests.partitions.conftest import template as template
from tests.support import operations as op
from tests.support.operators import ANN
from tests.support.partitions import while_it_moves
from tests.support.receiver import Receiver, answering


def test_a_redelivery_is_made(
    shop: Celery,
    waiting: Callable[..., Any],
    outbox: Outbox,
    receiver: Receiver,
    rows: Callable[[str], Any],
    engine: Engine,
) -> None:
    _, id = waiting()
    receiver.answer = answering(503)
    row = outbox._next()
    assert row is not None
    outbox._deliver(row)
    with engine.connect() as connection:
        later = "UPDATE idempotency.records SET available_at = clock_timestamp() + interval '20 hours' WHERE key = :key"
        assert connection.execute(text(later), {"key": id.key}).rowcount == 1
        (delivery,) = rows("deliveries")
        assert while_it_moves(engine, connection, id, lambda: operate.redeliver(shop, ANN, delivery.id)) == 0
        assert op.seconds_from_now(connection, id, "available_at") <= 0
