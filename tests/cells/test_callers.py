"""Who calls into which cell: the tenant decides, and what does not fit is refused before anything is written."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from idempotency import (
    DeduplicatedTask,
    Handle,
    IdempotentTask,
    OperationId,
    WrongCell,
    lookup,
    publish,
    runtime_for,
    use_cells,
)
from idempotency.application import close_runtime, runtime_of, settings_of
from idempotency.attempt.policy import Policy
from idempotency.attempt.run import run
from idempotency.checks.doctor import doctor
from idempotency.checks.findings import Level
from idempotency.errors import OperationNotFound, ReplayRefused, SettingsError
from idempotency.letters.consumer import DeadLetterConsumer
from idempotency.letters.examine import examine
from idempotency.operate import webhooks as operate_webhooks
from idempotency.operate.change import Change
from idempotency.operate.replay import replay
from idempotency.relay.relay import Relay
from idempotency.relay.resend import resend_lost
from idempotency.streams import StreamMessage, kafka, stream
from idempotency.streams.preparing import Prepared, Refused, prepare
from idempotency.testing.inline import Outbox
from idempotency.webhooks.signing import Scheme
from idempotency.wire.delivery import Delivery
from tests.cells.conftest import Cells, Count, Serve
from tests.cells.test_page import run_all
from tests.support import celled
from tests.support.bank import INSERT
from tests.support.celled import app, deposit
from tests.support.deliveries import Deliveries
from tests.support.operators import ANN
from tests.support.processes import eventually


def accepted(engine: Engine) -> list[tuple[str, str]]:
    """The tenants and keys in a cell's outbox."""
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT tenant, key FROM idempotency.outbox ORDER BY id"))
        return [(row.tenant, row.key) for row in rows]


def enqueue(engine: Engine, tenant: str | None, account: str = "a1") -> Handle[int]:
    with Session(engine.execution_options(isolation_level="READ COMMITTED")) as session, session.begin():
        options: dict[str, Any] = {} if tenant is None else {"tenant": tenant}
        handle: Handle[int] = deposit.using(**options).enqueue(session, account)
        return handle


def test_a_caller_without_a_cell_reaches_each_by_the_tenant(serve: Serve, engines: dict[str, Engine]) -> None:
    serve(None)
    for tenant in ("eu-acme", "us-bolt"):
        with Session(runtime_for(app, tenant).engine) as session, session.begin():
            handle = deposit.using(tenant=tenant).enqueue(session, "a1")
            publish(session, "deposited", {"account": "a1"}, app=app, tenant=tenant)
        assert handle.status() == "accepted"  # read where it is
        with pytest.raises(OperationNotFound):
            lookup(app, "deposit", "a2", tenant=tenant)
    assert {tenant for tenant, _ in accepted(engines["eu"])} == {"eu-acme"}
    assert {tenant for tenant, _ in accepted(engines["us"])} == {"us-bolt"}
    assert [len(accepted(engine)) for engine in engines.values()] == [2, 2]
    assert runtime_for(app, "eu-acme") is runtime_for(app, "eu-other") is not runtime_for(app, "us-bolt")


@pytest.mark.parametrize("cell", [None, "us"])
def test_a_session_of_another_cell_is_refused(serve: Serve, engines: dict[str, Engine], cell: str | None) -> None:
    serve(cell)
    with pytest.raises(
        WrongCell, match=r"session: .*/cell_eu_\w+\) than that of cell 'us', which tenant 'us-bolt' is of"
    ):
        enqueue(engines["eu"], "us-bolt")
    with (
        pytest.raises(WrongCell, match="that of cell 'us', which tenant 'us-bolt' is of"),
        Session(engines["eu"].execution_options(isolation_level="READ COMMITTED")) as session,
    ):
        publish(session, "deposited", {"account": "a1"}, app=app, tenant="us-bolt")
    assert accepted(engines["eu"]) == accepted(engines["us"]) == []


def test_an_async_session_of_another_cell_is_refused(serve: Serve, cells: Cells, engines: dict[str, Engine]) -> None:
    serve(None)

    async def call(cell: str) -> None:
        engine = create_async_engine(cells[cell]["database_url"])
        async with AsyncSession(engine) as session, session.begin():
            await deposit.aenqueue(session, "a1", tenant="eu-acme")
        await engine.dispose()

    with pytest.raises(WrongCell, match="that of cell 'eu', which tenant 'eu-acme' is of"):
        asyncio.run(call("us"))
    asyncio.run(call("eu"))
    assert accepted(engines["us"]) == []
    assert accepted(engines["eu"]) == [("eu-acme", "a1")]


def test_a_process_of_a_cell_refuses_tenants_of_others_whatever_the_session(
    serve: Serve, engines: dict[str, Engine]
) -> None:
    serve("eu")
    for engine in engines.values():
        with pytest.raises(WrongCell, match="deposit: tenant 'us-bolt' is of cell 'us', and this process serves 'eu'"):
            enqueue(engine, "us-bolt")
    for call in (
        lambda: deposit.apply_async(("a1",), tenant="us-bolt"),
        lambda: deposit.apply(("a1",), tenant="us-bolt"),
        lambda: Handle(app, OperationId("us-bolt", "deposit", "a1")).status(),
        lambda: runtime_for(app, "us-bolt"),
        lambda: deposit.s("a1").set(tenant="us-bolt").apply_async(),
    ):
        with pytest.raises(WrongCell, match="tenant 'us-bolt' is of cell 'us', and this process serves 'eu'"):
            call()
    assert accepted(engines["eu"]) == accepted(engines["us"]) == []
    assert enqueue(engines["eu"], None).id.tenant == "eu-house"  # its own, for what names none


def test_a_tenant_that_is_in_no_cell_is_refused_everywhere(serve: Serve, engines: dict[str, Engine]) -> None:
    for cell in (None, "eu"):
        serve(cell)
        with pytest.raises(WrongCell, match="tenant 'nobody' is in no cell"):
            enqueue(engines["eu"], "nobody")
        with pytest.raises(SettingsError, match="idempotency_cell_of: raised RuntimeError"):
            enqueue(engines["eu"], "broken")
    assert accepted(engines["eu"]) == []


def test_without_a_cell_nothing_is_sent_or_run_here(serve: Serve, engines: dict[str, Engine]) -> None:
    serve(None)
    for call in (deposit.apply_async, deposit.apply):
        with pytest.raises(
            WrongCell, match="tenant 'eu-acme' is of cell 'eu', and this process serves no cell: enqueue it"
        ):
            call(("a1",), tenant="eu-acme")
    with pytest.raises(WrongCell, match="no tenant is given"):
        deposit.delay("a1")
    for unnamed in (lambda: enqueue(engines["eu"], None), lambda: runtime_of(app), lambda: runtime_for(app, None)):
        with pytest.raises(SettingsError, match="this process serves none of eu, us; set IDEMPOTENCY_CELL"):
            unnamed()
    assert accepted(engines["eu"]) == accepted(engines["us"]) == []


# ---------------------------------------------------------------- what arrives


def test_a_message_for_a_tenant_of_another_cell_becomes_a_letter_and_ends_nothing(
    serve: Serve, engines: dict[str, Engine], count: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant that was moved while its messages were on their way."""
    serve("eu")
    deposit.apply_async(("a1",), tenant="eu-acme")
    monkeypatch.setenv("MOVED", json.dumps({"eu-acme": "us"}))
    consumer = DeadLetterConsumer(app)
    consumer._connect()  # the queue has to be there: until then, RabbitMQ keeps dead letters back
    with app.connection_for_read() as broker:
        queue = app.amqp.queues["deposits"](broker)
        message = eventually(queue.get, what="the message")
        assert examine(app, message).reason == "other_cell"
        message.reject()
    eventually(lambda: consumer.run_once(), what="the dead letter")
    consumer.close()
    with engines["eu"].connect() as connection:
        (letter,) = connection.execute(text("SELECT * FROM idempotency.dead_letters")).all()
        assert connection.execute(text("SELECT count(*) FROM idempotency.records")).scalar_one() == 0
    assert (letter.reason, letter.tenant, letter.key, letter.status) == ("other_cell", "eu-acme", "a1", "open")
    assert accepted(engines["eu"]) == []
    with pytest.raises(
        ReplayRefused, match="tenant 'eu-acme' is of cell 'us', and this process serves 'eu'; call its task"
    ):
        replay(app, letter.id, Change("ann", "x"))
    monkeypatch.delenv("MOVED")
    replay(app, letter.id, Change("ann", "moved back"))
    assert accepted(engines["eu"]) == [("eu-acme", "a1")]


def test_a_row_whose_tenant_is_of_another_cell_by_now_waits_for_a_person(
    serve: Serve, engines: dict[str, Engine], count: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moved too early, or by mistake: it has one open letter, is not sent again by itself, and runs once after a replay."""
    serve("eu")
    enqueue(engines["eu"], "eu-acme")
    monkeypatch.setenv("MOVED", json.dumps({"eu-acme": "us"}))
    consumer, relay = DeadLetterConsumer(app), Relay(app)
    consumer._connect()
    assert relay.run_once().published == 1
    with app.connection_for_read() as broker:
        eventually(app.amqp.queues["deposits"](broker).get, what="the message").reject()
    eventually(lambda: consumer.run_once(), what="the dead letter")
    assert letters(engines["eu"]) == [("eu-acme", "other_cell")]
    with engines["eu"].connect() as connection:
        connection.execute(text("UPDATE idempotency.outbox SET published_at = published_at - interval '1 day'"))
    resend_lost(app)
    assert relay.run_once().published == 0
    monkeypatch.delenv("MOVED")
    with engines["eu"].connect() as connection:
        id = connection.execute(text("SELECT id FROM idempotency.dead_letters")).scalar_one()
    replay(app, id, Change("ann", "a wrong directory"))
    Outbox(app, allow_database=engines["eu"].url.database).run()
    consumer.close()
    relay.close()
    assert (count("eu", "a1"), count("eu", "receipt of a1"), count("us", "a1")) == (1, 1, 0)


def test_a_claim_is_refused_whatever_has_come_before_it(serve: Serve, engines: dict[str, Engine], count: Count) -> None:
    """Past the guard, and where no guard is: an operation's cell is looked at with its claim."""
    serve("eu")
    assert Deliveries(app).deliver(deposit, "a1", tenant="us-bolt").state == "REJECTED"
    assert Deliveries(app).deliver(deposit, "a1", tenant="eu-acme").state == "SUCCESS"
    runtime = runtime_of(app)
    with pytest.raises(WrongCell, match="tenant 'us-bolt' is of cell 'us', and this process serves 'eu'"):
        run(
            runtime,
            Delivery(OperationId("us-bolt", "deposit", "a2"), "1:x", {}),
            Policy.by_settings(runtime.settings),
            lambda _: 1,
        )
    assert (count("eu", "a1"), count("us", "a1")) == (1, 0)


def test_letters_that_only_headers_name_end_nothing_of_another_cell(serve: Serve, engines: dict[str, Engine]) -> None:
    """A task that is not known here is named by its headers, and comes back for a while: not into this outbox."""
    serve("eu")
    app.conf.idempotency_unknown_task_grace = 3600
    close_runtime(app)
    task = app.tasks.pop("deposit")
    try:
        consumer = DeadLetterConsumer(app)
        consumer._connect()
        with app.connection_for_write() as broker:
            producer = broker.Producer()
            for tenant in ("us-bolt", "eu-acme"):
                headers = {"task": "deposit", "id": tenant, "idempotency-key": "a1", "idempotency-tenant": tenant}
                headers |= {
                    "idempotency-fingerprint": task._checked(("a1",), {}, "a1", "eu-acme")[1]["idempotency-fingerprint"]
                }
                producer.publish(
                    [["a1"], {}, {}], routing_key="deposits.dead_letters", headers=headers, serializer="json"
                )
        eventually(
            lambda: (consumer.run_once() and False) or len(letters(engines["eu"])) + len(accepted(engines["eu"])) == 2
        )
        consumer.close()
    finally:
        app.tasks["deposit"] = task
    assert letters(engines["eu"]) == [("us-bolt", "unknown_task")]
    assert accepted(engines["eu"]) == [("eu-acme", "a1")]


def letters(engine: Engine) -> list[tuple[str, str]]:
    with engine.connect() as connection:
        return [(row.tenant, row.reason) for row in connection.execute(text("SELECT * FROM idempotency.dead_letters"))]


# ---------------------------------------------------------------- set-up


@pytest.mark.long
def test_the_doctor_checks_every_cell_where_none_is_served(serve: Serve, cells: Cells) -> None:
    serve(None)
    findings = doctor(app)
    assert {finding.subject.partition(":")[0] for finding in findings} == {"eu", "us"}
    assert not [finding for finding in findings if finding.level is Level.REFUSAL]
    assert app.conf.broker_url == celled.NOWHERE
    assert app.conf.idempotency_cell is None
    cells["us"]["database_url"] = cells["us"]["database_url"].replace("cell_us_", "gone_")
    serve(None)
    refused = {finding.subject for finding in doctor(app) if finding.level is Level.REFUSAL}
    assert refused == {"us: database"}
    serve("eu")
    assert ("cell", "eu; the others: us") in {(finding.subject, finding.found) for finding in doctor(app)}


def test_a_broker_that_is_not_the_cells_is_refused(serve: Serve, cells: Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    serve("eu")
    monkeypatch.setenv("CELERY_BROKER_READ_URL", cells["us"]["broker_url"])  # Celery prefers it to the configuration
    assert {(f.subject, f.found) for f in doctor(app) if f.level is Level.REFUSAL} == {
        ("broker_url", "is not that of the cell 'eu'")
    }


def test_a_process_of_a_cell_that_publishes_elsewhere_does_not_begin(
    serve: Serve, cells: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CELERY_BROKER_WRITE_URL", cells["us"]["broker_url"])
    with pytest.raises(SettingsError, match="broker_url: not that of the cell 'eu'"):
        serve("eu")


def test_the_doctor_says_that_calls_without_a_tenant_are_refused(serve: Serve, cells: Cells) -> None:
    cells["eu"]["tenant"] = "us-house"
    serve("eu")
    (found,) = (each.found for each in doctor(app) if each.level is Level.WARNING and "us-house" in each.found)
    assert "a call that names no tenant, as those of beat, is refused" in found
    with pytest.raises(WrongCell):
        deposit.apply_async(("a1",))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"cells": {"eu": {"database_url": "postgresql+psycopg:///x"}}},
            "idempotency_cells.eu.broker_url: Field required",
        ),
        ({"cell": "mars"}, "idempotency_cell: 'mars' is none of eu, us"),
        ({"cell_of": None}, "cell_of must be set"),
        ({"cell_of": {"acme": "mars"}}, "cell_of: 'mars' is none of eu, us"),
        ({"cell_of": 7}, "idempotency_cell_of: must be a mapping"),
        ({"database_url": "postgresql+psycopg:///x"}, "idempotency_database_url: each cell has its own"),
        ({"large_results_at": "file:///x"}, "idempotency_large_results_at: each cell has its own"),
        (
            {"cells": {}, "database_url": "postgresql+psycopg:///x"},
            "cells must be set, too, where cell or cell_of is",
        ),
    ],
)
def test_what_does_not_fit_is_refused(serve: Serve, change: dict[str, Any], said: str) -> None:
    serve("eu")
    app.conf.update({f"idempotency_{name}": value for name, value in change.items()})
    try:
        with pytest.raises(SettingsError, match=said) as refused:
            settings_of(app)
    finally:
        for name in change:
            app.conf.changes.pop(f"idempotency_{name}", None)
    assert "postgresql" not in str(refused.value)


@pytest.mark.parametrize("what", ["database_url", "broker_url"])
def test_two_cells_in_one_place_are_refused(serve: Serve, cells: Cells, what: str) -> None:
    cells["us"][what] = cells["eu"][what].replace(
        "://", "://another:login@" if "@" not in cells["eu"][what] else "://", 1
    )
    with pytest.raises(SettingsError, match=f"cells: eu and us have the same {what}"):
        serve("eu")


def test_an_answer_that_is_no_cell_is_an_error_of_the_settings(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(None)
    monkeypatch.setenv("MOVED", json.dumps({"eu-acme": "mars"}))
    with pytest.raises(SettingsError, match="idempotency_cell_of: 'mars' is none of eu, us"):
        runtime_for(app, "eu-acme")


def test_addresses_of_cells_are_secrets(serve: Serve, cells: Cells) -> None:
    """In `celery report`, in `inspect conf`, and in a refusal that shows what it got."""
    serve("eu")
    password = cells["eu"]["broker_url"].partition("@")[0].rpartition(":")[2]
    assert password in repr(app.conf.idempotency_cells)
    assert password not in app.bugreport()
    assert password not in repr(app.conf.table(with_defaults=False, censored=True))
    assert password not in repr(settings_of(app))


def test_a_streams_message_for_a_tenant_of_another_cell_is_refused(serve: Serve) -> None:
    """And one that is of this cell is not."""
    serve("eu")
    settings = settings_of(app)
    declared = stream("cells", source=kafka("t"), key="{key}", tenant="{event[tenant]}")(lambda given, event: None)
    found = [
        prepare(declared, StreamMessage("t", 0, 0, b"k1", json.dumps({"tenant": tenant}).encode()), settings)
        for tenant in ("eu-acme", "us-bolt")
    ]
    assert isinstance(found[0], Prepared)
    assert isinstance(found[1], Refused)
    assert found[1].reason == "other_cell"
    assert "tenant 'us-bolt' is of cell 'us'" in found[1].detail


def test_a_deduplicated_task_for_a_tenant_of_another_cell_is_refused(serve: Serve, cells: Cells) -> None:
    serve("eu")
    app.conf.idempotency_store = cells["eu"]["redis_url"]

    @app.task(name="callers.charge", base=DeduplicatedTask, bind=True, key="{id}", shared=False)
    def task(self: Any, id: str) -> str:
        return id

    try:
        with pytest.raises(WrongCell):
            task.apply_async(("a1",), tenant="us-bolt")
        with pytest.raises(WrongCell):
            task.apply(("a1",), tenant="us-bolt")
        assert task.apply(("a1",), tenant="eu-acme").get() == "a1"
    finally:
        app.tasks.pop("callers.charge")
        app.conf.changes.pop("idempotency_store", None)


def test_two_applications_in_one_process_have_runtimes_of_their_own(serve: Serve, cells: Cells) -> None:
    serve(None)
    other = Celery("celled", set_as_current=False)
    other.conf.update({**app.conf.changes, "idempotency_cell": None})
    mine, others = runtime_for(app, "eu-acme"), runtime_for(other, "eu-acme")
    assert mine is not others
    close_runtime(other)
    assert others.is_closed
    assert not mine.is_closed


def test_a_caller_holds_no_more_connections_for_each_cell_than_the_page_says(serve: Serve) -> None:
    serve(None)
    for tenant in ("eu-acme", "us-bolt"):
        runtime = runtime_for(app, tenant)
        pools = [engine.pool for engine in runtime._engines]
        kept = sum(getattr(pool, "size", lambda: 1)() for pool in pools)
        most = kept + sum(getattr(pool, "_max_overflow", 0) for pool in pools)
        assert most == 4 * runtime.settings.pool_size + 1
        assert kept == 2 * runtime.settings.pool_size + 1


def test_a_body_that_calls_for_a_tenant_of_another_cell_commits_nothing_and_has_another_attempt(
    serve: Serve, cells: Cells, engines: dict[str, Engine], count: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a deploy that changes `cell_of`, that one may be in a process which knows better."""
    serve("eu")

    @app.task(name="callers.crossing", base=IdempotentTask, bind=True, key="{account}", shared=False, max_attempts=2)
    def crossing(self: Any, account: str) -> None:
        self.session.execute(INSERT, {"account": account, "amount": 1})
        deposit.using(tenant="us-bolt").enqueue(self.session, f"of {account}")

    def found(key: str) -> tuple[str, int, str | None]:
        with engines["eu"].connect() as connection:
            query = text("SELECT status, attempts, error FROM idempotency.records WHERE key = :key")
            row = connection.execute(query, {"key": key}).one()
        return row.status, row.attempts, row.error

    try:
        Deliveries(app).deliver(crossing, "x", tenant="eu-acme")
        assert (count("eu", "x"), count("us", "x")) == (0, 0)
        assert found("x")[:2] == ("released", 1)
        monkeypatch.setenv("MOVED", json.dumps({"us-bolt": "eu"}))  # as if by a process of the deploy
        run_all(cells, "eu")
        assert [count("eu", each) for each in ("x", "of x")] == [1, 1]
        assert found("x")[:2] == ("completed", 2)
        monkeypatch.delenv("MOVED")
        for _ in range(2):
            Deliveries(app).deliver(crossing, "y", tenant="eu-acme", origin="retry")
            time.sleep(0.2)  # longer than the pause before the second attempt
        status, attempts, error = found("y")
        assert (status, attempts, json.loads(error or "")["code"]) == ("failed", 2, "attempts_exhausted")
        assert "tenant 'us-bolt' is of cell 'us'" in json.loads(error or "")["message"]
        assert (count("eu", "y"), count("us", "y")) == (0, 0)
    finally:
        app.tasks.pop("callers.crossing")


def test_an_endpoint_for_webhooks_of_a_tenant_of_another_cell_is_refused(
    serve: Serve, engines: dict[str, Engine]
) -> None:
    serve("eu")
    with pytest.raises(WrongCell, match="tenant 'us-bolt' is of cell 'us'"):
        operate_webhooks.add_endpoint(
            runtime_of(app), ANN, "us-bolt", url="https://example.com/hook", events=["*"], scheme=Scheme.SHARED
        )
    with engines["eu"].connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM idempotency.webhook_endpoints")).scalar_one() == 0


def test_with_a_namespace_of_celerys(cells: Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IDEMPOTENCY_CELL", "us")
    made = Celery("namespaced", set_as_current=False)
    given = {"CELERY_IDEMPOTENCY_CELLS": cells, "CELERY_IDEMPOTENCY_CELL_OF": {"a": "us", "us-house": "us"}}
    made.config_from_object(given, namespace="CELERY")
    use_cells(made)
    assert made.conf.broker_url == cells["us"]["broker_url"]
    assert runtime_for(made, "a").settings.cell == "us"
    close_runtime(made)
    monkeypatch.delenv("IDEMPOTENCY_CELL")
    use_cells(made)
    assert runtime_for(made, "a").settings.cell == "us"
    close_runtime(made)


def test_a_letter_whose_tenant_cannot_be_told_does_not_hold_up_the_others(
    serve: Serve, engines: dict[str, Engine]
) -> None:
    serve("eu")
    consumer = DeadLetterConsumer(app)
    consumer._connect()
    fingerprint = deposit._checked(("a1",), {}, "a1", "eu-acme")[1]["idempotency-fingerprint"]
    with app.connection_for_write() as broker:
        producer = broker.Producer()
        for tenant in ("broken", "us-bolt"):
            headers = {"task": "deposit", "id": tenant, "idempotency-key": "a1", "idempotency-tenant": tenant}
            headers |= {"idempotency-fingerprint": fingerprint}
            producer.publish([["a1"], {}, {}], routing_key="deposits.dead_letters", headers=headers, serializer="json")

    def reasons() -> list[tuple[str, str]]:
        with engines["eu"].connect() as connection:
            rows = connection.execute(text("SELECT tenant, reason FROM idempotency.dead_letters ORDER BY id"))
            return [(row.tenant, row.reason) for row in rows]

    eventually(lambda: (consumer.run_once() and False) or ("us-bolt", "other_cell") in reasons(), timeout=20)
    consumer.close()
