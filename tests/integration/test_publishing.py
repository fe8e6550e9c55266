"""What a call puts into its message, who hears of it, and what later deliveries keep of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from celery import Celery, signals
from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session

from idempotency import InvalidArguments, SettingsError
from idempotency.application import runtime_of
from idempotency.operate.change import Change
from idempotency.operate.replay import replay
from idempotency.wire.headers import (
    DUE_HEADER,
    KEY_HEADER,
    ORIGIN_HEADER,
    OUTBOX_HEADER,
    TENANT_HEADER,
    VERSION_HEADER,
    senders_headers,
)
from idempotency.wire.message import Message
from idempotency.worker.revocation import Request
from tests.support import bank as b
from tests.support import operations as op
from tests.support import queues
from tests.support.deliveries import Deliveries, deliver_row
from tests.support.operations import make_due
from tests.support.tasks import make_task


@pytest.fixture
def connection(bank: Celery) -> Iterator[Connection]:
    """In a transaction, which is never committed."""
    with runtime_of(bank).engine.connect() as connection:
        yield connection


@contextmanager
def heard(*receivers: tuple[Any, Callable[..., Any]]) -> Iterator[None]:
    for signal, receiver in receivers:
        signal.connect(receiver)
    try:
        yield
    finally:
        for signal, receiver in receivers:
            signal.disconnect(receiver)


def test_enqueue_sends_celerys_signals_around_its_row(bank: Celery, connection: Connection) -> None:
    seen: list[Any] = []

    def before(sender: str, headers: dict[str, Any], body: Any, routing_key: str, **_: Any) -> None:
        seen.append(("before", sender, len(op.outbox(connection)), body[1], routing_key))
        headers["trace"] = {"id": headers["id"]}

    def after(sender: str, headers: dict[str, Any], **_: Any) -> None:
        seen.append(("after", sender, len(op.outbox(connection)), headers["trace"]))

    with heard((signals.before_task_publish, before), (signals.after_task_publish, after)):
        handle = b.deposit.enqueue(connection, account="a", headers={"x-request-id": "r"})
    queue = bank.conf.task_default_queue
    assert seen == [
        ("before", b.deposit.name, 0, {"account": "a"}, queue),
        ("after", b.deposit.name, 1, {"id": handle.task_id}),
    ]
    (row,) = op.outbox(connection)
    message = Message.from_text(row.message)
    assert message.headers["trace"] == {"id": handle.task_id}
    assert (message.headers["x-request-id"], message.route, row.queue) == ("r", {"queue": queue}, queue)


@pytest.mark.parametrize("ignored", [True, False])
def test_enqueue_asks_neither_the_broker_nor_the_result_backend(
    ignored: bool, configured: Celery, connection: Connection
) -> None:
    # nothing listens there
    configured.conf.update(broker_url="amqp://127.0.0.1:1//", result_backend="rpc://", task_send_sent_event=True)
    task = make_task(configured, lambda self, a: None, key="{a}", ignore_result=ignored)
    task.enqueue(connection, "k")
    (row,) = op.outbox(connection)
    assert Message.from_text(row.message).headers["ignore_result"] is ignored


def test_enqueue_is_for_a_worker_under_always_eager_too(configured: Celery, connection: Connection) -> None:
    configured.conf.task_always_eager = True
    b.deposit.enqueue(connection, "a")
    assert [row.status for row in op.outbox(connection)] == ["pending"]


def test_enqueue_refuses_a_protocol_that_the_guard_would(configured: Celery, connection: Connection) -> None:
    configured.conf.task_protocol = 1
    configured.amqp.__dict__.pop("create_task_message", None)
    try:
        with pytest.raises(SettingsError, match="task_protocol: must be 2"):
            b.deposit.enqueue(connection, "a")
    finally:
        configured.amqp.__dict__.pop("create_task_message", None)
    assert op.outbox(connection) == []


def test_what_a_body_enqueues_names_it_as_its_parent(
    bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    task = make_task(bank, lambda self: b.deposit.enqueue(self.session, "child") and None)
    deliveries.deliver(task, key="k", task_id="t-1", headers={"root_id": "t-0"})
    (row,) = op.outbox(connection)
    sent = Message.from_text(row.message).headers
    assert (sent["parent_id"], sent["root_id"]) == ("t-1", "t-0")


@pytest.mark.parametrize("where", ["the call", "a receiver"])
def test_a_header_that_is_not_json_is_refused_by_its_name(where: str, bank: Celery, connection: Connection) -> None:
    def add(headers: dict[str, Any], **_: Any) -> None:
        headers["x-id"] = uuid4()

    given = {"headers": {"x-id": uuid4()}} if where == "the call" else {}
    receivers = [(signals.before_task_publish, add)] if where == "a receiver" else []
    with heard(*receivers), pytest.raises(InvalidArguments, match=r"^headers: x-id: must be JSON, got UUID$"):
        b.deposit.enqueue(connection, "a", **given)
    assert op.outbox(connection) == []


def test_an_argument_of_the_name_headers_is_the_tasks_own(bank: Celery, connection: Connection) -> None:
    task = make_task(bank, lambda self, headers: None, key="{headers}")
    task.enqueue(connection, headers="h")
    (row,) = op.outbox(connection)
    assert (row.key, "h" in Message.from_text(row.message).headers) == ("h", False)


def test_headers_of_the_caller_are_kept_over_retries_and_replays(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection
) -> None:
    seen: list[tuple[Any, ...]] = []
    names = ("x-request-id", "traceparent", "x-death", "x-delivery-count")

    def body(self: Any) -> None:
        seen.append(tuple((self.request.headers or {}).get(name) for name in names))
        raise ValueError("again")

    task = make_task(bank, body, max_attempts=2)
    sent = {"x-request-id": "r-1", "traceparent": "00-a-b-01"}
    brokers = {"x-death": [{"count": 1}], "x-delivery-count": 1}
    deliveries.deliver(task, key="k", headers=sent | brokers)
    make_due(engine, "k")
    deliver_row(deliveries, task, op.outbox(connection)[-1])
    (letter,) = op.dead_letters(connection)
    replay(bank, letter.id, Change("ann", "again"))
    deliver_row(deliveries, task, op.outbox(connection)[-1])
    kept = ("r-1", "00-a-b-01", None, None)
    assert seen == [("r-1", "00-a-b-01", [{"count": 1}], 1), kept, kept]


WAYS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "enqueue": lambda session, headers: b.deposit.enqueue(session, "child", headers=headers),
    "apply_async": lambda _, headers: b.deposit.apply_async(("child",), headers=headers),
    "a signature": lambda _, headers: b.deposit.s("child").set(headers=headers).apply_async(),
}


@pytest.mark.parametrize("way", WAYS)
def test_headers_passed_on_by_a_body_name_no_operation_in_their_new_message(way: str, bank: Celery) -> None:
    """As a worker has them: the key is the operation's own, and the marks are its message's."""
    received: dict[str, Any] = {
        "x-request-id": "r-1",
        KEY_HEADER: "parent",
        TENANT_HEADER: "t",
        OUTBOX_HEADER: "o",
        DUE_HEADER: "2020",
    }
    received |= {VERSION_HEADER: 1, "x-death": [{"count": 1}], "x-delivery-count": 1}
    sent: list[dict[str, Any]] = []

    def before(headers: dict[str, Any], **_: Any) -> None:
        sent.append(headers)

    with runtime_of(bank).engine.connect() as session, heard((signals.before_task_publish, before)):
        WAYS[way](session, received)
    (headers,) = sent
    assert (headers["x-request-id"], headers[KEY_HEADER], headers[TENANT_HEADER]) == ("r-1", "child", "default")
    assert not {OUTBOX_HEADER, DUE_HEADER, "x-death", "x-delivery-count"} & headers.keys()


def test_a_key_and_a_tenant_may_be_given_as_headers(bank: Celery, connection: Connection) -> None:
    b.deposit.enqueue(connection, "a", headers={KEY_HEADER: "mine", TENANT_HEADER: "t", ORIGIN_HEADER: "replay"})
    (row,) = op.outbox(connection)
    assert (row.tenant, row.key, ORIGIN_HEADER in Message.from_text(row.message).headers) == ("t", "mine", False)


def test_headers_that_a_worker_received_are_told_from_given_ones(bank: Celery) -> None:
    """Also those of a message that was sent by name, with a key alone."""
    headers = {"task": b.deposit.name, "id": "t-1", KEY_HEADER: "k", "x-request-id": "r-1"}
    message = SimpleNamespace(
        headers=headers, properties={}, delivery_info={}, payload=(["a"], {}, {}), body=b"", content_type="",
        content_encoding="", decode=lambda: (["a"], {}, {}),
    )  # fmt: skip
    request = Request(message, app=bank, task=b.deposit, headers=headers)
    assert senders_headers(request.request_dict["headers"]) == {"x-request-id": "r-1"}


def test_a_header_that_decides_over_its_message_is_refused(bank: Celery, connection: Connection) -> None:
    with pytest.raises(InvalidArguments, match=r"^headers: 'id' is a field of Celery's message$"):
        b.deposit.enqueue(connection, "a", headers={"id": 17})
    with pytest.raises(InvalidArguments, match=r"^headers: 'task' is a field"):
        b.deposit.apply_async(("a",), headers={"task": "other"})
    assert op.outbox(connection) == []


def test_a_header_that_json_lacks_is_kept_as_text(bank: Celery, deliveries: Deliveries, connection: Connection) -> None:
    id = UUID(int=7)
    assert deliveries.deliver(b.failing, "a", "defer", headers={"x-id": id}).state == "RETRY"
    (row,) = op.outbox(connection)
    assert Message.from_text(row.message).headers["x-id"] == str(id)


def test_apply_async_takes_celerys_positional_arguments(bank: Celery) -> None:
    link = b.deposit.si("linked")
    sent: list[Any] = []

    def before(headers: dict[str, Any], body: Any, **_: Any) -> None:
        sent.append((headers["id"], headers["shadow"], body[2]["callbacks"]))

    with bank.amqp.producer_pool.acquire(block=True) as producer, heard((signals.before_task_publish, before)):
        published: list[Any] = []
        original, producer.publish = producer.publish, lambda *args, **options: published.append(options)
        b.deposit.apply_async(("a",), None, "t-1", producer, link, None, "shown")
        producer.publish = original
    assert sent == [("t-1", "shown", [link])]
    assert len(published) == 1  # by the producer that was given


SERIALIZED: dict[str, Callable[[Any, Session], Any]] = {
    "in the call": lambda task, session: b.deposit.apply_async(("a",), serializer="pickle"),
    "in a signature": lambda task, session: b.deposit.s("a").set(serializer="yaml").apply_async(),
    "of the task": lambda task, session: task.delay("a"),
    "in enqueue": lambda task, session: b.deposit.enqueue(session, "a", serializer="pickle"),
}


@pytest.mark.parametrize("way", SERIALIZED)
def test_a_serializer_other_than_json_is_refused_by_the_call(way: str, bank: Celery, connection: Connection) -> None:
    task = make_task(bank, lambda self, a: None, key="{a}", serializer="pickle")
    with pytest.raises(InvalidArguments, match="serializer") as refused:
        SERIALIZED[way](task, connection)  # type: ignore[arg-type]
    assert isinstance(refused.value, TypeError)  # as for arguments that do not fit
    assert op.outbox(connection) == []
    del bank.tasks[task.name]


@pytest.mark.filterwarnings("ignore::celery.exceptions.CDeprecationWarning")
def test_enqueue_takes_the_route_of_the_decorator(bank: Celery, connection: Connection) -> None:
    task = make_task(bank, lambda self: None, exchange="topics", routing_key="priority.high", key=lambda _: "k")
    task.enqueue(connection)
    (row,) = op.outbox(connection)
    assert Message.from_text(row.message).destination(bank) == ("topics", "priority.high")


def test_a_key_for_a_task_whose_code_is_elsewhere_is_given_as_a_header(bank: Celery) -> None:
    web = Celery("web", set_as_current=False, broker=bank.conf.broker_url)
    web.conf.update(task_queues=bank.conf.task_queues, task_default_queue=bank.conf.task_default_queue)
    web.conf.broker_transport_options = bank.conf.broker_transport_options  # without a confirm it may not be there yet
    queues.drained(bank)
    web.signature("elsewhere", ("a",)).set(headers={KEY_HEADER: "mine"}).apply_async()
    assert queues.keys(queues.drained(bank)) == ["mine"]
