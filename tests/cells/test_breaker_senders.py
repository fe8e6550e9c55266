"""Proofs of a breaker about who sends where: each test asserts what happens today, and says beside it what would be right."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Any

import pytest
from celery import Celery
from kombu import Connection as BrokerConnection
from sqlalchemy import Engine, text

from idempotency import DeduplicatedTask, IdempotentTask, WrongCell, runtime_for
from idempotency.application import close_runtime, runtime_of
from idempotency.letters import consumer as letters_consumer
from idempotency.letters.consumer import DeadLetterConsumer
from idempotency.operate import webhooks as operate_webhooks
from idempotency.operate.change import Change
from idempotency.webhooks.signing import Scheme
from tests.cells.conftest import Cells, Count, Serve
from tests.cells.test_http import edge, post
from tests.cells.test_page import call, run_all
from tests.support.bank import INSERT
from tests.support.celled import app, deposit
from tests.support.processes import eventually


def test_a_web_server_of_a_cell_sends_into_the_broker_of_another(
    serve: Serve, cells: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker is compared by workers, relays and beats alone. RIGHT: `delay` is refused (the check costs a comparison).

    The call is accepted, gets a letter `other_cell` in the other cell, and never runs until a person calls it again.
    """
    serve("eu")
    with BrokerConnection(cells["us"]["broker_url"]) as broker:
        queue = app.amqp.queues["deposits"](broker)
        queue.declare()
        monkeypatch.setenv("CELERY_BROKER_WRITE_URL", cells["us"]["broker_url"])
        app.amqp._producer_pool = app._pool = None
        deposit.apply_async(("a1",), tenant="eu-acme")  # RIGHT: raises
        message = eventually(queue.get, what="the message in the other cell's broker")
        assert message.headers["idempotency-tenant"] == "eu-acme"
        message.ack()


def test_two_fold_truths_of_a_deploy_spend_a_key_twice_without_the_procedure(
    serve: Serve, cells: Cells, engines: dict[str, Engine], count: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cell_of` changes by a deploy (a hash over three cells instead of two, say), and nobody has moved anything.

    RIGHT, perhaps: a cell knows which tenants it has had, and what was never moved in is refused. The page promises nothing
    here but "Not checked: whether the application's own rows are there"; nothing warns, the doctor neither.
    """
    serve("eu")
    call(engines["eu"], "spent")
    run_all(cells, "eu")
    monkeypatch.setenv("MOVED", json.dumps({"eu-acme": "us"}))
    serve("us")
    call(engines["us"], "spent")
    run_all(cells, "us")
    assert (count("eu", "spent"), count("us", "spent")) == (1, 1)  # RIGHT: the second is refused


def test_letters_that_die_while_the_directory_is_away_are_held(
    serve: Serve, engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """HELD: without counting, as while Postgres is away; afterwards each is handled as what it is."""
    serve("eu")
    monkeypatch.setattr(letters_consumer, "HELD_PAUSE", 0.01)
    monkeypatch.setattr(letters_consumer, "HELD_CAP", 0.01)
    consumer = DeadLetterConsumer(app)
    consumer._connect()
    fingerprint = deposit._checked(("a1",), {}, "a1", "eu-acme")[1]["idempotency-fingerprint"]
    headers = {"task": "deposit", "id": "m1", "idempotency-key": "a1", "idempotency-tenant": "broken"}
    headers |= {"idempotency-fingerprint": fingerprint}
    with app.connection_for_write() as broker:
        broker.Producer().publish(
            [["a1"], {}, {}], routing_key="deposits.dead_letters", headers=headers, serializer="json"
        )

    def reasons() -> list[str]:
        with engines["eu"].connect() as connection:
            return list(connection.execute(text("SELECT reason FROM idempotency.dead_letters")).scalars())

    for _ in range(30):
        consumer.run_once()
        time.sleep(0.02)
    assert [held.tries > 5 for held in consumer._held] == [True]
    consumer.close()
    assert reasons() == []


def test_a_request_while_the_directory_is_away(serve: Serve, count: Count) -> None:
    """HELD if nothing is written: the error goes to the server, which answers 500. A 503 would tell the client to come again."""
    serve(None)
    web = edge(runtime=partial(runtime_for, app))
    with pytest.raises(Exception, match="idempotency_cell_of: raised RuntimeError"):
        post(web, "broken")


def test_a_deduplicated_task_for_a_tenant_of_another_cell_is_refused(serve: Serve, cells: Cells) -> None:
    """HELD: by the call and by the worker."""
    serve("eu")
    app.conf.idempotency_store = cells["eu"]["redis_url"]

    @app.task(name="breaker.charge", base=DeduplicatedTask, bind=True, key="{id}", shared=False)
    def task(self: Any, id: str) -> str:
        return id

    try:
        with pytest.raises(WrongCell):
            task.apply_async(("a1",), tenant="us-bolt")
        with pytest.raises(WrongCell):
            task.apply(("a1",), tenant="us-bolt")
        assert task.apply(("a1",), tenant="eu-acme").get() == "a1"
    finally:
        app.tasks.pop("breaker.charge")
        app.conf.changes.pop("idempotency_store", None)


def test_two_applications_in_one_process_are_of_different_cells(serve: Serve, cells: Cells) -> None:
    """HELD: runtimes are the application's, and closing one leaves the other's open."""
    serve(None)
    other = Celery("celled", set_as_current=False)
    other.conf.update({**app.conf.changes, "idempotency_cell": None})
    mine, others = runtime_for(app, "eu-acme"), runtime_for(other, "eu-acme")
    assert mine is not others
    close_runtime(other)
    assert others.is_closed
    assert not mine.is_closed


def test_what_a_caller_holds_for_each_cell(serve: Serve, engines: dict[str, Engine]) -> None:
    """What grows: up to four times pool_size connections for each cell and process, which nothing closes when they are idle."""
    serve(None)
    runtimes = [runtime_for(app, tenant) for tenant in ("eu-acme", "us-bolt")]
    pools = [engine.pool for runtime in runtimes for engine in runtime._engines]
    most = sum(getattr(pool, "_max_overflow", 0) + getattr(pool, "size", lambda: 1)() for pool in pools)
    assert most == 82  # with the default pool_size of 10


def test_a_body_calls_for_a_tenant_of_another_cell(
    serve: Serve, cells: Cells, engines: dict[str, Engine], count: Count
) -> None:
    """HELD if it passes: the call is refused where it is made, and nothing of the body is committed: it has failed for good."""
    serve("eu")

    @app.task(name="breaker.crossing", base=IdempotentTask, bind=True, key="{account}", shared=False)
    def crossing(self: Any, account: str) -> None:
        self.session.execute(INSERT, {"account": account, "amount": 1})
        deposit.using(tenant="us-bolt").enqueue(self.session, account)

    try:
        with runtime_of(app).engine.begin() as connection:
            crossing.using(tenant="eu-acme").enqueue(connection, "x")
        with pytest.raises(WrongCell):
            run_all(cells, "eu")
        assert (count("eu", "x"), count("us", "x")) == (0, 0)
        with engines["eu"].connect() as connection:
            (row,) = connection.execute(text("SELECT status, attempts, error FROM idempotency.records")).all()
        assert (row.status, row.attempts, json.loads(row.error)["code"]) == ("failed", 1, "call_refused")
    finally:
        app.tasks.pop("breaker.crossing")


def test_an_endpoint_for_webhooks_of_a_tenant_of_another_cell_is_accepted(serve: Serve) -> None:
    """RIGHT: `WrongCell`. A person in the wrong shell sees "added", and the customer gets nothing."""
    serve("eu")
    runtime = runtime_of(app)
    made = operate_webhooks.add_endpoint(
        runtime, Change("ann", "x"), "us-bolt", url="https://example.com/hook", events=["*"], scheme=Scheme.SHARED
    )
    assert made.id
