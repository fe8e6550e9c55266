"""An application that a type checker accepts: what it knows of a task, its calls and its results."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, assert_type

from celery import Celery
from celery.result import AsyncResult
from sqlalchemy import Connection
from sqlalchemy.orm import Session

from idempotency import Handle, Happened, IdempotentTask, Operation, PermanentError, StoredOperation, idempotent_task

app = Celery("shop")


class Charge(dict[str, str]):
    pass


def reserve(session: Session, payment_id: str, amount: int) -> int:
    return amount


def release(session: Session, result: int) -> None: ...


def charge(request: Mapping[str, str], *, currency: str = "eur", idempotency_key: str) -> Charge:
    return Charge()


def find_charge(request: Mapping[str, str], *, currency: str = "eur", doubt: Any) -> Happened:
    return Happened(Charge())


def mark_failed(session: Session, operation: Operation, error: PermanentError) -> None: ...


@idempotent_task(app, name="shop.capture", key="{payment_id}", on_failed=mark_failed, time_limit=60)
def capture(self: IdempotentTask, payment_id: str, amount: int = 1) -> dict[str, str]:
    assert_type(self.step("reserve", reserve, payment_id, amount=amount), int)
    assert_type(self.step("again", reserve, payment_id, amount, undo=release), int)
    assert_type(self.step("count", lambda session: len(session.new)), int)
    charged = self.effect("charge", charge, {"payment": payment_id}, reconcile=find_charge)
    assert_type(charged, Charge)
    assert_type(self.effect("charge in pounds", charge, {"payment": payment_id}, currency="gbp"), Charge)
    self.session.rollback()
    ship.enqueue(self.session, payment_id)
    return charged


class ShopTask(IdempotentTask):
    warehouse = "north"


@idempotent_task(app, base=ShopTask, name="shop.ship", key="{payment_id}")
def ship(self: ShopTask, payment_id: str) -> str:
    return self.warehouse


@idempotent_task(key="{payment_id}")
def shared(self: IdempotentTask, payment_id: str) -> int:
    return 1


@app.task(base=IdempotentTask, bind=True, key="{payment_id}")
def untyped(self: IdempotentTask, payment_id: str) -> None: ...


def call(session: Session, connection: Connection) -> None:
    handle = capture.enqueue(session, payment_id="p1", amount=5)
    assert_type(handle, Handle[dict[str, str]])
    assert_type(handle.result(timeout=5), dict[str, str])
    assert_type(handle.wait(5), StoredOperation[dict[str, str]])
    assert_type(handle.wait(5).result, dict[str, str] | None)
    assert_type(handle.lookup(), StoredOperation[dict[str, str]] | None)

    assert_type(capture.using(countdown=60, queue="slow").enqueue(connection, "p1"), Handle[dict[str, str]])
    assert_type(capture("p1", amount=5), dict[str, str])
    assert_type(ship.enqueue(session, "p1").result(5), str)
    assert_type(shared.enqueue(session, "p1").result(5), int)
    capture.apply_async(("p1",), {"amount": 5}, countdown=60, idempotency_key="p1")
    capture.using(eta=datetime.now(UTC), idempotency_key="p1").delay("p1", amount=5)

    # Celery's decorator has no types: these accept anything
    untyped.enqueue(session, "p1", countdown=60)
    untyped.delay(payment_id="p1")


def results() -> None:
    # with celery-types; Celery itself says nothing about its results
    sent: AsyncResult[dict[str, str]] = capture.delay("p1", amount=5)
    assert_type(sent.get(timeout=5), dict[str, str])
