"""What a type checker knows of a Django project's tasks: they are enqueued without a session."""

from __future__ import annotations

from typing import assert_type

from idempotency import Handle
from idempotency.contrib.django import IdempotentTask, idempotent_task


@idempotent_task(name="orders.capture", key="{order_id}")
def capture(self: IdempotentTask, order_id: int, cents: int = 1) -> dict[str, str]:
    return {"order": str(order_id)}


class ShopTask(IdempotentTask):
    warehouse = "north"


@idempotent_task(base=ShopTask, key="{order_id}")
def ship(self: ShopTask, order_id: int) -> str:
    return self.warehouse


def call() -> None:
    assert_type(capture.enqueue(17, cents=5), Handle[dict[str, str]])
    assert_type(capture.enqueue(order_id=17).result(5), dict[str, str])
    assert_type(capture(17), dict[str, str])
    assert_type(ship.enqueue(17).result(5), str)
    ship.delay_on_commit(17)
