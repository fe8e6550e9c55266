"""What a body may do with Celery, and what Celery may do with it: calls, retries, errbacks, results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, Task, chain, group
from celery.backends.cache import CacheBackend
from celery.exceptions import ImproperlyConfigured, Reject
from celery.result import AsyncResult, GroupResult, denied_join_result, result_from_tuple
from pydantic import BaseModel
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from idempotency import IdempotentTask, InvalidArguments, SettingsError
from tests.support import bank as app_module
from tests.support import operations
from tests.support.deliveries import Deliveries
from tests.support.operations import Entries, Record, make_due
from tests.support.processes import Worker, eventually
from tests.support.tasks import ROW, Provider, accept, make_task, transactional


class Order(BaseModel):
    number: str
    amount: int = 1


class Receipt(BaseModel):
    text: str


@pytest.fixture
def as_in_a_pool_process() -> Iterator[None]:
    """Celery refuses to wait for a result there."""
    with denied_join_result():
        yield


def code(row: Any) -> str:
    return str(json.loads(row.error)["code"])


# ---------------------------------------------------------------- direct calls


def test_map_starmap_and_chunks_run_each_item_once(bank: Celery, worker: Worker, entries: Entries) -> None:
    def ended() -> int:
        return len(re.findall(r"Task celery\.(?:star)?map\S+ succeeded", worker.log))

    deposit = app_module.deposit
    for number in (1, 2):
        deposit.map(["a", "b"]).apply_async()
        deposit.starmap([("c", 1), ("d", 2)]).apply_async()
        deposit.chunks([("e", 1), ("f", 2), ("g", 3)], 2).apply_async()
        eventually(lambda number=number: ended() == 4 * number, what=f"four messages, sent {number} times")
    assert [entries(account) for account in "abcdefg"] == [1] * 7


@pytest.mark.usefixtures("as_in_a_pool_process")
def test_a_call_in_a_body_runs_under_its_own_key(
    bank: Celery, deliveries: Deliveries, entries: Entries, record: Record
) -> None:
    def body(self: Any, account: str) -> Any:
        called = [app_module.deposit(account), app_module.deposit.apply((f"{account}/applied",)).result]
        if account == "a":
            called.append(self("b"))  # of the same task
        self.session.execute(ROW)
        return called

    task = make_task(bank, body, key="outer:{account}")
    outcomes = [deliveries.deliver(task, "a") for _ in range(2)]
    assert [outcome.state for outcome in outcomes] == ["SUCCESS", "SUCCESS"]
    assert outcomes[0].value == outcomes[1].value
    assert [called["account"] for called in outcomes[0].value[:2]] == ["a", "a/applied"]
    assert [entries(account) for account in ("a", "a/applied", "b", "row")] == [1, 1, 1, 2]
    assert [record(key).status for key in ("outer:a", "outer:b", "a", "b")] == ["completed"] * 4


@pytest.mark.usefixtures("as_in_a_pool_process")
def test_a_call_in_a_body_whose_transaction_is_open_ends_it(
    bank: Celery, deliveries: Deliveries, entries: Entries, record: Record
) -> None:
    def body(self: Any) -> Any:
        self.session.execute(ROW)
        return app_module.deposit("a")

    assert deliveries.deliver(make_task(bank, body), key="outer").state == "FAILURE"
    assert (code(record("outer")), record("outer").attempts) == ("call_refused", 1)
    assert (record("a"), entries("a"), entries("row")) == (None, 0, 0)


@pytest.mark.usefixtures("as_in_a_pool_process")
def test_a_call_in_a_plain_body_runs_under_its_key(bank: Celery, entries: Entries) -> None:
    @bank.task(name="test.plain", shared=False)
    def plain() -> Any:
        return [app_module.deposit("a"), app_module.deposit("a")]

    result = plain.apply()
    assert result.state == "SUCCESS"
    assert result.result == [{"account": "a", "amount": 1}] * 2
    assert entries("a") == 1


@pytest.mark.parametrize("was_called_before", [True, False])
def test_a_call_in_a_last_look_begins_no_other_operation(
    bank: Celery, deliveries: Deliveries, record: Record, engine: Engine, was_called_before: bool
) -> None:
    def body(self: Any) -> Any:
        self.effect("call", Provider())
        if self.request.retries == 0 and not was_called_before:
            raise ValueError("before the call")
        called = app_module.deposit("a")
        if self.request.retries == 0:
            raise ValueError("after the call")
        return called

    task = make_task(bank, body, max_attempts=1)
    assert deliveries.deliver(task, key="outer").state == "RETRY"
    operations.make_due(engine, "outer")
    looked = deliveries.deliver(task, key="outer")
    if was_called_before:
        assert (looked.value, record("outer").status) == ({"account": "a", "amount": 1}, "completed")
    else:
        assert (code(record("outer")), record("a")) == ("unfinished", None)


# ---------------------------------------------------------------- retry, Ignore and Reject


@pytest.mark.parametrize(
    ("given", "state"),
    [
        ({"args": ("a", 2)}, "RETRY"),
        ({"args": ("a",), "kwargs": {"amount": 2}}, "RETRY"),
        ({"kwargs": {"amount": 2}}, "RETRY"),
        ({"args": ("b", 2)}, "FAILURE"),
        ({"args": ("a",), "kwargs": {}}, "FAILURE"),
        ({"kwargs": {"amount": object()}}, "FAILURE"),
        ({"args": ("a", 2, 3)}, "FAILURE"),
    ],
)
def test_retry_accepts_the_same_arguments_and_no_others(
    bank: Celery, deliveries: Deliveries, record: Record, given: dict[str, Any], state: str
) -> None:
    def body(self: Any, account: str, amount: int = 1) -> None:
        self.retry(countdown=1, **given)

    assert deliveries.deliver(make_task(bank, body, key="{account}"), "a", amount=2).state == state
    if state == "RETRY":
        assert record("a").status == "released"
    else:
        assert (code(record("a")), record("a").attempts) == ("unsupported_control", 1)


def test_reject_ends_the_operation_at_once_despite_autoretry(
    bank: Celery, deliveries: Deliveries, record: Record
) -> None:
    def body(self: Any) -> None:
        raise Reject("broken", requeue=True)

    assert deliveries.deliver(make_task(bank, body, autoretry_for=(Exception,)), key="a").state == "FAILURE"
    assert (code(record("a")), record("a").attempts) == ("unsupported_control", 1)


def test_max_retries_is_the_limit_of_attempts(
    bank: Celery, deliveries: Deliveries, record: Record, engine: Engine
) -> None:
    def body(self: Any) -> None:
        raise ValueError(f"{self.request.retries} of {self.max_retries}")

    task = make_task(bank, body, max_retries=1)
    assert (task.max_retries, task.max_attempts) == (1, 2)
    assert deliveries.deliver(task, key="a").state == "RETRY"
    operations.make_due(engine, "a")
    last = deliveries.deliver(task, key="a")
    assert (last.state, str(last.value)) == ("FAILURE", "1 of 1")
    assert (code(record("a")), record("a").attempts) == ("attempts_exhausted", 2)


def test_a_retry_asked_for_without_raising_is_another_attempt(
    bank: Celery, deliveries: Deliveries, record: Record, entries: Entries, engine: Engine
) -> None:
    def body(self: Any) -> str:
        self.session.execute(ROW)
        if self.request.retries == 0:
            self.retry(countdown=0, throw=False)
        return "paid"

    task = make_task(bank, body)
    assert deliveries.deliver(task, key="k").state == "RETRY"
    assert (record("k").status, entries("row")) == ("released", 0)
    make_due(engine, "k")
    assert deliveries.deliver(task, key="k", origin="retry").value == "paid"
    assert entries("row") == 1


def test_more_retries_than_the_task_has_are_refused_at_the_first(
    bank: Celery, deliveries: Deliveries, record: Record
) -> None:
    def body(self: Any) -> None:
        raise self.retry(countdown=0, max_retries=10)

    assert deliveries.deliver(make_task(bank, body), key="k").state == "FAILURE"
    assert code(record("k")) == "unsupported_control"
    assert "give the task max_retries=10" in record("k").error


def test_retry_kwargs_set_the_limit_of_attempts_or_are_refused(bank: Celery) -> None:
    def body(self: Any) -> None: ...

    many = {"autoretry_for": (ValueError,), "retry_kwargs": {"max_retries": 10}}
    assert make_task(bank, body, **many).max_retries == 10
    assert make_task(bank, body, max_attempts=20, **many).max_retries == 19
    with pytest.raises(
        SettingsError, match=r"^retry_kwargs of test\.\d+: max_retries=10 is more than its max_attempts=5"
    ):
        make_task(bank, body, max_attempts=5, **many).max_retries  # noqa: B018
    with pytest.raises(SettingsError, match=r"^retry_kwargs of test\.\d+: max_retries: must be 0 or more, got None"):
        make_task(bank, body, retry_kwargs={"max_retries": None}).max_retries  # noqa: B018


def test_a_body_may_catch_that_no_retry_is_left(bank: Celery, deliveries: Deliveries) -> None:
    def body(self: Any) -> Any:
        try:
            self.retry()
        except self.MaxRetriesExceededError:
            return "given up"

    assert deliveries.deliver(make_task(bank, body, max_retries=0), key="a").value == "given up"


def test_max_retries_agrees_with_max_attempts(configured: Celery) -> None:
    def body(self: Any) -> None: ...

    assert make_task(configured, body).max_retries == 4
    assert make_task(configured, body, max_attempts=3).max_retries == 2
    assert make_task(configured, body, max_attempts=3, max_retries=2).max_attempts == 3

    class Patient(Task):
        max_retries = 10

    class PatientOperation(Patient, IdempotentTask):
        abstract = True

    assert configured.task(base=PatientOperation, name="test.patient", shared=False)(body).max_attempts == 11
    with pytest.raises(SettingsError, match=r"max_retries=3 and max_attempts=3 of test\.\d+: give one of them"):
        _ = make_task(configured, body, max_attempts=3, max_retries=3).name
    for endless in (None, -1, True):
        with pytest.raises(SettingsError, match=rf"^max_retries of test\.\d+: must be 0 or more, got {endless}"):
            _ = make_task(configured, body, max_retries=endless).name


# ---------------------------------------------------------------- arguments


def test_without_typing_arguments_that_do_not_fit_are_left_to_the_body(
    bank: Celery, deliveries: Deliveries, record: Record, engine: Engine
) -> None:
    def body(self: Any, account: str) -> None: ...

    with pytest.raises(InvalidArguments, match="too many positional arguments"):
        accept(engine, make_task(bank, body), "a", "b")
    task = make_task(bank, body, typing=False, max_attempts=1)
    with Session(transactional(engine)) as session, session.begin():
        task.enqueue(session, "a", "b", idempotency_key="a")
    outcome = deliveries.deliver(task, "a", "b", key="a")
    assert isinstance(outcome.value, TypeError)
    assert code(record("a")) == "attempts_exhausted"
    with engine.connect() as connection:
        (row,) = operations.outbox(connection)
    assert row.fingerprint == record("a").fingerprint


def test_pydantic_arguments_are_one_call_as_models_and_as_json(
    bank: Celery, deliveries: Deliveries, record: Record, engine: Engine
) -> None:
    seen: list[Order] = []

    def body(self: Any, order: Order) -> Receipt:
        seen.append(order)
        return Receipt(text=f"{order.amount} paid")

    body.__annotations__ |= {"order": Order, "return": Receipt}  # Celery 5.5.0 reads no strings
    task = make_task(bank, body, pydantic=True, key=lambda arguments: arguments["order"]["number"])
    # before 5.7 Celery sends no models
    order: Any = (
        Order(number="a", amount=3) if hasattr(Task, "_dump_pydantic_arguments") else {"number": "a", "amount": 3}
    )
    with Session(transactional(engine)) as session, session.begin():
        task.enqueue(session, order)
        task.enqueue(session, order={"number": "a", "amount": 3})
        task.apply_async((order,))
    with engine.connect() as connection:
        rows = operations.outbox(connection)
    assert json.loads(json.loads(rows[0].message)["body"])[0] == [{"number": "a", "amount": 3}]
    assert rows[0].fingerprint == rows[1].fingerprint
    assert deliveries.deliver(task, {"number": "a", "amount": 3}, key="a").value == {"text": "3 paid"}
    assert task(order) == task.apply((order,)).get() == {"text": "3 paid"}
    assert seen == [Order(number="a", amount=3)]
    assert record("a").fingerprint == rows[0].fingerprint


# ---------------------------------------------------------------- results


def test_a_result_that_is_a_result_is_stored_as_celery_stores_it(
    bank: Celery, deliveries: Deliveries, record: Record
) -> None:
    parent = AsyncResult("parent", app=bank)
    for key, result in {
        "one": AsyncResult("id", parent=parent, app=bank),
        "several": GroupResult("group", [AsyncResult("1", app=bank), AsyncResult("2", app=bank)], app=bank),
    }.items():
        task = make_task(bank, lambda self, result=result: result)
        assert deliveries.deliver(task, key=key).state == "SUCCESS"
        repeated = deliveries.deliver(task, key=key).value
        again = result_from_tuple(repeated, app=bank)
        assert (again, again.parent) == (result, result.parent)
        assert json.loads(record(key).result) == repeated


def test_ignore_result_and_store_errors_even_if_ignored_are_honoured(
    bank: Celery, deliveries: Deliveries, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = CacheBackend(app=bank, url="memory://")
    monkeypatch.setattr(type(bank), "backend", backend)

    def body(self: Any, fails: bool) -> str:
        if fails:
            raise Reject
        return "done"

    task = make_task(bank, body, ignore_result=True, store_errors_even_if_ignored=True)
    kept = make_task(bank, lambda self: "done", ignore_result=False)
    for key, fails in (("a", False), ("b", True)):
        deliveries.deliver(task, fails, key=key, task_id=key)
    deliveries.deliver(kept, key="c", task_id="c")
    assert [backend.get_state(task_id) for task_id in "abc"] == ["PENDING", "FAILURE", "SUCCESS"]
    assert json.loads(record("a").result) == "done"


def test_enqueue_sends_whether_the_result_is_ignored(bank: Celery, engine: Engine) -> None:
    for ignored in (True, False):
        task = make_task(bank, lambda self: None, ignore_result=ignored, key=lambda arguments: "a")
        id = accept(engine, task)
        with engine.connect() as connection:
            (row,) = operations.outbox(connection, id)
        assert json.loads(row.message)["headers"]["ignore_result"] is ignored


# ---------------------------------------------------------------- errbacks


def test_an_idempotent_errback_of_the_new_style_runs_once_for_each_failed_task(
    bank: Celery, deliveries: Deliveries, record: Record, engine: Engine
) -> None:
    seen: list[tuple[str, str, Any]] = []

    @bank.task(base=IdempotentTask, name="test.errback", shared=False, key="{request}")
    def errback(request: Any, exc: Any, traceback: Any, note: str = "none") -> None:
        seen.append((request.id, type(exc).__name__, note))
        if len(seen) == 1:
            raise ConnectionError("once more")

    failing = app_module.failing
    for task_id in ("first", "first", "second"):
        errbacks = [errback.s(), errback.s(note="other")]
        deliveries.deliver(failing, "a", "permanent", task_id=task_id, headers={"errbacks": errbacks})
    assert seen == [
        ("first", "PermanentError", "none"),
        ("first", "PermanentError", "none"),  # its second attempt
        ("first", "PermanentError", "other"),
        ("second", "OperationFailed", "none"),
        ("second", "OperationFailed", "other"),
    ]


def test_a_plain_errback_of_the_new_style_is_called(bank: Celery, deliveries: Deliveries) -> None:
    seen: list[tuple[str, str]] = []

    @bank.task(name="test.plain_errback", shared=False)
    def errback(request: Any, exc: Any, traceback: Any) -> None:
        seen.append((request.id, str(exc)))

    deliveries.deliver(app_module.failing, "a", "permanent", task_id="id", headers={"errbacks": [errback.s()]})
    assert seen == [("id", "no such account")]


# ---------------------------------------------------------------- replace


def test_a_replaced_operation_completes_and_every_delivery_sends_the_replacement(
    bank: Celery, deliveries: Deliveries, record: Record, entries: Entries
) -> None:
    def body(self: Any) -> None:
        self.session.execute(ROW)
        self.replace(app_module.deposit.s("a"))

    task = make_task(bank, body)
    sent: list[Any] = []
    with bank.connection_for_read() as connection:
        queue = connection.SimpleQueue(bank.amqp.queues[bank.conf.task_default_queue])
        for task_id in ("first", "second"):
            outcome = deliveries.deliver(
                task, key="k", task_id=task_id, headers={"chain": [app_module.deposit.si("z")]}
            )
            assert outcome.state == "IGNORED"
            sent.append(queue.get(timeout=10))
    assert [(message.headers["id"], message.headers["idempotency-key"]) for message in sent] == [
        ("first", "a"),
        ("second", "a"),
    ]
    assert [message.payload[2]["chain"][0]["args"] for message in sent] == [["z"], ["z"]]
    assert (record("k").status, entries("row")) == ("completed", 1)


def test_a_replacement_that_cannot_be_sent_after_the_commit_stays_owed(
    configured: Celery, monkeypatch: pytest.MonkeyPatch, deliveries: Deliveries, record: Record, engine: Engine
) -> None:
    def body(self: Any) -> None:
        self.replace(app_module.deposit.s("a").set(retry=False))

    task = make_task(configured, body)
    configured.conf.broker_write_url = "amqp://127.0.0.1:9//"  # where no broker is
    configured.conf.broker_transport_options = {
        **configured.conf.broker_transport_options,
        "max_retries": 1,
        "interval_start": 0,
    }
    monkeypatch.setattr(configured.amqp, "_producer_pool", None)
    assert deliveries.deliver(task, key="k").state == "IGNORED"
    assert record("k").status == "completed"
    with engine.connect() as connection:
        (row,) = operations.outbox(connection)
    assert (row.key, row.origin, row.settled_at) == ("k", "retry", None)
    # to a duplicate as well, whose operation has ended
    assert deliveries.deliver(task, key="k", task_id="second").state == "IGNORED"
    with engine.connect() as connection:
        assert [each.origin for each in operations.outbox(connection)] == ["retry", "retry"]


def test_a_replacement_that_can_never_be_sent_ends_as_a_dead_letter(
    bank: Celery, deliveries: Deliveries, record: Record, engine: Engine
) -> None:
    def body(self: Any) -> None:
        self.replace(app_module.deposit.s("a").set(queue="of no application"))

    task = make_task(bank, body)
    assert [deliveries.deliver(task, key="k").state for _ in range(2)] == ["FAILURE", "FAILURE"]
    assert record("k").status == "completed"
    with engine.connect() as connection:
        assert [letter.reason for letter in operations.dead_letters(connection)] == ["unsupported_control"]
        assert operations.outbox(connection) == []


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (lambda: group(app_module.deposit.s("a"), app_module.deposit.s("b")), "call_refused"),
        (lambda: app_module.returning.s("no key"), "call_refused"),
        (lambda: group(app_module.returning.s("no key"), app_module.deposit.s("a")), "call_refused"),
        (lambda: app_module.returning.s("no key") | app_module.deposit.s(), "call_refused"),
        (lambda: app_module.deposit.s("a").set(expires=60), "call_refused"),
        (lambda: chain(), "call_refused"),
        (lambda: app_module.deposit.s(object()), "invalid_result"),
        (lambda: app_module.deposit.s("a").set(chord=app_module.deposit.s("b")), "call_refused"),
    ],
)
def test_a_replacement_that_could_never_be_sent_ends_the_operation(
    bank: Celery, deliveries: Deliveries, record: Record, of: Any, expected: str
) -> None:
    def body(self: Any) -> None:
        self.replace(of())

    assert deliveries.deliver(make_task(bank, body), key="k").state == "FAILURE"
    assert (code(record("k")), record("k").attempts) == (expected, 1)


@pytest.mark.parametrize("of", [group, lambda: group() | app_module.returning.s().set(idempotency_key="tail")])
def test_an_empty_group_is_a_replacement_with_no_results(
    bank: Celery, deliveries: Deliveries, record: Record, monkeypatch: pytest.MonkeyPatch, of: Any
) -> None:
    monkeypatch.setattr(type(bank), "backend", CacheBackend(app=bank, url="memory://"))

    def body(self: Any) -> None:
        self.replace(of())

    with bank.connection_for_read() as connection:
        queue = connection.SimpleQueue(bank.amqp.queues[bank.conf.task_default_queue])
        assert deliveries.deliver(make_task(bank, body), key="k", task_id="id").state == "IGNORED"
        sent = queue.get(timeout=10)
    assert (sent.headers["id"], sent.payload[0][0], record("k").status) == ("id", [], "completed")


@pytest.mark.parametrize("of", [chain, lambda: app_module.deposit.s("a").set(chord=app_module.deposit.s("b"))])
def test_what_celery_takes_for_no_replacement_is_its_own_error(bank: Celery, deliveries: Deliveries, of: Any) -> None:
    def body(self: Any) -> None:
        self.replace(of())

    failed = deliveries.deliver(make_task(bank, body), key="k")
    assert isinstance(failed.value, ImproperlyConfigured)


def test_an_operation_does_not_replace_itself(bank: Celery, deliveries: Deliveries, record: Record) -> None:
    made: list[Any] = []

    def body(self: Any, a: str) -> None:
        self.replace(made[0].si(a))

    made.append(make_task(bank, body, key="{a}"))
    assert deliveries.deliver(made[0], "k").state == "FAILURE"
    assert code(record("k")) == "call_refused"


def test_operations_do_not_replace_each_other_for_ever(bank: Celery, deliveries: Deliveries, record: Record) -> None:
    def body(self: Any) -> None:
        self.replace(app_module.deposit.s("a"))

    task, often = make_task(bank, body), {"replaced_task_nesting": 1_000}
    assert deliveries.deliver(task, key="k", headers=often).state == "FAILURE"
    assert code(record("k")) == "unsupported_control"
    assert deliveries.deliver(task, key="other").state == "IGNORED"
    assert deliveries.deliver(task, key="other", headers=often).state == "FAILURE"
    assert record("other").status == "completed"


@pytest.mark.usefixtures("as_in_a_pool_process")
def test_an_eager_replacement_gives_its_result(bank: Celery, entries: Entries) -> None:
    def body(self: Any) -> None:
        self.replace(app_module.deposit.s("a") | app_module.returning.s().set(idempotency_key="tail"))

    task = make_task(bank, body, key=lambda arguments: "k")
    assert task() == task() == {"account": "a", "amount": 1}
    assert (entries("a"), entries("returning")) == (1, 1)


def test_a_body_is_told_what_its_statements_notice(bank: Celery, deliveries: Deliveries) -> None:
    heard: list[str | None] = []

    def body(self: IdempotentTask) -> str:
        driver: Any = self.session.connection().connection.driver_connection
        driver.add_notice_handler(lambda diagnostic: heard.append(diagnostic.message_primary))
        self.session.execute(text("DO $$ BEGIN RAISE NOTICE 'three rows merged'; RAISE WARNING 'one skipped'; END $$"))
        return "done"

    assert deliveries.deliver(make_task(bank, body), key="k").state == "SUCCESS"
    assert heard == ["three rows merged", "one skipped"]
