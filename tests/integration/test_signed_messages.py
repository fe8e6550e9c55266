"""Signed messages: what somebody else has published runs nothing, ends nothing and belongs to no operation."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from celery import Celery
from pydantic import SecretStr
from sqlalchemy import Connection, Engine, text

from idempotency.application import close_runtime, settings_of
from idempotency.checks.broker import check_signatures
from idempotency.errors import ReplayRefused
from idempotency.letters.consumer import DeadLetterConsumer
from idempotency.operate.replay import replay
from idempotency.relay.relay import Relay
from idempotency.relay.resend import resend_lost
from idempotency.wire.headers import KEY_HEADER, OUTBOX_HEADER, SIGNATURE_HEADER, TENANT_HEADER
from idempotency.wire.signing import sign
from tests.support import bank as b
from tests.support import operations as op
from tests.support.dead_messages import body_of, headers, publish, take
from tests.support.operators import ANN
from tests.support.processes import Processes, eventually
from tests.support.tasks import transactional

SECRET, OTHER = "a" * 32, "b" * 32


@pytest.fixture
def environment(environment: dict[str, str]) -> dict[str, str]:
    return {**environment, "MESSAGE_SECRETS": f"{SECRET},{'c' * 32}"}


@pytest.fixture
def bank(bank: Celery) -> Iterator[Celery]:
    yield bank
    bank.conf.update(
        idempotency_message_secrets="", idempotency_unsigned_until=None, idempotency_redelivery_horizon=86400
    )


@pytest.fixture
def letters(bank: Celery, connection: Connection) -> Callable[[int], Any]:
    """The dead letters, once there are so many."""
    consumer = DeadLetterConsumer(bank)
    consumer.run_once()

    def stored(number: int) -> Any:
        eventually(lambda: (consumer.run_once() and False) or len(op.dead_letters(connection)) >= number, timeout=20)
        return op.dead_letters(connection)

    yield stored
    consumer.close()


def signed(account: str, secret: str = SECRET, *, at: float | None = None, **changes: Any) -> dict[str, Any]:
    sent = headers(**{KEY_HEADER: account, TENANT_HEADER: "default", **changes})
    return sent | {SIGNATURE_HEADER: sign(sent, body_of(account), SecretStr(secret), at=at or time.time())}


def test_what_the_application_sends_runs_and_what_others_send_does_not(
    bank: Celery,
    processes: Processes,
    relay: Relay,
    engine: Engine,
    connection: Connection,
    entries: Callable[[str], int],
    letters: Callable[[int], Any],
) -> None:
    worker = processes.worker()
    with transactional(engine).begin() as caller:
        b.deposit.enqueue(caller, "enqueued")
        b.deposit.enqueue(caller, "attacked", countdown=3600)
    (b.deposit.si("sent") | b.deposit.si("chained")).apply_async()
    b.deposit.apply_async(("compressed",), compression="gzip", countdown=1)
    for account in ("enqueued", "sent", "chained", "compressed"):
        eventually(lambda account=account: entries(account) == 1, what=account)

    forged = {
        "no signature": headers(**{KEY_HEADER: "attacked"}),
        "another's": signed("attacked", OTHER),
        "another tenant": signed("attacked") | {TENANT_HEADER: "acme"},
        "another key": signed("attacked") | {KEY_HEADER: "sent-again"},
        "another generation": signed("attacked") | {"idempotency-generation": 9},
        "another body": signed("another"),
        "an unknown task": signed("attacked") | {"task": "unknown.task"},
        "a version to come": signed("attacked") | {"idempotency-version": 99},
        "expired": signed("attacked") | {"expires": "2001-01-01T00:00:00+00:00"},
    }
    for sent in forged.values():
        publish(bank, body_of("attacked"), headers=sent)
    publish(bank, body_of("attacked"), headers=headers(task="another.plain_task"))
    stored = letters(len(forged) + 1)

    reasons = ["altered"] * (len(forged) - 1) + ["unknown_task", "unsigned"]
    assert sorted(letter.reason for letter in stored) == reasons
    assert {(letter.tenant, letter.task, letter.key, letter.outbox_id) for letter in stored} == {
        (None, None, None, None)
    }
    assert connection.execute(text("SELECT count(*) FROM idempotency.records")).scalar_one() == 4
    row = connection.execute(text("SELECT status, settled_at FROM idempotency.outbox WHERE key = 'attacked'")).one()
    assert tuple(row) == ("pending", None)
    assert sum(entries(account) for account in ("attacked", "sent-again")) == 0
    assert worker.process.poll() is None


def test_a_copy_of_a_published_message_runs_nothing_once_its_operation_is_purged(
    bank: Celery,
    processes: Processes,
    connection: Connection,
    entries: Callable[[str], int],
    letters: Callable[[int], Any],
) -> None:
    """Byte for byte, and longer ago than anything may be redelivered; a younger one finds its record or runs."""
    processes.worker()
    old = time.time() - 2 * 86400
    publish(bank, body_of("a1"), headers=signed("a1", at=old))
    assert [(letter.reason, letter.key) for letter in letters(1)] == [("stale", "a1")]
    assert entries("a1") == 0
    assert connection.execute(text("SELECT count(*) FROM idempotency.records")).scalar_one() == 0

    waiting = "INSERT INTO idempotency.outbox (message_id, tenant, task, key, fingerprint, message, queue, service, status, origin, published_at) "
    waiting += "VALUES ('m', 'default', :task, 'a2', :fingerprint, '', 'q', 'bank', 'published', 'enqueue', now())"
    connection.execute(text(waiting), {"task": b.deposit.name, "fingerprint": b.fingerprint_of("a2")})
    publish(bank, body_of("a2"), headers=signed("a2", at=old))  # its row is unsettled: it has never come
    publish(bank, body_of("a3"), headers=signed("a3"))
    for account in ("a2", "a3"):
        eventually(lambda account=account: entries(account) == 1, what=account)


def test_a_stale_message_that_dies_ends_nothing(
    bank: Celery, connection: Connection, letters: Callable[[int], Any]
) -> None:
    """Its operation may have completed, and its `on_failed` would say that it has not."""
    death = {"x-death": [{"queue": bank.conf.task_default_queue, "reason": "delivery_limit"}]}
    for account, at in (("old", time.time() - 2 * 86400), ("young", time.time())):
        publish(
            bank, body_of(account), queue=f"{bank.conf.task_default_queue}-dead", headers=signed(account, at=at) | death
        )
    assert {letter.key: letter.reason for letter in letters(2)} == {"old": "stale", "young": "delivery_limit"}
    assert connection.execute(text("SELECT key FROM idempotency.records")).scalars().all() == ["young"]


def test_what_was_in_flight_when_signing_began_is_run_until_a_date(
    bank: Celery, connection: Connection, letters: Callable[[int], Any]
) -> None:
    dead = f"{bank.conf.task_default_queue}-dead"
    death = {"x-death": [{"queue": bank.conf.task_default_queue, "reason": "delivery_limit"}]}
    for until in (datetime.now(UTC) + timedelta(hours=1), datetime.now(UTC) - timedelta(seconds=1)):
        bank.conf.idempotency_unsigned_until = until
        close_runtime(bank)
        publish(bank, body_of("a1"), queue=dead, headers=headers(**{KEY_HEADER: "a1"}) | death)
        publish(bank, body_of("a2"), queue=dead, headers=signed("a2", OTHER) | death)
        letters(2)
    assert sorted(letter.reason for letter in letters(4)) == ["altered", "altered", "delivery_limit", "unsigned"]


def test_a_letter_is_replayed_once_its_signature_is_of_a_secret_of_ours(
    bank: Celery, connection: Connection, letters: Callable[[int], Any], entries: Callable[[str], int]
) -> None:
    dead = f"{bank.conf.task_default_queue}-dead"
    publish(bank, body_of("a1"), queue=dead, headers=signed("a1", OTHER))
    (letter,) = letters(1)
    with pytest.raises(ReplayRefused, match="altered; only what this application has signed is sent again"):
        replay(bank, letter.id, ANN)
    bank.conf.idempotency_message_secrets = [SECRET, OTHER]
    close_runtime(bank)
    assert replay(bank, letter.id, ANN).key == "a1"


def test_the_doctor_says_whether_messages_are_signed(bank: Celery, servers: Any) -> None:
    def found(**conf: Any) -> list[tuple[str, str]]:
        bank.conf.update(conf)
        return [(each.level.value, each.found) for each in check_signatures(bank, settings_of(bank))]

    later = datetime.now(UTC) + timedelta(days=1)
    assert found() == [("ok", "are signed, and 2 secrets are accepted")]
    ((level, said),) = found(idempotency_unsigned_until=later)
    assert (level, "those without a signature, too, until" in said) == ("warning", True)
    ((level, said),) = found(idempotency_unsigned_until=datetime.now(UTC))
    assert (level, "is over and can be removed" in said) == ("ok", True)
    assert found(idempotency_message_secrets="")[0][0] == "ok"
    address = bank.conf.broker_url
    assert found(broker_url="amqp://u:p@broker.example//")[0] == ("warning", "are not signed")
    second = "amqp://127.0.0.1;amqp://u:p@broker.example//"  # where a failover leads
    assert found(broker_url=second)[0] == ("warning", "are not signed")
    bank.conf.broker_url = address
    assert json.dumps(SECRET) not in json.dumps(bank.conf.humanize(with_defaults=False))


@pytest.mark.long
def test_a_message_whose_key_became_another_type_is_altered_and_sent_again(
    bank: Celery,
    processes: Processes,
    relay: Relay,
    engine: Engine,
    connection: Connection,
    entries: Callable[[str], int],
    letters: Callable[[int], Any],
) -> None:
    """AMQP has a decimal 1234, which a key is not: the letter is not the operation's, and does not keep it from its resend."""
    with transactional(engine).begin() as caller:
        b.deposit.enqueue(caller, "1234")
    taken = take(bank)
    sent = taken.properties["application_headers"]
    assert sent[KEY_HEADER] == "1234"
    publish(bank, taken.body, headers=sent | {KEY_HEADER: Decimal(1234)})
    processes.worker()
    (letter,) = letters(1)
    assert (letter.reason, letter.task, letter.key, letter.outbox_id) == ("altered", None, None, None)
    with pytest.raises(ReplayRefused, match="only what this application has signed is sent again"):
        replay(bank, letter.id, ANN)
    connection.execute(text("UPDATE idempotency.outbox SET published_at = published_at - interval '1 day'"))
    assert resend_lost(bank, lambda _: 0).resent == 1
    eventually(lambda: entries("1234") == 1)
    assert connection.execute(text("SELECT key FROM idempotency.records")).scalars().all() == ["1234"]


@pytest.mark.parametrize("changed", [{"content_type": "text/plain"}, {"compression": "application/x-gzip"}])
def test_a_message_whose_encoding_was_changed_is_altered(
    bank: Celery, connection: Connection, letters: Callable[[int], Any], changed: dict[str, str]
) -> None:
    """What decides how a body is read is not another's to change, nor to attach a letter to the operation by."""
    row = "INSERT INTO idempotency.outbox (message_id, tenant, task, key, fingerprint, message, queue, service, status, origin, published_at) "
    row += "VALUES ('m', 'default', :task, 'a2', :fingerprint, '', 'q', 'bank', 'published', 'enqueue', now())"
    connection.execute(text(row), {"task": b.deposit.name, "fingerprint": b.fingerprint_of("a2")})
    ours: Any = {OUTBOX_HEADER: "m"}
    sent = signed("a2", **ours)
    sent["x-death"] = [{"queue": bank.conf.task_default_queue, "reason": "rejected"}]
    options = dict(changed)
    if "compression" in options:
        sent["compression"] = options.pop("compression")
    publish(bank, body_of("a2"), queue=f"{bank.conf.task_default_queue}-dead", headers=sent, **options)
    (letter,) = letters(1)
    assert (letter.reason, letter.task, letter.key, letter.outbox_id) == ("altered", None, None, None)


@pytest.mark.long
def test_what_is_nested_in_the_headers_is_never_taken_for_what_is_signed(
    bank: Celery,
    processes: Processes,
    relay: Relay,
    connection: Connection,
    entries: Callable[[str], int],
    letters: Callable[[int], Any],
) -> None:
    """Tracing tools write into the header `headers`, so the signature does not cover it."""
    processes.worker()
    now = datetime.now(UTC).isoformat()
    publish(bank, body_of("a1"), headers=signed("a1", at=time.time() - 2 * 86400) | {"headers": {"eta": now}})
    assert [(letter.reason, letter.key) for letter in letters(1)] == [("stale", "a1")]
    assert entries("a1") == 0

    body = json.dumps([["a2", "retry"], {}, {}])
    sent = headers(task=b.failing.name, **{KEY_HEADER: "a2", TENANT_HEADER: "default"})
    sent |= {SIGNATURE_HEADER: sign(sent, body, SecretStr(SECRET), at=time.time())}
    publish(bank, body, headers=sent | {"headers": {"task": b.transfer.name, "id": "another"}})
    row = text("SELECT task, message FROM idempotency.outbox WHERE key = 'a2' AND origin = 'retry'")
    eventually(lambda: connection.execute(row).one_or_none() is not None, what="the next attempt")
    found = connection.execute(row).one()
    kept = json.loads(found.message)["headers"]
    assert (found.task, kept["task"], kept["id"]) == (b.failing.name, b.failing.name, sent["id"])


@pytest.mark.long
def test_what_a_worker_would_call_after_a_plain_task_is_looked_for_in_its_headers_too(
    bank: Celery, letters: Callable[[int], Any], processes: Processes, entries: Callable[[str], int]
) -> None:
    """Celery takes from them what the body does not have, and signs in our name what it calls."""
    processes.worker()
    victim = {"task": b.deposit.name, "args": ["victim"], "kwargs": {}, "options": {"idempotency_key": "squatted"}}
    victim |= {"subtask_type": None, "immutable": True}
    followers: dict[str, Any] = {"chain": [victim], "callbacks": [victim], "errbacks": [victim], "chord": victim}
    for follower, called in followers.items():
        publish(bank, json.dumps([[], {}, {}]), headers=headers(task="celery.accumulate", **{follower: called}))
    assert [(letter.reason, letter.task) for letter in letters(4)] == [("unsigned", None)] * 4
    assert entries("victim") == 0


@pytest.mark.long
def test_a_header_that_no_sender_of_celery_makes_is_refused(
    bank: Celery, letters: Callable[[int], Any], processes: Processes, entries: Callable[[str], int]
) -> None:
    """With a valid signature, which does not cover it: the worker would go by it."""
    processes.worker()
    misplaced: list[dict[str, Any]] = [{"chain": [{"task": "any"}]}, {"callbacks": [{}]}]
    for header in (*misplaced, {"called_directly": True}, {"is_eager": True}):
        publish(bank, body_of("a1"), headers=signed("a1") | header)
    assert [(letter.reason, letter.key) for letter in letters(4)] == [("altered", None)] * 4
    assert entries("a1") == 0
