"""Messages that no worker can run, results that cannot be kept, and replays that cannot be."""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, text

import services
from idempotency import IdempotentTask, OperationNotFound
from idempotency.application import runtime_of
from idempotency.cli.many import choose
from idempotency.errors import BulkRefused, IdempotencyError, ReplayRefused
from idempotency.letters.consumer import DeadLetterConsumer
from idempotency.observe import metrics
from idempotency.relay.relay import Relay, Relayed
from idempotency.store import dead_letters as letters
from idempotency.store.dead_letters import BULK_LIMIT, Selection
from idempotency.wire.headers import KEY_HEADER
from tests.integration.bad_inputs.cases import cases, nested
from tests.integration.bad_inputs.failures import failed
from tests.integration.bad_inputs.rows import write
from tests.support import bank as b
from tests.support import operations as op
from tests.support.dead_messages import headers, publish
from tests.support.deliveries import Deliveries
from tests.support.processes import Worker, eventually
from tests.support.refused_messages import REFUSED, SECRET
from tests.support.relaying import make_due
from tests.support.tasks import enqueued

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
    "11-depth-100000": (deposit("[" * 100_000 + "]" * 100_000)[0], {}, "beyond_limit"),
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


def test_what_no_worker_can_run_is_one_dead_letter_and_the_worker_lives(
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
def test_a_result_that_cannot_be_kept_fails_and_commits_no_effect(
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
def test_what_the_broker_does_not_accept_fails_and_the_others_flow(
    size: int, small_messages_only: None, relay_of: Relay, connection: Connection, bank: Celery
) -> None:
    for key, value in (("before", "x"), ("too large", SECRET * (size // len(SECRET))), ("after", "x")):
        enqueued(connection, b.returning, value, idempotency_key=key)
    flowed = relay_of.run_once()
    assert (flowed.published, flowed.refused, flowed.broker_unavailable) == (2, 1, False)
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
    enqueued(connection, b.returning, "x", idempotency_key="later")
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
            text(f"UPDATE idempotency.dead_letters SET status = '{state}', closed_at = clock_timestamp()")
        )
    elif state != "unknown":
        set_status(connection, state)
    before = op.dead_letters(connection), connection.execute(text("SELECT * FROM idempotency.records")).all()
    with nothing_happens(), pytest.raises(error) as refused, runtime_of(bank).engine.begin() as transaction:
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
            choose(bank, list(range(number)), Selection(), 1000)
    assert letters.select_ids(connection, Selection(), limit=BULK_LIMIT) == []
