"""Every bad input, by its number: refused by field and limit, showing neither body nor secret, with nothing written.

The number begins the name of each case (`pytest -k 03-`); `ELSEWHERE` names the tests of the rows, or parts of rows,
that need more than this file has, and the last test sees that no number is missing.

     1-4  the idempotency key: none, blank, too long, other characters    16-20  messages that no worker can run
       7  the same key with other arguments                               21-23  results, and rows without a way out
     8-9  a key that is running; another tenant's                         28-30  settings, servers, addresses
  10, 11  arguments: the same in another spelling; not JSON                   31  replays that cannot be
  13, 14  amounts, effects, refunds                                           34  commands on a machine that lacks something

There is no HTTP edge, no incoming or outgoing webhook, no admin interface and no saga yet: 5, 6, 12, 15, 24-27, 32, 33.
"""

from __future__ import annotations

import ast
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from amqp.exceptions import AMQPError
from celery import Celery
from kombu.exceptions import OperationalError as BrokerError
from sqlalchemy import Connection, Engine, create_engine, make_url, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session, sessionmaker

import services
from idempotency import (
    FingerprintMismatch,
    IdempotentTask,
    InvalidArguments,
    InvalidKey,
    MissingKey,
    OperationBusy,
    OperationId,
    OperationNotFound,
    lookup,
)
from idempotency.attempt.runtime import Runtime
from idempotency.checks import doctor as diagnosis
from idempotency.checks.startup import refuse_to_lose
from idempotency.cli.dead_letter_commands import _chosen
from idempotency.errors import IdempotencyError
from idempotency.letters.dead_letter_queue import DeadLetterConsumer
from idempotency.observe import metrics
from idempotency.relay.relay import Relay, Relayed
from idempotency.store import dead_letters as letters
from idempotency.store import outbox
from idempotency.store.dead_letters import BULK_LIMIT, BulkRefused, ReplayRefused, Selection
from idempotency.wire import keys
from idempotency.wire.message import KEY_HEADER, Message
from tasks import validation
from tests.support import bank as b
from tests.support import operations as op
from tests.support.dead_messages import headers, publish
from tests.support.deliveries import Deliveries
from tests.support.processes import Worker, eventually
from tests.support.refused_messages import PAST, REFUSED, SECRET
from tests.support.relaying import make_due
from tests.support.tasks import make_task

NOTHING_YET = {5, 6, 12, 15, 24, 25, 26, 27, 32, 33}
ELSEWHERE = {
    13: ("tests/pipeline/test_payments.py", "test_a_bad_purchase_is_refused_by_field_and_nothing_is_written"),
    14: (
        "tests/pipeline/test_payments.py",
        "test_a_bad_refund_is_refused_by_field_and_nothing_is_written",
        "test_a_refund_of_more_than_is_left_is_refused_and_gives_nothing_back",
        "test_two_refunds_that_race_past_the_total_give_back_one",
        "test_a_refund_of_a_pending_payment_is_deferred_without_using_an_attempt",
        "test_a_refund_of_what_was_never_captured_is_refused_and_the_row_says_why",
    ),
    28: ("tests/integration/test_doctor.py", "test_a_worker_that_would_lose_work_does_not_start"),
    29: (
        "tests/integration/test_doctor.py",
        "test_a_database_that_forgets_in_a_power_cut_is_refused",
        "test_a_redis_that_forgets_or_refuses_leases_is_a_warning",
        "test_a_worker_on_old_tables_does_not_start",
    ),
    30: (
        "tests/integration/test_doctor.py",
        "test_an_address_that_does_not_work_is_told_without_its_password",
        "test_neither_a_worker_nor_the_relay_starts_with_an_address_that_is_none",
    ),
    34: (
        "tests/integration/test_service_servers.py",
        "test_without_rabbitmq_a_second_redis_is_the_broker",
        "test_a_server_that_cannot_start_says_why_without_its_password",
    ),
}


@pytest.fixture
def nothing_happens(bank: Celery, connection: Connection) -> Callable[[], Any]:
    """Within the block no row is written and no message published."""

    def counts() -> dict[str, int]:
        tables = ("idempotency.records", "idempotency.outbox", "idempotency.dead_letters", "idempotency.audit")
        rows = {
            table: connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one()
            for table in (*tables, "entries", "failures")
        }
        with bank.connection_for_write() as broker:
            queue = bank.amqp.queues[bank.conf.task_default_queue](broker.default_channel)
            return rows | {"messages": queue.declare() and queue.queue_declare(passive=True).message_count}

    @contextmanager
    def nothing_happens() -> Iterator[None]:
        before = counts()
        yield
        assert counts() == before

    return nothing_happens


@pytest.fixture
def task_of(bank: Celery) -> Iterator[Callable[..., Any]]:
    """Makes tasks of a body, which end with the test: a worker would refuse to start with some of them."""
    made = []

    def task_of(body: Any, **options: Any) -> Any:
        made.append(make_task(bank, body, **options))
        return made[-1]

    yield task_of
    for task in made:
        bank.tasks.unregister(task)


def cases(table: dict[str, Any]) -> list[Any]:
    """The rows of a table as pytest takes them."""
    return [pytest.param(*(row if isinstance(row, tuple) else (row,)), id=name) for name, row in table.items()]


def nested(depth: int) -> Any:
    value: Any = SECRET
    for _ in range(depth):
        value = [value]
    return value


# ---------------------------------------------------------------- calls


@dataclass(frozen=True)
class Call:
    """A call, refused with this error and this text."""

    error: type[Exception]
    says: str
    task: Any = b.returning
    args: tuple[Any, ...] = (SECRET,)
    options: dict[str, Any] = field(default_factory=dict)


def keyed(error: type[Exception], says: str, key: Any) -> Call:
    return Call(error, says, options={"idempotency_key": key})


def given(error: type[Exception], says: str, value: Any) -> Call:
    return Call(error, says, args=([SECRET, value],), options={"idempotency_key": "k"})


CALLS = {
    "01-no-key": Call(MissingKey, r"tests\.bank\.returning: give idempotency_key=, or the task a key template"),
    "01-no-argument-for-the-key": Call(MissingKey, "argument account: .* not given", b.deposit, (None, 5)),
    "02-key-empty": keyed(InvalidKey, "idempotency key: must not be empty or blank", ""),
    "02-key-blank": keyed(InvalidKey, "idempotency key: must not be empty or blank", " \t "),
    "02-argument-for-the-key-blank": Call(InvalidKey, "argument account: .* it is blank", b.deposit, (" ", 5)),
    "03-key-longer-than-255": keyed(InvalidKey, "idempotency key: at most 255 characters, got 256", SECRET[:1] * 256),
    "03-tenant-longer-than-255": Call(
        InvalidKey, "tenant: at most 255", options={"idempotency_key": "k", "tenant": "t" * 256}
    ),
    "04-key-with-NUL": keyed(InvalidKey, r"only printable ASCII, got U\+0000 at position 19", f"{SECRET}\0"),
    "04-key-with-CR-LF": keyed(InvalidKey, r"got U\+000D at position 19", f"{SECRET}\r\nX: y"),
    "04-key-with-a-control-character": keyed(InvalidKey, r"got U\+001B at position 0", f"\x1b[31m{SECRET}"),
    "04-key-not-ASCII": keyed(InvalidKey, r"got U\+00E9 at position 19", f"{SECRET}é"),
    "04-key-with-a-blank-at-its-end": keyed(InvalidKey, "must not begin or end with a blank", f"{SECRET} "),
    "04-key-no-text": keyed(InvalidKey, "idempotency key: must be text or a UUID, got int", 17),
    "11-NaN": given(InvalidArguments, "arguments: not JSON: ValueError", float("nan")),
    "11-Infinity": given(InvalidArguments, "arguments: not JSON: ValueError", float("-inf")),
    "11-1e999": given(InvalidArguments, "arguments: not JSON: ValueError", json.loads("1e999")),
    "11-depth-1000": given(InvalidArguments, "arguments: nested at most 100 deep", nested(1000)),
    "11-depth-101": given(InvalidArguments, "arguments: nested at most 100 deep", nested(99)),
    "11-not-JSON": given(InvalidArguments, "arguments: not JSON: ", object()),
    "11-lone-surrogate-in-the-key": keyed(InvalidKey, r"got U\+D800 at position 19", f"{SECRET}\ud800"),
    "11-too-large": given(InvalidArguments, "arguments: at most 1048576 bytes as JSON, got 11000", "x" * 1_100_000),
    "11-another-argument": Call(InvalidArguments, "arguments: too many positional", b.deposit, ("k", 5, SECRET)),
}


@pytest.mark.parametrize("call", cases(CALLS))
def test_a_call_is_refused_where_it_is_made(
    call: Call, bank: Celery, nothing_happens: Callable[[], Any], engine: Engine
) -> None:
    ways = {
        "apply_async": lambda _: call.task.apply_async(call.args, **call.options),
        "a signature": lambda _: call.task.s(*call.args).apply_async(**call.options),
        "enqueue": lambda session: call.task.enqueue(session, *call.args, **call.options),
        "apply": lambda _: call.task.apply(call.args, **call.options),
    }
    with nothing_happens():
        for way, make in ways.items():
            with Session(engine) as session, session.begin():
                with pytest.raises(call.error) as refused:
                    make(session)
                assert re.search(call.says, str(refused.value)), way
                assert SECRET not in "".join(traceback.format_exception_only(refused.value))


@pytest.mark.parametrize("key", ["k", "k" * 255, "a b~!", " ~".strip(), "0192f0a4-7b1c-7d3e-8f00-0123456789ab"])
def test_a_call_with_a_good_key_is_accepted(key: str, bank: Celery, connection: Connection) -> None:
    b.returning.enqueue(connection, SECRET, idempotency_key=key)
    assert [row.key for row in op.outbox(connection)] == [key]


def test_what_is_no_session_is_refused_by_its_type(bank: Celery, engine: Engine) -> None:
    with pytest.raises(InvalidArguments, match="must be a SQLAlchemy Session or Connection, got sessionmaker"):
        b.deposit.enqueue(sessionmaker(engine), SECRET)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value", cases({"11-twin-NUL": "a\0b", "11-twin-lone-surrogate": "\ud800", "11-twin-depth-100": nested(98)})
)
def test_arguments_that_are_unusual_arrive_as_they_were_sent(value: Any, deliveries: Deliveries) -> None:
    for _ in range(2):
        assert deliveries.deliver(b.returning, value, key="k").value == value


EXPIRING: dict[str, Callable[[Any, Session], Any]] = {
    "20-expires-in-the-call": lambda _, session: b.deposit.apply_async((SECRET,), expires=-1),
    "20-expires-in-a-signature": lambda _, session: b.deposit.s(SECRET).set(expires=PAST).apply_async(),
    "20-expires-of-the-task": lambda expiring, session: expiring.delay(SECRET),
    "20-expires-in-enqueue": lambda _, session: b.deposit.enqueue(session, SECRET, expires=60),
}


@pytest.mark.parametrize("call", cases(EXPIRING))
def test_what_would_expire_is_refused_at_publish(
    call: Callable[[Any, Session], Any],
    task_of: Callable[..., Any],
    engine: Engine,
    nothing_happens: Callable[[], Any],
) -> None:
    expiring = task_of(lambda self, account: None, key="{account}", expires=60)
    with nothing_happens(), Session(engine) as session, pytest.raises(InvalidArguments, match="expires") as refused:
        call(expiring, session)
    assert SECRET not in str(refused.value)


# ---------------------------------------------------------------- used keys

ID = OperationId("default", b.deposit.name, "a1")


def fingerprint(amount: int) -> str:
    return keys.fingerprint({"account": "a1", "amount": amount})


@pytest.mark.parametrize(
    "state",
    cases({"07-completed": op.completed, "07-failed": op.failed, "07-started": op.started, "07-early": op.early}),
)
def test_a_used_key_with_other_arguments_is_refused_and_the_record_stays(
    state: Any, deliveries: Deliveries, connection: Connection, nothing_happens: Callable[[], Any]
) -> None:
    state(connection, ID, fingerprint=fingerprint(5))
    before = op.record(connection, ID)
    with nothing_happens(), pytest.raises(FingerprintMismatch, match="used with other arguments") as refused:
        b.deposit("a1", 666)
    delivered = deliveries.deliver(b.deposit, "a1", 666)
    assert isinstance(delivered.value, FingerprintMismatch)
    for said in (str(refused.value), str(delivered.value)):
        assert "666" not in said
    assert op.record(connection, ID) == before
    # one letter keeps what was asked for, however often it comes
    deliveries.deliver(b.deposit, "a1", 666)
    assert [letter.reason for letter in op.dead_letters(connection)] == ["fingerprint_mismatch"]


def test_07_twin_the_same_arguments_get_the_stored_result(deliveries: Deliveries, connection: Connection) -> None:
    op.completed(connection, ID, fingerprint=fingerprint(5), result='{"of": "then"}')
    assert deliveries.deliver(b.deposit, "a1", 5).value == {"of": "then"}
    assert b.deposit("a1", 5) == {"of": "then"}
    assert op.dead_letters(connection) == []


@pytest.mark.parametrize("state", cases({"08-started": op.started, "08-waits-for-its-next-attempt": op.early}))
def test_a_key_that_is_running_is_busy(
    state: Any, deliveries: Deliveries, connection: Connection, nothing_happens: Callable[[], Any]
) -> None:
    state(connection, ID, fingerprint=fingerprint(5))
    with nothing_happens():
        with pytest.raises(OperationBusy, match=r"tests\.bank\.deposit: another attempt holds this operation"):
            b.deposit("a1", 5)
        assert deliveries.deliver(b.deposit, "a1", 5).state == "IGNORED"
    row = op.record(connection, ID)
    assert row is not None
    assert row.duplicates == 2  # each let go only because it was counted


@pytest.mark.parametrize(
    "state", cases({"09-started": op.started, "09-completed": op.completed, "09-failed": op.failed, "09-none": None})
)
def test_another_tenants_key_is_independent_and_not_hinted_at(
    state: Any, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    theirs = OperationId("theirs", b.deposit.name, "a1")
    before = None
    if state is not None:
        state(connection, theirs, fingerprint=fingerprint(666))
        before = op.record(connection, theirs)
    # the same words whether they have it or not
    with pytest.raises(OperationNotFound, match=r"^tests\.bank\.deposit: no operation has this key$"):
        lookup(bank, b.deposit.name, "a1", tenant="mine")
    outcome = deliveries.deliver(b.deposit, "a1", 5, tenant="mine")
    assert (outcome.state, outcome.value) == ("SUCCESS", {"account": "a1", "amount": 5})
    assert op.record(connection, theirs) == before


@pytest.mark.parametrize(
    ("one", "other"),
    cases(
        {
            "10-members-in-another-order": ({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1}),
            "10-white-space": (json.loads('{"a":[1,2]}'), json.loads('{ "a" :\n [ 1 , 2 ] }')),
            "10-escapes": (json.loads('"\\u00e9"'), json.loads('"é"')),
        }
    ),
)
def test_the_same_json_in_another_spelling_is_the_same_request(
    one: Any, other: Any, deliveries: Deliveries, entries: Callable[[str], int]
) -> None:
    first = deliveries.deliver(b.returning, one, key="k")
    again = deliveries.deliver(b.returning, other, key="k")
    assert (first.state, again.state, again.value) == ("SUCCESS", "SUCCESS", first.value)
    assert entries("returning") == 1


# ---------------------------------------------------------------- amounts and effects

AMOUNTS = {
    "13-amount-a-float": (12.5, "amount_cents: must be an integer in the minor unit, got float"),
    "13-amount-NaN": (float("nan"), "amount_cents: must be an integer in the minor unit, got float"),
    "13-amount-text": (SECRET, "amount_cents: must be an integer in the minor unit, got str"),
    "13-amount-a-bool": (True, "amount_cents: must be an integer in the minor unit, got bool"),
    "13-amount-none": (None, "amount_cents: must be an integer in the minor unit, got NoneType"),
    "13-amount-negative": (-1, "amount_cents: must be between 1 and 99999999, got -1"),
    "13-amount-zero": (0, "amount_cents: must be between 1 and 99999999, got 0"),
    "13-amount-above-the-limit": (100_000_000, "amount_cents: must be between 1 and 99999999, got 100000000"),
    "13-amount-beyond-bigint": (2**63, "amount_cents: must be between 1 and 99999999, got 9223372036854775808"),
}


@pytest.mark.parametrize(("amount", "says"), cases(AMOUNTS))
def test_an_amount_is_refused_by_its_field_and_limit(amount: Any, says: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        validation.check_amount("amount_cents", amount, at_least=1)
    assert [validation.check_amount("a", good, at_least=1) for good in (1, 99_999_999)] == [1, 99_999_999]


@pytest.mark.parametrize("currency", cases({"13-currency-unknown": "XXX", "13-currency-small": "usd", "13-none": None}))
def test_a_currency_is_refused_by_its_field(currency: Any) -> None:
    with pytest.raises(ValueError, match=r"^currency: must be one of AUD, .*, USD$"):
        validation.check_currency("currency", currency)
    assert validation.check_currency("currency", "USD") == "USD"


@pytest.mark.parametrize("kind", cases({"13-effect-name-twice": "effect", "13-step-name-twice": "step"}))
def test_the_same_name_twice_in_one_attempt_is_a_permanent_failure(
    kind: str, task_of: Callable[..., Any], deliveries: Deliveries, connection: Connection
) -> None:
    calls = []

    def act(*args: Any, **kwargs: Any) -> None:
        calls.append(kwargs)

    def body(self: IdempotentTask) -> None:
        for _ in range(2):
            getattr(self, kind)("once", act, *([SECRET] if kind == "effect" else []))

    deliveries.deliver(task_of(body), key="k")
    assert failed(connection, over_an_effect=kind == "effect") == (
        "effect_name_reused",
        "'once' is used twice in one attempt; give each effect and step its own name",
        1,
    )
    assert len(calls) == 1


@pytest.mark.parametrize("kind", cases({"13-effect-with-other-arguments": "effect", "13-step-with-other": "step"}))
def test_an_effect_with_other_arguments_in_a_later_attempt_is_a_permanent_failure(
    kind: str, task_of: Callable[..., Any], deliveries: Deliveries, connection: Connection
) -> None:
    calls = []

    def act(*args: Any, **kwargs: Any) -> None:
        calls.append(kwargs)

    def body(self: IdempotentTask) -> None:
        getattr(self, kind)("once", act, f"{SECRET} {self.request.retries}")
        raise ValueError("again")

    task = task_of(body)
    assert deliveries.deliver(task, key="k").state == "RETRY"
    connection.execute(text("UPDATE idempotency.records SET available_at = clock_timestamp() - interval '1 s'"))
    deliveries.deliver(task, key="k", origin="retry")
    assert failed(connection, over_an_effect=kind == "effect") == (
        "effect_mismatch",
        "'once' was begun with other arguments in an earlier attempt",
        2,
    )
    assert len(calls) == 1


def failed(connection: Connection, *, over_an_effect: bool) -> tuple[str, str, int]:
    """What ended the one failed record, and its attempts. Over an effect that happened it is unfinished for that cause."""
    row = connection.execute(text("SELECT * FROM idempotency.records WHERE status = 'failed'")).one()
    (letter,) = op.dead_letters(connection)
    error = json.loads(row.error)
    assert error["code"] == letter.reason
    assert SECRET not in row.error + letter.last_error + letter.first_error
    cause = error["cause"] if over_an_effect else error
    assert (error["code"] == "unfinished") == over_an_effect
    return cause["code"], cause["message"], row.attempts


# ---------------------------------------------------------------- messages


def sent(name: str) -> tuple[Any, dict[str, Any], str]:
    return REFUSED[name]


def deposit(amount: str) -> tuple[str, dict[str, Any], str]:
    """A deposit of something that Python's JSON reads and JSON does not know."""
    return f'[["{SECRET}"], {{"amount": {amount}}}, {{}}]', {}, "invalid_arguments"


WIRE = {
    "01-no-key": sent("no key"),
    "02-key-blank": (sent("unknown task")[0], {"headers": headers(**{KEY_HEADER: " "})}, "invalid_key"),
    "03-key-longer-than-255": (sent("unknown task")[0], {"headers": headers(**{KEY_HEADER: "k" * 256})}, "invalid_key"),
    "04-key-with-CR-LF": sent("a bad key"),
    "11-NaN": deposit("NaN"),
    "11-Infinity": deposit("-Infinity"),
    "11-1e999": deposit("1e999"),
    "11-depth-200": deposit("[" * 200 + "]" * 200),
    "11-depth-100000": (deposit("[" * 100_000 + "]" * 100_000)[0], {}, "undecodable"),
    "16-pickle": sent("pickle"),
    "16-yaml": sent("yaml"),
    "16-no-content-type": sent("no content type"),
    "17-not-JSON": sent("no JSON"),
    "17-not-UTF-8": sent("no UTF-8"),
    "18-an-object": sent("an object"),
    "18-a-number": sent("a number"),
    "18-an-empty-list": sent("an empty list"),
    "18-two-items": sent("two items"),
    "18-four-items": sent("four items"),
    "19-unknown-task": sent("unknown task"),
    "19-no-task": sent("no task"),
    "19-no-id": sent("no id"),
    "19-protocol-1": sent("protocol 1"),
    "20-expired": sent("expired"),
}


def test_a_message_that_no_worker_can_run_is_one_dead_letter_and_the_worker_lives(
    subtests: Any, bank: Celery, worker: Worker, connection: Connection, entries: Callable[[str], int]
) -> None:
    consumer = DeadLetterConsumer(bank)
    consumer.run_once()
    for number, (name, (body, options, reason)) in enumerate(WIRE.items(), start=1):
        with subtests.test(name):
            before = connection.execute(text("SELECT count(*) FROM idempotency.outbox")).scalar_one()
            publish(bank, body, **options)
            b.deposit.delay(f"after {number}")
            eventually(lambda number=number: entries(f"after {number}") == 1, what="the worker goes on")
            eventually(lambda number=number: consumer.run_once() or len(op.dead_letters(connection)) >= number)
            stored = op.dead_letters(connection)
            assert (len(stored), stored[-1].reason) == (number, reason)
            assert json.loads(stored[-1].last_error)["code"] == reason
            assert SECRET not in stored[-1].last_error
            assert worker.process.poll() is None
            assert SECRET not in worker.log
            assert connection.execute(text("SELECT count(*) FROM idempotency.outbox")).scalar_one() == before
            assert entries(SECRET) == 0
    consumer.close()


# ---------------------------------------------------------------- results, and rows without a way out


@pytest.mark.parametrize(
    ("value", "says"),
    cases(
        {
            "21-not-JSON": ({SECRET: object()}, r"^result: must be JSON, got dict \(TypeError\)$"),
            "21-NaN": (float("nan"), r"^result: must be JSON, got float \(ValueError\)$"),
            "21-too-deep": (nested(100_000), r"^result: must be JSON, got list \(RecursionError\)$"),
            "21-over-the-limit": (SECRET * 20_000, r"^result: at most 262144 bytes, got 380002$"),
        }
    ),
)
def test_a_result_that_cannot_be_kept_is_a_permanent_failure_and_no_effect_is_committed(
    value: Any,
    says: str,
    task_of: Callable[..., Any],
    deliveries: Deliveries,
    connection: Connection,
    entries: Callable[[str], int],
) -> None:
    def body(self: IdempotentTask) -> Any:
        self.session.execute(b.INSERT, {"account": "a", "amount": 1})
        return value

    outcome = deliveries.deliver(task_of(body), key="k")
    assert re.search(says, str(outcome.value))
    code, _, attempts = failed(connection, over_an_effect=False)
    assert (code, attempts) == ("invalid_result", 1)
    assert entries("a") == 0
    assert op.outbox(connection) == []


@pytest.fixture
def relay_of(bank: Celery) -> Iterator[Relay]:
    relay = Relay(bank)
    yield relay
    relay.close()


def write(connection: Connection, key: str, *, route: dict[str, Any] | None = None, **more_headers: Any) -> None:
    """An outbox row, perhaps with a route or headers of its own."""
    given = {KEY_HEADER: key} | more_headers
    message = Message.composed(b.app, b.deposit.name, (key,), {}, task_id=key, headers=given)
    message = Message(message.headers, message.body, route or message.route, message.properties)
    outbox.insert(connection, OperationId("default", b.deposit.name, key), "v1:f", message)


@pytest.fixture
def small_messages_only(servers: services.Services, bank: Celery) -> Iterator[None]:
    """RabbitMQ takes no message above 1 KiB, on channels opened from now."""
    if servers.broker != "rabbitmq" or (program := shutil.which("rabbitmqctl", path="/usr/lib/rabbitmq/bin")) is None:
        pytest.skip("needs a RabbitMQ of our own and its rabbitmqctl")
    rabbitmq = servers.rabbitmq

    def limit(expression: str) -> str:
        done = subprocess.run(
            [program, "-q", "-n", rabbitmq._environment()["RABBITMQ_NODENAME"], "eval", expression],
            env=rabbitmq._environment(),  # HOME has the node's cookie
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout

    before = re.findall(r"\d+", limit("application:get_env(rabbit, max_message_size)."))[0]
    limit("application:set_env(rabbit, max_message_size, 1024).")
    yield
    limit(f"application:set_env(rabbit, max_message_size, {before}).")


@pytest.mark.parametrize("size", cases({"22-message-larger-than-the-broker-accepts": 2000}))
def test_a_message_that_the_broker_does_not_accept_becomes_failed_and_the_others_flow(
    size: int, small_messages_only: None, relay_of: Relay, connection: Connection, bank: Celery
) -> None:
    for key, value in (("before", "x"), ("too large", SECRET * (size // len(SECRET))), ("after", "x")):
        b.returning.enqueue(connection, value, idempotency_key=key)
    flowed = relay_of.run_once()
    assert (flowed.published, flowed.failed, flowed.broker_away) == (2, 1, False)
    for _ in range(3):
        make_due(connection)
        assert relay_of.run_once() == Relayed(0, 1)
        assert [row.status for row in op.outbox(connection)] == ["published", "pending", "published"]
    make_due(connection)
    assert relay_of.run_once() == Relayed(0, 1)

    assert [row.status for row in op.outbox(connection)] == ["published", "failed", "published"]
    (letter,) = op.dead_letters(connection)
    assert (letter.key, letter.reason, letter.attempts, letter.status) == ("too large", "unpublishable", 5, "open")
    assert re.search(
        r"PRECONDITION_FAILED - message size \d+ is larger than configured max size 1024", letter.last_error
    )
    assert SECRET not in letter.last_error
    b.returning.enqueue(connection, "x", idempotency_key="later")
    assert relay_of.run_once() == Relayed(1, 0)


NOWHERE: dict[str, tuple[Callable[[str], dict[str, Any]], str]] = {
    "23-no-such-exchange": (lambda queue: {"exchange": "missing", "routing_key": queue}, "NOT_FOUND"),
    "23-no-such-route": (lambda queue: {"exchange": queue, "routing_key": "nowhere"}, "NO_ROUTE"),
    "23-no-such-queue": (lambda _: {"queue": "unknown"}, "unknown"),
}


@pytest.mark.parametrize(("route", "error"), cases(NOWHERE))
def test_a_row_without_a_queue_is_not_marked_and_alarms(
    route: Callable[[str], dict[str, Any]],
    error: str,
    bank: Celery,
    relay_of: Relay,
    connection: Connection,
    caplog: pytest.LogCaptureFixture,
) -> None:
    counter = metrics.publish_errors.labels("unroutable")
    before = counter._value.get()
    write(connection, SECRET, route=route(bank.conf.task_default_queue))
    for attempts in range(1, 8):  # without end: its queue may come
        with caplog.at_level(logging.ERROR):
            assert relay_of.run_once() == Relayed(0, 1)
        (row,) = op.outbox(connection)
        assert (row.status, row.published_at, row.attempts) == ("pending", None, attempts)
        assert error in row.last_error
        make_due(connection)
    assert counter._value.get() == before + 7
    assert "publish_failed" in caplog.text
    assert op.dead_letters(connection) == []


# ---------------------------------------------------------------- settings, servers, addresses


def refusals(app: Celery) -> list[str]:
    """Why a worker does not start: one line for each reason."""
    try:
        refuse_to_lose(SimpleNamespace(app=app))
    except SystemExit as refused:
        return str(refused.code).splitlines()
    return []


SETTINGS = {
    "28-lease-zero": ("idempotency_lease", 0.0, "idempotency_lease: Input should be greater than 0, got 0.0"),
    "28-lease-negative": ("idempotency_lease", -1.0, "idempotency_lease: Input should be greater than 0, got -1.0"),
    "28-heartbeat-half-the-lease": ("idempotency_heartbeat", 30.0, "heartbeat=30.0 lease=60.0"),
    "28-retention-below-the-horizon": (
        "idempotency_retention_completed",
        60.0,
        "retention_completed=60.0 redelivery_horizon=86400.0",
    ),
    "28-confirms-off": ("broker_transport_options", {}, "broker_transport_options: confirm_publish off, need True"),
    "28-content-other-than-JSON": (
        "accept_content",
        ["json", "pickle"],
        "accept_content: pickle beside json, need json alone",
    ),
    "30-address-no-address": (
        "idempotency_database_url",
        f"postgresql+psycopg://u@127.0.0.1:{SECRET}/db",
        "idempotency_database_url: not an address",
    ),
}


@pytest.mark.parametrize(("setting", "value", "line"), cases(SETTINGS))
def test_a_setting_that_cannot_keep_the_promise_refuses_to_start_in_one_line(
    setting: str, value: Any, line: str, configured: Celery
) -> None:
    assert refusals(configured) == []
    configured.conf[setting] = value
    (said,) = refusals(configured)
    assert said.startswith("idempotency: refused to start: ")
    assert line in said
    assert SECRET not in said


QUEUES = {
    "28-delivery-limit-unset": ("x-delivery-limit", None, "x-delivery-limit is not set, need at least 20"),
    "28-delivery-limit-low": ("x-delivery-limit", 3, "x-delivery-limit is 3, need at least 20"),
    "28-classic-queue": ("x-queue-type", "classic", "x-queue-type is classic, need quorum"),
}


@pytest.mark.parametrize(("argument", "value", "line"), cases(QUEUES))
def test_a_queue_that_would_lose_messages_refuses_to_start(
    argument: str, value: Any, line: str, configured: Celery, servers: services.Services
) -> None:
    if servers.broker == "redis":
        pytest.skip("needs RabbitMQ")
    arguments = configured.conf.task_queues[0].queue_arguments
    arguments.pop(argument)
    if value is not None:
        arguments[argument] = value
    assert [said for said in refusals(configured) if line in said]


@pytest.mark.parametrize(
    ("option", "value"),
    cases({"28-acks-late-off": ("acks_late", False), "28-lost-worker": ("reject_on_worker_lost", False)}),
)
def test_a_task_that_would_lose_messages_refuses_to_start(
    option: str, value: Any, configured: Celery, task_of: Callable[..., Any]
) -> None:
    task = task_of(lambda self, account: None, key="{account}", **{option: value})
    (said,) = refusals(configured)
    assert f"task {task.name}: {option}={value}, need {not value}" in said


@pytest.mark.parametrize(
    ("change", "line"),
    cases(
        {
            "29-isolation": (
                "default_transaction_isolation = 'serializable'",
                "default_transaction_isolation: serializable, need read committed",
            ),
            "29-read-only": ("default_transaction_read_only = on", "database: read-only, need the writable primary"),
        }
    ),
)
def test_a_database_that_cannot_keep_the_promise_refuses_to_start(
    change: str, line: str, configured: Celery, connection: Connection, database: str
) -> None:
    connection.execute(text(f"ALTER DATABASE {make_url(database).database} SET {change}"))
    (said,) = refusals(configured)
    assert line in said


@pytest.mark.parametrize("oldest", cases({"29-redis-too-old": 99}))
def test_a_redis_that_is_too_old_is_a_warning(oldest: int, configured: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not [found for found in diagnosis.doctor(configured) if found.subject == "redis" and found.level != "ok"]
    monkeypatch.setattr(diagnosis, "OLDEST_REDIS", oldest)
    (found,) = [found for found in diagnosis.doctor(configured) if found.subject == "redis"]
    assert (found.level, found.found.endswith("need at least 99")) == ("warning", True)


@pytest.mark.parametrize("fault", cases({"30-wrong-password": "password", "30-wrong-host": "host"}))
def test_a_wrong_address_is_an_error_without_its_password(
    fault: str, environment: dict[str, str], bank: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    def spoilt(name: str) -> str:
        url = make_url(environment[name]).set(password=SECRET)
        if fault == "host":
            url = url.set(host="nowhere.invalid")  # can never be (RFC 2606)
        return url.render_as_string(hide_password=False)

    with create_engine(environment["DATABASE_URL"], isolation_level="AUTOCOMMIT").connect() as connection:
        write(connection, "a1")
    errors = []
    try:
        with caplog.at_level(logging.DEBUG):
            b.configure(environment | {"DATABASE_URL": spoilt("DATABASE_URL")})
            Runtime.discard(bank)
            with pytest.raises(OperationalError) as refused:
                lookup(bank, b.deposit.name, "a1")
            errors.append(refused.value)
            b.configure(environment | {"BROKER_URL": spoilt("BROKER_URL"), "REDIS_URL": spoilt("REDIS_URL")})
            Runtime.discard(bank)
            with pytest.raises((BrokerError, AMQPError)) as refused:
                b.deposit.apply_async(("a1",), retry=False)
            errors.append(refused.value)
            relay = Relay(bank, confirm_timeout=5)
            assert relay.run_once() == Relayed(0, 0, broker_away=True)
            relay.close()
            # without Redis the work goes on
            assert Deliveries(bank).deliver(b.deposit, "a1").state == "SUCCESS"
    finally:
        b.configure(environment)
        Runtime.discard(bank)
    said = "".join(line for error in errors for line in [*traceback.format_exception(error), repr(error.args)])
    assert SECRET not in said + caplog.text


# ---------------------------------------------------------------- replays


def dead(deliveries: Deliveries, connection: Connection) -> int:
    deliveries.deliver(b.failing, "a1", "permanent")
    (letter,) = op.dead_letters(connection)
    return int(letter.id)


def set_status(connection: Connection, status: str) -> None:
    """Bring the one failed record into another state, as another delivery would."""
    change = {
        "started": "status = 'started', token = 't', locked_by = 'h', locked_until = clock_timestamp() + interval '1 min', "
        "completed_at = NULL, expires_at = NULL, response_code = NULL, error = NULL, error_code = NULL",
        "completed": "status = 'completed', response_code = 200, result = '1', error = NULL, error_code = NULL",
    }[status]
    connection.execute(text(f"UPDATE idempotency.records SET {change}"))


REPLAYS = {
    "31-unknown": ("unknown", OperationNotFound, "dead letter 999999: not found"),
    "31-already-replayed": ("replayed", ReplayRefused, "dead letter 1: already replayed"),
    "31-discarded": ("discarded", ReplayRefused, "dead letter 1: already discarded"),
    "31-running": ("started", ReplayRefused, "dead letter 1: the operation is started in generation 1; only one"),
    "31-completed": ("completed", ReplayRefused, "dead letter 1: the operation is completed in generation 1; only one"),
}


@pytest.mark.parametrize(("state", "error", "says"), cases(REPLAYS))
def test_a_replay_that_cannot_be_is_refused_and_changes_nothing(
    state: str,
    error: type[Exception],
    says: str,
    bank: Celery,
    deliveries: Deliveries,
    connection: Connection,
    nothing_happens: Callable[[], Any],
) -> None:
    letter = 999_999 if state == "unknown" else dead(deliveries, connection)
    if state in ("replayed", "discarded"):
        connection.execute(
            text(f"UPDATE idempotency.dead_letters SET status = '{state}', settled_at = clock_timestamp()")
        )
    elif state != "unknown":
        set_status(connection, state)
    before = op.dead_letters(connection), connection.execute(text("SELECT * FROM idempotency.records")).all()
    with nothing_happens(), pytest.raises(error) as refused, Runtime.of(bank).engine.begin() as transaction:
        letters.replay(transaction, letter, app=bank)
    assert str(refused.value).startswith(says.replace("letter 1:", f"letter {letter}:"))
    assert (op.dead_letters(connection), connection.execute(text("SELECT * FROM idempotency.records")).all()) == before


@pytest.mark.parametrize("number", cases({"31-a-million-at-once": 1_000_000}))
def test_a_million_replays_at_once_are_refused_with_both_numbers(
    number: int, bank: Celery, connection: Connection, nothing_happens: Callable[[], Any]
) -> None:
    with nothing_happens():
        with pytest.raises(BulkRefused, match=f"at most {BULK_LIMIT} dead letters in one command, got {number}"):
            letters.select_ids(connection, Selection(), limit=number)
        with pytest.raises(IdempotencyError, match=f"^{number} dead letters named, --limit is 1000$"):
            _chosen(bank, list(range(number)), Selection(), 1000)
    assert letters.select_ids(connection, Selection(), limit=BULK_LIMIT) == []


# ---------------------------------------------------------------- commands


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def run(*command: str | Path, directory: Path | None = None, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        command,
        cwd=directory,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "options"),
    cases(
        {
            "34-provider-port-in-use": ("sandbox", ("provider", "--data", "{directory}", "--port", "{port}")),
            "34-mail-port-in-use": ("sandbox", ("mail", "--data", "{directory}", "--port", "{port}")),
            "34-metrics-port-in-use": ("idempotency.cli", ("metrics", "--port", "{port}")),
        }
    ),
)
def test_a_port_in_use_is_one_line_that_names_it(
    module: str, options: tuple[str, ...], taken_port: int, tmp_path: Path
) -> None:
    given = [option.format(port=taken_port, directory=tmp_path) for option in options]
    status, said = run(sys.executable, "-m", module, *given, PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    assert status in (1, 2)
    assert "Traceback" not in said
    (line,) = [line for line in said.splitlines() if str(taken_port) in line]
    assert "Address already in use" in line


@pytest.mark.parametrize(
    ("environment", "says"),
    cases(
        {
            "34-no-python": ({"PYTHON": "/nowhere/python3"}, "set-up: no Python 3.11 or newer was found .*set PYTHON="),
            "34-no-network": (
                {"PIP_INDEX_URL": "http://127.0.0.1:1/simple", "PIP_RETRIES": "1", "PYTHON": sys.executable},
                "set-up: the package index cannot be reached; the first run needs a network connection",
            ),
        }
    ),
)
def test_a_set_up_that_cannot_be_is_one_line_that_says_what_to_do(
    environment: dict[str, str], says: str, tmp_path: Path
) -> None:
    root = Path(__file__).parents[2]
    for name in ("scripts/bootstrap", "services/packages.py", "constraints.txt", "pyproject.toml", "Makefile"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(root / name, tmp_path / name)
    # nothing but the index of the case, and no wheels from earlier runs
    clean = {"PIP_CONFIG_FILE": os.devnull, "PIP_EXTRA_INDEX_URL": "", "PIP_NO_CACHE_DIR": "1", "PIP_FIND_LINKS": ""}
    status, said = run("make", "venv", directory=tmp_path, **clean, **environment)
    assert status != 0
    lines = [line for line in said.splitlines() if line.startswith("set-up: ")]
    assert len(lines) == 1
    assert re.search(says, lines[0])
    assert not (tmp_path / ".venv/ready").exists()


# ---------------------------------------------------------------- the table is complete


def test_every_number_has_its_case_here_or_is_named_elsewhere(request: pytest.FixtureRequest) -> None:
    names = [item.name for item in request.session.items if item.path == Path(__file__)]
    if len({name.partition("[")[0] for name in names}) < 20:
        pytest.skip("only a part of this file was asked for")
    here = {int(number) for name in names for number in re.findall(r"\[(\d\d)-", name)}
    here |= {int(name[:2]) for name in WIRE}
    assert here | set(ELSEWHERE) | NOTHING_YET == set(range(1, 35))
    assert not here & NOTHING_YET
    root = Path(__file__).parents[2]
    for path, *tests in ELSEWHERE.values():
        tree = ast.parse((root / path).read_text())
        assert set(tests) <= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
