"""What fails after an operation is committed is no failure of it: neither errbacks nor `on_failure` undo what was done."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import kombu.pools
import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery
from celery.app.trace import trace_task_ret
from sqlalchemy import Engine, text

from idempotency import IdempotentTask
from idempotency.application import close_runtime
from idempotency.errors import ReplayRefused
from idempotency.operate import discard
from idempotency.operate.people import Person
from idempotency.operate.replay import replay
from idempotency.wire.message import Message
from idempotency.worker import following
from tests.support import bank as b
from tests.support import queues
from tests.support.batches import accounts, message, put, put_one, run, states
from tests.support.operators import ANN
from tests.support.tasks import make_task, transactional

NOBODY = "amqp://guest:guest@127.0.0.1:1//"
WAYS: dict[str, dict[str, Any]] = {
    "alone": {},
    "each": {"batch": 10, "batch_commit": "each"},
    "together": {"batch": 10},
}
Send = Callable[..., list[Any]]


@pytest.fixture
def told(bank: Celery) -> Iterator[list[str]]:
    """What was told of a failure: to the errback `test.undo`, and to `on_failure`."""
    said: list[str] = []

    @bank.task(name="test.undo")
    def undo(request: Any, error: Any, traceback: Any) -> None:
        said.append(f"undo {type(error).__name__}")

    bank.finalize()
    bank.set_current()
    queues.drained(bank)
    yield said
    bank.tasks.pop("test.undo")


@pytest.fixture(params=WAYS)
def made(request: pytest.FixtureRequest, bank: Celery, told: list[str]) -> Callable[..., tuple[Any, Send]]:
    """Makes a task, and what delivers two messages of it with these options: how each ended."""

    def make(body: Callable[..., Any], **embedded: Any) -> tuple[Any, Send]:
        def on_failure(self: IdempotentTask, error: BaseException, *_: Any) -> None:
            told.append(f"on_failure {type(error).__name__}")

        task = make_task(bank, body, key="{account}", on_failure=on_failure, **WAYS[request.param])
        undo = json.loads(json.dumps(bank.signature("test.undo")))
        embed = {"callbacks": None, "errbacks": [undo], "chain": None, "chord": None, **embedded}
        sent = [message(bank, task, body=json.dumps([[f"e{n}"], {}, embed])) for n in range(2)]

        def send() -> list[Any]:
            if request.param == "alone":
                return [trace_task_ret(task.name, *each, app=bank) for each in sent]
            return run(bank, task, *sent)

        return task, send

    return make


@contextmanager
def broker_away(bank: Celery) -> Iterator[None]:
    def to(url: str) -> None:
        bank.conf.broker_url = url
        bank.amqp.__dict__.pop("_producer_pool", None)
        bank.amqp._producer_pool = bank._pool = None
        kombu.pools.reset()

    before = bank.conf.broker_url
    to(NOBODY)
    try:
        yield
    finally:
        to(before)


def follow(key: str) -> Any:
    return json.loads(json.dumps(b.returning.s().set(idempotency_key=key)))


def waiting(engine: Engine) -> int:
    with engine.connect() as connection:
        query = "SELECT count(*) FROM idempotency.outbox WHERE status = 'pending'"
        return int(connection.execute(text(query)).scalar_one())


def how(ended: list[Any]) -> list[str | None]:
    """What is raised to Celery for each message; of one that was not begun, too, nothing."""
    raised = [each[1].exception if each is not None and each[0] else None for each in ended]
    return [None if each is None else repr(getattr(each, "exc", each)) for each in raised]


@pytest.mark.few(3)
@pytest.mark.parametrize("embedded", ["chain", "callbacks"])
def test_what_the_broker_does_not_take_is_owed(
    embedded: str, made: Any, bank: Celery, engine: Engine, told: list[str]
) -> None:
    _, send = made(put_one, **{embedded: [follow("next"), follow("another")][: 1 + (embedded == "callbacks")]})
    with broker_away(bank):
        first = send()
    assert how(first) == ["Ignore()", "Ignore()"]
    assert waiting(engine) == 2  # the messages are kept
    assert states(engine) == {"e0": "completed", "e1": "completed"}
    assert how(send()) == [None, None]
    assert told == []
    assert accounts(engine) == {"e0": [1], "e1": [1]}
    assert len(queues.drained(bank)) == (2 if embedded == "chain" else 4)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # Celery's, of an error outside of a body
@pytest.mark.parametrize("error", [RuntimeError("no memory"), SoftTimeLimitExceeded()], ids=["backend", "limit"])
def test_a_result_that_the_backend_does_not_store_is_told_as_no_failure(
    error: Exception, made: Any, engine: Engine, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    task, send = made(put_one)
    monkeypatch.setattr(type(task.backend), "mark_as_done", raise_(error))
    send()
    assert states(engine) == {"e0": "completed", "e1": "completed"}
    assert told == []


def test_a_body_that_fails_is_told_as_one(made: Any, told: list[str]) -> None:
    def body(self: IdempotentTask, account: str) -> None:
        raise ValueError(account)

    task, send = made(body)
    task.max_attempts = 1
    send()
    assert told.count("undo ValueError") == told.count("on_failure ValueError") == 2


NEVER: dict[str, Callable[[Celery], Any]] = {
    "larger than a broker takes": lambda bank: b.returning.s().set(idempotency_key="next"),
    "no such queue": lambda bank: bank.signature("celery.ping", immutable=True).set(queue="nowhere"),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("what", NEVER)
def test_what_can_never_be_sent_is_a_dead_letter_and_the_task_a_success(
    what: str, made: Any, bank: Celery, engine: Engine, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(self: IdempotentTask, account: str) -> str:
        put(self, account)
        return "x" * (128 * 1024)

    close_runtime(bank)
    bank.conf.idempotency_arguments_limit = 64 * 1024
    monkeypatch.setattr(following, "BODY_LIMIT", 64 * 1024)
    monkeypatch.setattr(bank.amqp.queues, "create_missing", False)
    _, send = made(body, chain=[json.loads(json.dumps(NEVER[what](bank)))])
    assert how(send()) == [None, None]
    assert states(engine) == {"e0": "completed", "e1": "completed"}
    with engine.connect() as connection:
        letters = connection.execute(text("SELECT id, key, reason, payload FROM idempotency.dead_letters")).all()
    assert sorted((each.key, each.reason) for each in letters) == [(key, "unsupported_control") for key in ("e0", "e1")]
    assert told == []
    # as its page says: the message has what is missing; the letter is not replayed, but discarded
    assert all(json.loads(Message.from_text(each.payload).body)[2]["chain"] for each in letters)
    with pytest.raises(ReplayRefused):
        replay(bank, letters[0].id, ANN)
    with transactional(engine).begin() as connection:
        discard.request(connection, Person("ann", "operator"), letters[0].id, "sent by hand")
        discard.approve(connection, Person("ben", "admin"), letters[0].id, app=bank)
    assert queues.drained(bank) == []


def test_a_replacement_that_can_never_be_sent_undoes_nothing(
    made: Any, bank: Celery, engine: Engine, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(self: IdempotentTask, account: str) -> None:
        put(self, account)
        self.replace(bank.signature("celery.ping", immutable=True).set(queue="nowhere"))

    monkeypatch.setattr(bank.amqp.queues, "create_missing", False)
    _, send = made(body)
    assert [said is not None and said.startswith("UnsupportedControl") for said in how(send())] == [True, True]
    assert states(engine) == {"e0": "completed", "e1": "completed"}
    assert told == []


def test_a_time_limit_while_what_follows_is_sent_keeps_the_message_in_the_outbox(
    made: Any, bank: Celery, engine: Engine, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, send = made(put_one, chain=[follow("next")])
    with monkeypatch.context() as patched:
        patched.setattr(b.returning, "apply_async", raise_(SoftTimeLimitExceeded()))
        ended = send()
    assert how(ended)[0] == "Ignore()"
    assert waiting(engine) >= 1
    assert told == []


def raise_(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail
