"""A small shop on the library, for incidents: payments, mails in order, bookings that are undone, and a task of a later version."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from celery import Celery
from kombu import Queue

from idempotency import IdempotentTask, PermanentError, StoredFailure, StoredRefusal
from idempotency.queues import EXCHANGE, QuorumQueue, quorum_queue
from idempotency.sagas import SagaTask, saga
from idempotency.settings import PREFIX, Settings
from idempotency.upkeep import alarms, alerts

# The queues of payments, of mails (which holds few), and of the tasks of version 2.
SHOP, MAIL, NEW = "shop", "mail", "new"
MAIL_HOLDS = 3


def _holding(queue: Queue, most: int) -> Queue:
    """A queue that takes no more than so many messages, as a policy of the broker may say."""
    arguments = {**queue.queue_arguments, "x-max-length": most}
    return QuorumQueue(queue.name, queue.exchange, routing_key=queue.name, queue_arguments=arguments)


app = Celery("drill")
app.conf.update(
    broker_url=os.environ["BROKER_URL"],
    broker_transport_options={"confirm_publish": True},
    broker_connection_retry_on_startup=True,
    broker_heartbeat=4,
    task_queues=[quorum_queue(SHOP), _holding(quorum_queue(MAIL), MAIL_HOLDS), quorum_queue(NEW)],
    task_default_queue=SHOP,
    task_default_exchange=EXCHANGE,
    task_default_exchange_type="topic",
    task_default_queue_type="quorum",
    task_default_routing_key=SHOP,
    task_create_missing_queues=False,
    task_routes={"drill.tell": {"queue": MAIL}, "drill.newer": {"queue": NEW}},
    task_serializer="json",
    accept_content=["json"],
    task_ignore_result=True,
    task_acks_on_failure=True,
    task_acks_on_timeout=False,
    worker_prefetch_multiplier=1,
    worker_enable_prefetch_count_reduction=False,
    worker_cancel_long_running_tasks_on_connection_loss=True,
    worker_enable_remote_control=False,
    timezone="UTC",
    idempotency_database_url=os.environ["DATABASE_URL"],
    idempotency_redis_url=os.environ["REDIS_URL"],
    beat_schedule={"alert": {"task": "drill.alert", "schedule": 5.0, "options": {"expires": 5.0}}},
    **{
        PREFIX + name: value
        for name in Settings.model_fields
        if name not in ("database_url", "redis_url")
        and (value := os.environ.get(f"{PREFIX}{name}".upper())) is not None
    },
)


@app.task(name="drill.alert")
def alert() -> int:
    """Send alerts and alarms, in case no relay does."""
    return alerts.run_once(app) + alarms.run_once(app)


def charge(amount: int, currency: str, payment_id: str, *, idempotency_key: str) -> dict[str, Any]:
    """Charge at the provider, which stores each answer under the key, its failures too."""
    form: Mapping[str, str] = {
        "amount": str(amount),
        "currency": currency.lower(),
        "confirm": "true",
        "payment_method": "pm_card_visa",
        "automatic_payment_methods[enabled]": "true",
        "automatic_payment_methods[allow_redirects]": "never",
        "metadata[purchase_id]": payment_id,
        "metadata[effect_key]": idempotency_key,
    }
    answer = httpx.post(
        f"{os.environ['STRIPE_API_BASE']}/v1/payment_intents",
        data=form,
        headers={"Authorization": "Bearer sk_test_sandbox", "Idempotency-Key": idempotency_key},
        timeout=5,
    )
    found = answer.json()
    if answer.status_code == httpx.codes.PAYMENT_REQUIRED:
        raise StoredRefusal("the card was declined", found["error"].get("code") or "card_declined")
    if answer.status_code >= 500 and answer.headers.get("idempotent-replayed") == "true":
        raise StoredFailure(f"the provider replays a stored {answer.status_code} for this key")
    answer.raise_for_status()
    return {name: found[name] for name in ("id", "amount", "currency", "status")}


@app.task(
    base=IdempotentTask,
    bind=True,
    name="drill.pay",
    key="{payment_id}",
    amount="{amount} {currency}",
    moves_money=True,
    max_attempts=3,
)
def pay(self: IdempotentTask, payment_id: str, amount: int, currency: str) -> dict[str, Any]:
    """Charge a payment. Without `reconcile`: what is not known, a person has to find out."""
    return self.effect("charge", charge, amount, currency, payment_id)


@app.task(base=IdempotentTask, bind=True, name="drill.tell", key="{mail_id}")
def tell(self: IdempotentTask, mail_id: str) -> str:
    """A mail, of which there may be many."""
    return mail_id


@app.task(base=IdempotentTask, bind=True, name="drill.reserve", key="{seat}")
def reserve(self: IdempotentTask, seat: str) -> str:
    """Hold a seat."""
    return seat


@app.task(base=IdempotentTask, bind=True, name="drill.free", key="{seat}")
def free(self: IdempotentTask, seat: str) -> str:
    """Let a seat go, unless the hall's system is broken."""
    if Path(os.environ["DRILL_HALL_IS_BROKEN"]).exists():
        raise PermanentError("the hall's system answers nonsense", "hall_is_broken")
    return seat


@app.task(base=IdempotentTask, bind=True, name="drill.sell", key="{seat}")
def sell(self: IdempotentTask, seat: str) -> str:
    """Nobody buys this seat."""
    raise PermanentError("sold out", "sold_out")


@saga("drill.book", key="{seat}", app=app)
def book(saga: SagaTask, seat: str) -> None:
    """Hold a seat and sell it; if that fails, the seat is free again."""
    saga.call(reserve, seat=seat, undo=free)
    saga.call(sell, seat=seat)


if os.environ.get("DRILL_VERSION") != "1":

    @app.task(base=IdempotentTask, bind=True, name="drill.newer", key="{id}")
    def newer(self: IdempotentTask, id: str) -> str:
        """What version 1 does not know."""
        return id
