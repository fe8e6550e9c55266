"""Where messages arrive: what is beyond a limit is not decoded, what would forge a line is not logged, and bulk commands go on."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, text
from typer.testing import CliRunner

from idempotency.cli.root import cli
from idempotency.letters import letter as letters
from idempotency.letters.consumer import DeadLetterConsumer
from idempotency.letters.storing import store
from idempotency.reasons import OF_MESSAGES
from idempotency.wire import limits
from idempotency.wire.message import Message
from tests.support import bank as b
from tests.support import operations as op
from tests.support.commands import runner
from tests.support.dead_messages import body_of, bury, headers, publish
from tests.support.processes import Worker, eventually

FORGED = "1\n[2026-01-01 00:00:00,000: INFO/MainProcess] Task forged[1] succeeded\x1b[2J\r"


def nested(levels: int) -> dict[str, Any]:
    """A header so deep that py-amqp's reader, which calls itself, would need more than Python's stack."""
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


def in_deep(work: Callable[[], object]) -> None:
    """Run with a stack on which py-amqp can write such a header."""
    before, size = sys.getrecursionlimit(), threading.stack_size(512 << 20)
    sys.setrecursionlimit(100_000)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    finally:
        sys.setrecursionlimit(before)
        threading.stack_size(size)


LIMIT = limits.BODY_LIMIT
BOMB = zlib.compress(b'[["' + b"x" * (2 * LIMIT) + b'"], {}, {}]')
MANY = {f"h{number}": 1 for number in range(limits.HEADERS_COUNT + 1)}
# a body and its headers, and what the letter says of it
BEYOND: dict[str, tuple[str | bytes, dict[Any, Any], str]] = {
    "deep JSON": (f'[["a"], {{"amount": {"[" * 100_000}{"]" * 100_000}}}, {{}}]', {}, "body: nested at most 250 deep"),
    "JSON that can be read and not walked": (
        f'[["a"], {{"amount": {"[" * 300}{"]" * 300}}}, {{}}]', {}, "body: nested at most 250 deep",
    ),
    "a small body that is large": (
        BOMB, {"compression": "application/x-gzip"}, f"body: at most {LIMIT} bytes, got more once it is decompressed",
    ),
    "many headers": (body_of("a"), MANY, "headers: at most 2000, with those inside others, got 20"),
    "deep headers": (body_of("a"), {"deep": nested(5_000)}, "headers: nested at most 32 deep"),
    "a name that is no text": (body_of("a"), {b"\xff": 1, "task": "unknown"}, "headers: a name is not UTF-8"),
}  # fmt: skip


def test_a_message_beyond_a_limit_is_one_short_letter_and_the_worker_lives(
    subtests: Any, bank: Celery, worker: Worker, connection: Connection, entries: Callable[[str], int]
) -> None:
    consumer = DeadLetterConsumer(bank)
    consumer.run_once()
    for number, (name, (body, given, says)) in enumerate(BEYOND.items(), start=1):
        with subtests.test(name):
            sent = given | headers() | given
            in_deep(lambda body=body, sent=sent: publish(bank, body, headers=sent))
            b.deposit.delay(f"after {number}")
            eventually(lambda number=number: entries(f"after {number}") == 1, what="the worker goes on")
            eventually(lambda number=number: consumer.run_once() or len(op.dead_letters(connection)) >= number)
            stored = op.dead_letters(connection)[-1]
            assert (stored.reason, worker.process.poll()) == ("beyond_limit", None)
            assert json.loads(stored.last_error)["message"].startswith(f"{OF_MESSAGES[stored.reason]}: {says}")
            assert says in worker.log, [line for line in worker.log.splitlines() if "refused" in line]
            assert len(stored.payload) + len(stored.headers) < 3 * letters.BODY_KEPT
            kept = json.loads(stored.headers)
            raw = body.encode() if isinstance(body, str) else body
            assert kept[letters.LENGTH_HEADER] == len(raw)
            assert kept[letters.DIGEST_HEADER] == hashlib.sha256(raw).hexdigest()
    consumer.close()
    assert entries("a") == 0


def test_a_body_beyond_the_limit_is_kept_as_its_beginning(bank: Celery, connection: Connection) -> None:
    """RabbitMQ accepts no such body by default; Redis does."""

    class Received:
        accept = {"application/json"}
        content_type, content_encoding = "application/json", "utf-8"
        delivery_info = {"routing_key": "payments"}
        properties: dict[str, Any] = {}
        errors: list[Any] = []
        body = b"[" + b" " * (LIMIT - 1) + b"]"
        headers = headers()

        def decode(self) -> Any:
            raise AssertionError("decoded")

    received: Any = Received()
    assert store(bank, received) is not None
    assert store(bank, received) is None  # the same again
    (stored,) = op.dead_letters(connection)
    assert json.loads(stored.last_error)["message"].endswith(f"body: at most {LIMIT} bytes, got {LIMIT + 1}")
    assert len(stored.payload) < 2 * letters.BODY_KEPT
    assert (stored.task, stored.key, stored.header_task) == (None, None, b.deposit.name)


# ---------------------------------------------------------------- lines


@pytest.mark.parametrize("header", ["id", "shadow", "root_id", "parent_id", "group"])
def test_what_would_forge_a_line_is_refused(bank: Celery, connection: Connection, header: str) -> None:
    consumer = DeadLetterConsumer(bank)
    consumer.run_once()
    bury(bank, ["a1", "a2"], [{header: FORGED}, {header: "no line break"}])
    assert consumer.run_once() == 2
    consumer.close()
    reasons = {letter.reason: json.loads(letter.last_error)["message"] for letter in op.dead_letters(connection)}
    assert reasons["invalid_header"].endswith(f"not printable: {header}")
    assert len(reasons) == 2


@pytest.mark.long
def test_no_message_forges_a_line_of_the_log(
    bank: Celery, worker: Worker, connection: Connection, entries: Callable[[str], int]
) -> None:
    """By its ids, its task, its key, its headers, or the text of an error that repeats its arguments; by remote control, too."""
    for name in ("id", "task", "shadow", "idempotency-key", "idempotency-tenant"):
        publish(bank, headers=headers(**{name: FORGED}))
    for number, name in enumerate(("traceparent", "origin", "argsrepr", "kwargsrepr")):
        publish(bank, body_of(f"described {number}"), headers=headers(**{name: FORGED}))
    b.failing.delay("a2", FORGED)  # ValueError(how)
    bank.control.revoke([FORGED])
    bank.control.broadcast("rate_limit", arguments={"task_name": FORGED, "rate_limit": FORGED})
    b.deposit.delay("after")
    eventually(lambda: entries("after") == 1, what="the worker goes on")
    consumer = DeadLetterConsumer(bank)
    eventually(lambda: consumer.run_once() or len(op.dead_letters(connection)) >= 6, timeout=60)
    consumer.close()
    assert [entries(f"described {number}") for number in range(4)] == [1, 1, 1, 1]
    eventually(lambda: "Tasks flagged as revoked" in worker.log)
    assert "Task forged[1] succeeded" in worker.log  # within lines
    lines = worker.log.splitlines()
    assert not [line for line in lines if line.startswith(("[2026-01-01", "Task forged"))]
    assert "\x1b" not in worker.log


# ---------------------------------------------------------------- commands


@pytest.mark.long
def test_no_command_prints_what_a_terminal_or_rich_would_obey(
    bank: Celery, connection: Connection, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names and keys of a message that is no task of ours: they are kept as they came."""
    forged = "[red]x[/red] [link=https://evil.example]y[/link]\x1b[2J\r\n9 forged open"
    run = runner(monkeypatch, capsys)
    connection.execute(
        text("""INSERT INTO idempotency.dead_letters (source, tenant, task, key, queue, header_task, reason, payload, last_error)
                VALUES ('broker', :forged, :forged, :forged, :forged, :forged, 'rejected', :forged, :forged)"""),
        {"forged": forged},
    )
    for command in (
        ("dead-letters", "list"), ("dead-letters", "list", "--by", "task"), ("dead-letters", "show", 1), ("show", forged),
        ("dead-letters", "replay", 1), ("dead-letters", "replay", "--error", "rejected"), ("list",), ("status",),
        ("doctor",), ("show", "no such key\x1b[2J"),
    ):  # fmt: skip
        answer = run(*command)
        said = answer.out + answer.error
        assert "\x1b" not in said, command
        assert "\n9 forged" not in said, command
        assert "\r" not in said, command
        if command[:2] == ("dead-letters", "list"):
            assert "[red]x[/red]" in said


@pytest.mark.long
@pytest.mark.parametrize("levels", [900, 100_000])
def test_deep_json_ends_no_bulk_command(bank: Celery, connection: Connection, levels: int) -> None:
    """In a letter's message, its headers and its body, and in the result of a record: stored by earlier code, or by a person."""
    deep = "[" * levels + "]" * levels
    body = json.dumps([["a1"], {"amount": 1}, {}])
    message = Message(headers(), body, {"exchange": "", "routing_key": bank.conf.task_default_queue}, {})
    payloads = [
        message.to_text(),
        message.to_text().replace('"lang": "py"', f'"lang": {deep}'),
        Message(message.headers, f'[["a2"], {{"amount": {deep}}}, {{}}]', message.route, {}).to_text(),
        deep,
        "not JSON",
    ]
    for payload in payloads:
        connection.execute(
            text("""INSERT INTO idempotency.dead_letters (source, consumer_service, reason, header_task, headers, payload)
                    VALUES ('broker', 'bank', 'rejected', :task, :headers, :payload)"""),
            {"payload": payload, "task": b.deposit.name, "headers": deep},
        )

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(cli, [*arguments, "-A", "tests.support.bank"], catch_exceptions=False)

    assert len(json.loads(run("dead-letters", "list", "--json").stdout)) == len(payloads)
    for number in range(1, len(payloads) + 1):
        assert run("dead-letters", "show", str(number), "--json").exit_code == 0
    replayed = run("dead-letters", "replay", "--error", "rejected", "--json", "--as", "ann")
    said = json.loads(replayed.stdout)
    assert (replayed.exit_code, said["replayed"]) == (1, [1])
    why = {each["letter"]: each["why"] for each in said["refused"]}
    assert sorted(why) == [2, 3, 4, 5]
    assert all(text.startswith(f"dead letter {letter}: ") and len(text) < 200 for letter, text in why.items())
    assert run("show", "a1", "--with-payload", "--json").exit_code == 0
