"""The examples of the pages on drivers and frameworks, run as they are printed."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType
from typing import Any
from uuid import uuid4

import httpx
import pytest
from celery import Celery
from sqlalchemy import Engine, text
from sqlalchemy.engine import make_url

from idempotency import IdempotentTask, PermanentError
from idempotency.application import close_runtime
from tests.support.deliveries import Deliveries
from tests.support.documents import blocks, python_blocks
from tests.support.partitions import put_into_partitions
from tests.support.tasks import make_task


def example(page: str) -> str:
    """The one example of a page."""
    (found,) = python_blocks(page)
    return found


@pytest.fixture
def payments(bank: Celery, engine: Engine, database: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The reader's own module: an application, a task and its table."""

    def capture_payment(self: IdempotentTask, payment_id: str) -> dict[str, str]:
        found = self.session.execute(text("SELECT id FROM payments WHERE id = :id"), {"id": payment_id}).scalar_one()
        if found == "declined":
            raise PermanentError("declined by the bank", "card_declined")
        return {"charge": f"charge of {found}"}

    with engine.connect() as connection:
        connection.execute(text("CREATE TABLE payments (id text PRIMARY KEY)"))
    module: Any = ModuleType("payments")
    module.app, module.capture_payment = bank, make_task(bank, capture_payment, key="{payment_id}")
    monkeypatch.setitem(sys.modules, "payments", module)
    url = make_url(database)
    monkeypatch.setenv("POSTGRES_URL", url.set(drivername="postgresql").render_as_string(hide_password=False))
    monkeypatch.setenv(
        "ASYNC_DATABASE_URL", url.set(drivername="postgresql+asyncpg").render_as_string(hide_password=False)
    )
    return module


def test_the_page_on_psycopg_runs_as_it_is(payments: Any, engine: Engine, deliveries: Deliveries) -> None:
    names: dict[str, Any] = {}
    exec(example("docs/psycopg.md"), names)
    assert names["handle"].status() == "accepted"
    deliveries.deliver(payments.capture_payment, payment_id="p1")
    assert names["handle"].result() == {"charge": "charge of p1"}


def test_the_page_on_fastapi_runs_as_it_is(payments: Any, engine: Engine, deliveries: Deliveries) -> None:
    # a module of its own, where FastAPI finds the names of the annotations
    shop: Any = ModuleType("shop")
    exec(example("docs/fastapi.md"), shop.__dict__)

    async def main() -> list[tuple[int, Any]]:
        transport = httpx.ASGITransport(app=shop.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            answers = []
            for key in ("p1", "p1", "declined"):
                answers.append(await client.post("/payments", headers={"Idempotency-Key": key}))
            waiting = asyncio.create_task(client.get("/payments/p1"))
            await asyncio.to_thread(deliveries.deliver, payments.capture_payment, payment_id="p1")
            await asyncio.to_thread(deliveries.deliver, payments.capture_payment, payment_id="declined")
            answers += [await waiting, await client.get("/payments/declined")]
        await shop.engine.dispose()
        return [(answer.status_code, answer.json()) for answer in answers]

    accepted = (202, {"payment": "p1"})
    assert asyncio.run(main()) == [
        accepted,
        accepted,
        (202, {"payment": "declined"}),
        (200, {"charge": "charge of p1"}),
        (422, {"detail": "card_declined"}),
    ]
    with engine.connect() as connection:
        sent = connection.execute(text("SELECT key FROM idempotency.outbox ORDER BY key")).scalars().all()
    assert sent == ["declined", "p1", "p1"]


def test_the_page_on_engines_runs_as_it_is(
    configured: Celery, database: str, deliveries: Deliveries, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop: Any = ModuleType("shop")
    exec(example("docs/engines.md"), shop.__dict__)
    monkeypatch.setitem(sys.modules, "shop", shop)
    monkeypatch.setenv("TOKEN", str(make_url(database).password))
    outdated = make_url(database).set(password="outdated").render_as_string(hide_password=False)
    configured.conf.update(idempotency_engine="shop:engine", idempotency_database_url=outdated)
    close_runtime(configured)

    def body(self: IdempotentTask) -> str:
        return str(self.session.execute(text("SELECT current_setting('shop.reader')")).scalar_one())

    assert deliveries.deliver(make_task(configured, body), key="k").value == "worker"
    close_runtime(configured)


@pytest.mark.plain
def test_the_grants_of_the_page_on_partitions_are_what_a_purge_needs(
    engine: Engine, superuser: Engine, database: str
) -> None:
    (grants,) = blocks("docs/partitions.md", "sql")
    role = f"app_{uuid4().hex[:8]}"
    may = text("SELECT count(*) FILTER (WHERE has_function_privilege(:role, oid, 'EXECUTE')), count(*) FROM pg_proc "
               "WHERE pronamespace = 'idempotency_partitions'::regnamespace")  # fmt: skip
    put_into_partitions(database)
    with superuser.connect() as connection:
        connection.execute(text(f"CREATE ROLE {role}"))
        try:
            before, all_of_them = connection.execute(may, {"role": role}).one()
            with engine.connect() as owner:
                owner.execute(text(grants.replace("TO app;", f"TO {role};")))
            assert before < connection.execute(may, {"role": role}).one()[0] == all_of_them
        finally:
            connection.execute(text(f"DROP OWNED BY {role}"))
            connection.execute(text(f"DROP ROLE {role}"))
