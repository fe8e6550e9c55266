"""An application whose tenants are in two cells, `eu` and `us`: by the first letters of their names."""

from __future__ import annotations

import json
import os
from typing import Any

from celery import Celery

from idempotency import IdempotentTask, publish, subscribe, use_cells
from idempotency.queues import quorum_queue
from tests.support.bank import INSERT

# No broker listens there: what is sent without a cell is refused before.
NOWHERE = "amqp://127.0.0.1:1//"
app = Celery("celled", set_as_current=False)


def cell_of(tenant: str) -> str | None:
    """The cell of `eu-acme` is `eu`; a test moves tenants by the variable MOVED."""
    moved: dict[str, str] = json.loads(os.environ.get("MOVED", "{}"))
    if tenant == "broken":
        raise RuntimeError("the directory of tenants is away")
    return moved.get(tenant, tenant[:2] if tenant.startswith(("eu-", "us-")) else None)


def configure(cells: dict[str, dict[str, str]], **settings: Any) -> None:
    """Point the application at the servers of these cells; which one is served, IDEMPOTENCY_CELL says."""
    app.conf.update(
        broker_url=NOWHERE,
        broker_transport_options={"confirm_publish": True},
        broker_connection_retry_on_startup=True,
        task_queues=[quorum_queue("deposits")],
        task_default_queue="deposits",
        task_default_exchange="tasks",
        task_default_exchange_type="topic",
        task_default_routing_key="deposits",
        task_create_missing_queues=False,
        task_ignore_result=True,
        worker_prefetch_multiplier=1,
        worker_enable_remote_control=False,
        worker_enable_prefetch_count_reduction=False,
        idempotency_cells=cells,
        idempotency_cell_of="tests.support.celled:cell_of",
        idempotency_retry_base=0.05,
        idempotency_unknown_task_grace=0,
        **settings,
    )
    use_cells(app)


@app.task(name="deposit", base=IdempotentTask, bind=True, key="{account}", shared=False)
def deposit(self: IdempotentTask, account: str, amount: int = 1) -> int:
    """A row, without any uniqueness, and an event."""
    self.session.execute(INSERT, {"account": account, "amount": amount})
    publish(self.session, "deposited", {"account": account}, app=app, tenant=self.tenant)
    return amount


@subscribe("deposited", consumer="receipts", app=app)
def receipt(self: IdempotentTask, event: dict[str, Any]) -> None:
    """Another row, by what the first has enqueued."""
    self.session.execute(INSERT, {"account": f"receipt of {event['data']['account']}", "amount": 0})


if "CELLS" in os.environ:
    configure(json.loads(os.environ["CELLS"]))
