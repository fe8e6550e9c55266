"""The command line, on a real database: what it answers, to whom, and with which exit status."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from typing import Any

import pytest
from celery import Celery
from psycopg.errors import LockNotAvailable
from sqlalchemy import Engine, make_url, text
from sqlalchemy.exc import OperationalError

from idempotency import OperationId
from idempotency.application import close_runtime, runtime_of
from idempotency.cli.options import this_user
from idempotency.letters.consumer import DeadLetterConsumer
from idempotency.store import overview
from idempotency.upkeep import maintenance
from idempotency.upkeep.presence import SignOfLife
from tests.support import bank as b
from tests.support import operations as op
from tests.support.commands import Answer, Run, runner
from tests.support.deliveries import Deliveries
from tests.support.outside import OutsideWorld
from tests.support.processes import eventually
from tests.support.tasks import enqueued

AMOUNT = 9876543210123


@pytest.fixture
def run(bank: Celery, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(monkeypatch, capsys)


def started(engine: Engine, key: str = "a", **options: Any) -> OperationId:
    with engine.connect() as connection:
        return op.started(connection, OperationId("default", b.deposit.name, key), **options).id


# ---------------------------------------------------------------- looking


def test_status_counts_what_is_where(run: Run, bank: Celery, deliveries: Deliveries, engine: Engine) -> None:
    deliveries.deliver(b.deposit, "a")
    deliveries.deliver(b.failing, "b", "permanent")
    deliveries.deliver(b.failing, "c", "flaky")
    started(engine, "d")
    with runtime_of(bank).engine.begin() as connection:
        enqueued(connection, b.deposit, "e")

    status = run("status", "--json").document
    assert status["operations"] == {
        b.deposit.name: {"accepted": 1, "completed": 1, "started": 1},
        b.failing.name: {"failed": 1, "released": 1},
    }
    assert (status["outbox"]["pending"], status["outbox"]["failed"], status["lease_over"]) == (2, 0, 0)
    assert status["dead_letters"]["by_reason"] == [{"task": b.failing.name, "reason": "no_account", "letters": 1}]
    assert 0 <= status["oldest_seconds"]["started"] <= status["oldest_seconds"]["released"] < 60
    people = run("status")
    assert people.status == 0
    assert all(word in people.out for word in ("completed", "█", "oldest started", "no_account"))


def test_status_says_what_waits_in_which_queue_and_who_works(run: Run, bank: Celery, engine: Engine) -> None:
    queue = bank.conf.task_default_queue
    with runtime_of(bank).engine.begin() as connection:
        for key in ("a", "b", "begun"):
            enqueued(connection, b.deposit, key)
        enqueued(connection, b.deposit, "tomorrow", countdown=86400)
        connection.execute(text("UPDATE idempotency.outbox SET available_at = available_at - interval '90 s'"))
    started(engine, "begun", queue=queue)
    with engine.connect() as connection:
        op.early(connection, queue=queue)
    SignOfLife(bank, "worker", "w@host", queues=lambda: [queue]).sign()

    status = run("status", "--json").document
    state = status["queues"][queue]
    assert (state["accepted"], state["scheduled"], state["running"], state["released"]) == (2, 1, 1, 1)
    assert 90 <= state["oldest_accepted_seconds"] < 150
    assert 500 < state["next_due_seconds"] <= 600
    assert (state["ready"], state["consumers"], state["at_least"]) == (0, 0, [])
    (process,) = status["processes"]
    assert (process["kind"], process["name"], process["queues"], process["is_silent"]) == (
        "worker",
        "w@host",
        [queue],
        False,
    )
    people = run("status")
    words = people.out.replace("│", " ").split()  # cells are folded
    assert {"oldest", "yet", "consumers", "w@host", "released"} <= set(words)


def test_a_broker_that_is_away_is_unknown_and_not_zero(run: Run, bank: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bank.conf, "broker_url", "amqp://guest:guest@127.0.0.1:1//")
    status = run("status", "--json").document
    state = status["queues"][bank.conf.task_default_queue]
    assert (status["broker_answered"], state["ready"], state["consumers"]) == (False, None, None)
    assert state["accepted"] == 0
    people = run("status")
    assert "the broker does not answer" in people.out
    assert "? ready" in people.out


def test_counts_stop_and_say_so(run: Run, bank: Celery, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "BOUND", 10)
    with runtime_of(bank).engine.begin() as connection:
        for number in range(12):
            enqueued(connection, b.deposit, f"a{number}")
        connection.execute(text("UPDATE idempotency.outbox SET queue = 'another' WHERE key IN ('a10', 'a11')"))
    queues = run("status", "--json").document["queues"]
    crowded, other = queues[bank.conf.task_default_queue], queues["another"]
    # each queue has its part: the backlog of one does not hide the other
    assert (crowded["accepted"], crowded["at_least"]) == (5, ["accepted", "scheduled"])
    assert (other["accepted"], other["at_least"]) == (2, [])
    assert "5+" in run("status").out


@pytest.mark.long
def test_many_ended_operations_are_estimated(
    run: Run, bank: Celery, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine.connect() as connection:
        for _ in range(300):
            op.completed(connection, message="m" * 1000)
    exact = run("status", "--json").document
    assert (exact["operations"][b.deposit.name], exact["operations_are_estimated"]) == ({"completed": 300}, False)
    monkeypatch.setattr(overview, "SAMPLE", 10)
    estimated = run("status", "--json").document
    assert estimated["operations_are_estimated"]
    assert "about" in run("status").out


def test_forget_ends_the_alarm_of_a_silent_process_only(run: Run, bank: Celery, engine: Engine) -> None:
    for name in ("gone@host", "here@host"):
        SignOfLife(bank, "worker", name).sign()
    with engine.connect() as connection:
        silent = "UPDATE idempotency.processes SET seen_at = seen_at - interval '2 min' WHERE name = 'gone@host'"
        connection.execute(text(silent))
    refused = run("forget", "here@host", "--reason", "r")
    assert (refused.status, "no process of this name is silent" in refused.error) == (1, True)
    assert run("forget", "gone@host", "--reason", "scaled down", "--as", "ann").status == 0
    assert [row["name"] for row in run("status", "--json").document["processes"]] == ["here@host"]
    with engine.connect() as connection:
        actors = connection.execute(text("SELECT actor, action, reason FROM idempotency.audit")).all()
    assert [tuple(row) for row in actors] == [("ann", "forget", "scaled down")]


def test_an_empty_database_has_a_status(run: Run) -> None:
    assert run("status", "--json").document["operations"] == {}
    assert run("status").status == 0


def test_list_answers_by_status_task_tenant_and_age(run: Run, deliveries: Deliveries) -> None:
    deliveries.deliver(b.deposit, "a")
    deliveries.deliver(b.deposit, "b", tenant="other")
    deliveries.deliver(b.failing, "c", "permanent")

    def keys(*options: object) -> list[str]:
        return [row["key"] for row in run("list", *options, "--json").document]

    assert keys() == ["c", "b", "a"]
    assert keys("--status", "failed") == keys("--task", b.failing.name) == keys("--task", "failing") == ["c"]
    assert keys("--tenant", "other") == ["b"]
    assert keys("--older-than", 60) == []
    assert keys("--limit", 1) == ["c"]
    assert "failed" in run("list").out


def test_list_shows_what_is_accepted_and_has_no_record(run: Run, bank: Celery, deliveries: Deliveries) -> None:
    with runtime_of(bank).engine.begin() as connection:
        for key in ("a", "begun", "c", "c", "refused"):  # c was enqueued twice
            enqueued(connection, b.deposit, key)
        enqueued(connection, b.deposit, "d", tenant="other")
        letter = """INSERT INTO idempotency.dead_letters (source, tenant, task, key, reason, payload)
                    VALUES ('broker', 'default', :task, 'refused', 'unknown_task', '')"""
        connection.execute(text(letter), {"task": b.deposit.name})
    deliveries.deliver(b.deposit, "begun")

    def keys(*options: object) -> list[str]:
        return [row["key"] for row in run("list", *options, "--json").document]

    assert keys("--status", "accepted") == ["d", "c", "a"]
    assert keys("--status", "completed") == ["begun"]
    assert sorted(keys()) == ["a", "begun", "c", "d"]
    assert keys("--status", "accepted", "--tenant", "other") == ["d"]
    assert keys("--status", "accepted", "--limit", 1) == ["d"]
    assert keys("--status", "accepted", "--task", b.failing.name) == []
    assert keys("--status", "accepted", "--older-than", 60) == []
    assert "accepted" in run("list").out


def test_a_limited_list_shows_the_newest_of_all(run: Run, bank: Celery, engine: Engine) -> None:
    with engine.connect() as connection:
        for key in ("older", "newer"):
            op.completed(connection, op.operation(b.deposit, key))
        connection.execute(
            text("""UPDATE idempotency.records SET created_at = created_at - interval '1 day',
                    opened_at = clock_timestamp() + interval '1 s' WHERE key = 'older'""")  # replayed
        )
    (row,) = run("list", "--limit", "1", "--json").document
    assert row["key"] == "newer"


@pytest.mark.long
def test_list_and_show_tell_what_no_worker_took(run: Run, bank: Celery, engine: Engine) -> None:
    with runtime_of(bank).engine.begin() as connection:
        enqueued(connection, b.deposit, "a")
        put_back = """UPDATE idempotency.outbox SET origin = 'retry', refusals = 3, published_at = clock_timestamp(),
                      first_refused_at = clock_timestamp() - interval '90 s',
                      last_error = '{"code": "unknown_task", "message": "no task of this name is registered"}'"""
        connection.execute(text(put_back))
    (row,) = run("list", "--status", "accepted", "--json").document
    assert (row["key"], row["status"], row["refusals"]) == ("a", "accepted", 3)
    assert row["first_refused_at"] is not None
    state = run("status", "--json").document["queues"][bank.conf.task_default_queue]
    assert state["accepted"] == 1
    assert 90 <= state["oldest_accepted_seconds"] < 150
    words = run("list").out.replace("│", " ").split()  # cells are folded
    assert {"accepted", "refused", "times", "unknown_task"} <= set(words)
    people = run("show", "a").out
    assert "accepted: it has not begun" in people
    assert "refused 3 times since " in people
    assert "+0000: no task of this name is registered" in people
    with engine.connect() as connection:
        connection.execute(text("UPDATE idempotency.outbox SET settled_at = clock_timestamp()"))
    assert "no record" in run("show", "a").out


@pytest.mark.long
def test_status_warns_of_due_rows_without_a_relay(run: Run, bank: Celery) -> None:
    with runtime_of(bank).engine.begin() as connection:
        enqueued(connection, b.deposit, "a")
        connection.execute(text("UPDATE idempotency.outbox SET available_at = available_at - interval '90 s'"))
    assert "no relay is running; rows due: 1, for 1 min 3" in run("status").out
    document = run("status", "--json").document
    assert (document["relay_is_running"], document["outbox"]["due"]) == (False, 1)
    SignOfLife(bank, "relay").sign()
    assert "no relay" not in run("status").out
    assert run("status", "--json").document["relay_is_running"]


def test_show_prints_effects_in_order_with_what_to_look_up(
    run: Run, deliveries: Deliveries, outside: OutsideWorld
) -> None:
    deliveries.deliver(b.transfer, "a", outside.url)
    effects = run("show", "a", "--json").document["effects"]
    assert list(effects) == ["reserve", "call"]  # by name it would be the other way round
    shown = run("show", "a").out
    cells = "".join(shown.replace("│", " ").split())
    assert effects["call"]["key"][:12] in cells  # cells are folded
    assert shown.index("reserve") < shown.index("call")


def test_show_has_everything_but_arguments_and_results_unless_asked(
    run: Run, bank: Celery, deliveries: Deliveries, outside: OutsideWorld
) -> None:
    with runtime_of(bank).engine.begin() as connection:
        enqueued(connection, b.transfer, "a", outside.url)
    outside.script = ["fail before"]
    deliveries.deliver(b.transfer, "a", outside.url)
    refused = run("cancel", "a", "--reason", "wrong card", "--as", "ann")
    assert (refused.status, "effect call has happened or may have" in refused.error) == (1, True)
    for _ in range(2):  # under one request id it is made once
        ended = run("cancel", "a", "--reason", "wrong card", "--as", "ann", "--may-have-happened", "--request-id", "r1")
        assert ended.out == f"ended: {b.transfer.name} a effect_unknown\n"

    shown = run("show", "a", "--json")
    document = shown.document
    assert (document["key"], document["record"]["status"], document["record"]["attempts"]) == ("a", "failed", 1)
    assert {name: effect["state"] for name, effect in document["effects"].items()} == {
        "reserve": "done",
        "call": "begun",
    }
    assert {row["origin"] for row in document["outbox"]} == {"enqueue", "retry"}
    assert [letter["reason"] for letter in document["dead_letters"]] == ["effect_unknown"]
    assert [(row["actor"], row["action"], row["reason"]) for row in document["audit"]] == [
        ("ann", "cancel", "wrong card")
    ]
    assert not {"message", "result", "token"} & set(document["record"])
    people = run("show", "a")
    assert (people.status, "wrong card" in people.out) == (0, True)
    assert not {"args", "result"} & set(document["effects"]["reserve"])
    assert not {"message", "payload"} & {*document["outbox"][0], *document["dead_letters"][0]}
    whole = run("show", "a", "--with-payload", "--json").document
    assert "result" in whole["effects"]["reserve"]
    assert outside.url in whole["record"]["message"]
    assert "token" not in whole["record"]


def test_amounts_are_shown_to_who_asks_for_them(run: Run, bank: Celery, deliveries: Deliveries) -> None:
    with runtime_of(bank).engine.begin() as connection:
        enqueued(connection, b.deposit, "a", AMOUNT)
    deliveries.deliver(b.deposit, "a", AMOUNT)
    for options in ((), ("--json",)):
        assert str(AMOUNT) not in run("show", "a", *options).out
        assert str(AMOUNT) not in run("list", *options).out
        assert str(AMOUNT) in run("show", "a", "--with-payload", *options).out


# ---------------------------------------------------------------- changing


def test_release_and_its_audit_row(run: Run, engine: Engine) -> None:
    id = started(engine)
    answer = run("release", "a", "--reason", "hangs", "--json")
    assert (answer.status, answer.document["change"]) == (0, "released")
    with engine.connect() as connection:
        assert op.record(connection, id).status == "released"
        actor = connection.execute(text("SELECT actor FROM idempotency.audit")).scalar_one()
    assert actor == this_user()
    again = run("release", "a", "--reason", "hangs")
    assert (again.status, again.error) == (
        1,
        f"idempotency: {b.deposit.name} a: is released; can only release what is started\n",
    )


def test_a_change_under_a_fence_that_is_over_is_refused(run: Run, engine: Engine) -> None:
    started(engine)
    fence = run("show", "a", "--json").document["record"]["fence"]
    refused = run("release", "a", "--reason", "r", "--fence", fence - 1)
    assert (refused.status, "look again" in refused.error) == (1, True)
    assert run("release", "a", "--reason", "r", "--fence", fence).status == 0


def test_an_unknown_effect_is_resolved_and_replayed_to_its_end(
    run: Run, bank: Celery, deliveries: Deliveries, outside: OutsideWorld, engine: Engine, entries: Any, relay: Any,
    processes: Any,
) -> None:  # fmt: skip
    outside.script = ["fail after"]
    deliveries.deliver(b.transfer, "a", outside.url)
    with engine.connect() as connection:
        connection.execute(text("DELETE FROM idempotency.outbox"))
        connection.execute(text("UPDATE idempotency.records SET effects = jsonb_set(effects, '{call,begun_at}', '1')"))
        op.age(connection, OperationId("default", b.transfer.name, "a"), available_at=-1)
    deliveries.deliver(b.transfer, "a", outside.url)
    (letter,) = run("dead-letters", "list", "--json").document
    assert letter["reason"] == "effect_unknown"

    resolved = run("effects", "resolve", "a", "call", "--happened", '{"amount": 3}', "--reason", "seen")
    assert resolved.status == 0
    assert resolved.out == (
        f"resolved: {b.transfer.name} a call; the operation ended as effect_unknown\n"
        f"to go on: idempotency dead-letters replay {letter['id']}\n"
    )
    replayed = run("dead-letters", "replay", letter["id"], "--as", "ann", "--reason", "resolved", "--json")
    assert replayed.document == {"replayed": letter["id"], "task": b.transfer.name, "key": "a"}
    audit = run("show", "a", "--json").document["audit"]
    assert [(row["action"], row["reason"]) for row in audit] == [("resolve", "seen"), ("replay", "resolved")]
    assert audit[1]["actor"] == "ann"
    assert run("dead-letters", "replay", letter["id"]).error.endswith(f"dead letter {letter['id']}: already replayed\n")
    with engine.connect() as connection:
        again = """INSERT INTO idempotency.dead_letters (source, tenant, task, key, reason, payload)
                   VALUES ('operation', 'default', :task, 'a', 'effect_unknown', '') RETURNING id"""
        newer = connection.execute(text(again), {"task": b.transfer.name}).scalar_one()
        refused = run("dead-letters", "replay", letter["id"]).error
        assert refused.endswith(f"already replayed; dead letter {newer} of this operation is open\n")
        connection.execute(text("DELETE FROM idempotency.dead_letters WHERE id = :id"), {"id": newer})

    processes.worker("--concurrency", "1")
    eventually(lambda: run("show", "a", "--json").document["record"]["status"] == "completed")
    assert (entries("a"), sum(outside.calls.values())) == (1, 1)


# ---------------------------------------------------------------- exit statuses


def test_what_is_not_found_or_ambiguous_is_one_line_and_status_1(run: Run, engine: Engine) -> None:
    missing = run("show", "nothing", "--json")
    assert missing == Answer(1, "", "idempotency: key 'nothing': no operation has it\n")
    with engine.connect() as connection:
        op.started(connection, OperationId("t1", b.deposit.name, "a"))
        op.started(connection, OperationId("t2", b.deposit.name, "a"))
    ambiguous = run("cancel", "a", "--reason", "r")
    assert (ambiguous.status, ambiguous.out, ambiguous.error.count("\n")) == (1, "", 1)
    assert "--tenant t1" in ambiguous.error
    assert run("show", "a", "--tenant", "t2").status == 0


def test_the_end_of_a_name_after_a_dot_chooses_the_operation(run: Run, engine: Engine) -> None:
    with engine.connect() as connection:
        for name in ("shop.pay", "shop.tasks.pay", "shop.prepay", "pay.late"):
            op.started(connection, OperationId("default", name, "a"))

    def found(task: str) -> Any:
        return run("show", "a", "--task", task, "--json")

    assert found("prepay").document["task"] == "shop.prepay"
    assert found("tasks.pay").document["task"] == "shop.tasks.pay"
    assert found("shop.pay").document["task"] == "shop.pay"
    assert "2 operations have it" in found("pay").error
    assert "no operation of 'hop.pay' has it, but one of pay.late, shop.pay, " in found("hop.pay").error


def test_a_filter_by_a_task_that_is_not_there_says_so(run: Run) -> None:
    def refused(*command: str, what: str) -> None:
        answer = run(*command, "--task", "failling")
        said = f"idempotency: --task failling: no {what} matches, and the application has no such task\n"
        assert answer == Answer(1, "", said)

    refused("list", what="operation")
    refused("dead-letters", "list", what="open dead letter")
    refused("dead-letters", "list", "--status", "all", what="dead letter")
    refused("dead-letters", "replay", "--dry-run", what="open dead letter")
    assert run("list", "--task", b.deposit.name).status == 0


def test_a_filter_takes_the_end_of_a_task_name_after_a_dot(
    run: Run, bank: Celery, deliveries: Deliveries, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("a", "b"):
        deliveries.deliver(b.failing, key, "permanent")
    assert run("dead-letters", "replay", "--task", "deposit", "--dry-run").out == "would be replayed: 0\n"
    ids = [row["id"] for row in run("dead-letters", "list", "--task", "failing", "--json").document]
    assert ids == sorted(ids, reverse=True)  # newest first
    for name in ("failing", b.failing.name):
        replayed = run("dead-letters", "replay", "--task", name, "--dry-run").out
        assert (
            replayed == f"would be replayed: 2 (dead letters {ids[1]}, {ids[0]}); of these, 2 were refused for good\n"
        )
    one = run("dead-letters", "replay", ids[0], "--yes").out
    assert one in {f"dead letter {ids[0]} replayed {b.failing.name} {key}\n" for key in "ab"}
    monkeypatch.setitem(bank.tasks, "shop.failing", b.failing)
    assert "several tasks end in it: shop.failing, tests.support.bank.failing" in run("list", "--task", "failing").error


def test_a_pipe_gets_a_row_on_a_line(run: Run, deliveries: Deliveries) -> None:
    key = "k" * 200
    deliveries.deliver(b.deposit, key)
    (line,) = (line for line in run("list").out.splitlines() if key in line)
    assert b.deposit.name in line
    assert "completed" in line


@pytest.mark.long
def test_a_terminal_of_80_columns_gets_a_line_for_each_column(
    environment: dict[str, str], deliveries: Deliveries
) -> None:
    key = "f6d3a8f0-6d4c-4b8e-9f53-0c2d5b1c9e11"
    deliveries.deliver(b.failing, key, "permanent")
    command = [sys.executable, "-m", "idempotency.cli", "dead-letters", "list", "-A", "tests.support.bank"]
    terminal, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    plain = environment | {"TERM": "dumb", "NO_COLOR": "1"}
    done = subprocess.Popen(command, env=plain, stdin=its, stdout=its, stderr=its, close_fds=True)
    os.close(its)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the other side is closed
        while part := os.read(terminal, 65536):
            shown += part
    assert done.wait(30) == 0
    os.close(terminal)
    lines = shown.decode().splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.rstrip() for line in lines if line.startswith(("task", "key", "reason"))] == [
        "task              tests.support.bank.failing",
        f"key               {key}",
        "reason            no_account",
    ]


def test_without_an_application_every_command_asks_for_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CELERY_APP")
    said = "idempotency: no application: name your Celery application with -A, or in CELERY_APP\n"
    for command in (("migrate",), ("doctor",), ("relay",), ("status",), ("list",), ("dead-letters", "list")):
        assert run(*command) == Answer(1, "", said)


def test_an_application_that_is_not_there_names_what_names_one(run: Run) -> None:
    assert run("status", "-A", "not_there").error.endswith(
        "No module named 'not_there'; name your Celery application with -A, or in CELERY_APP\n"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("list", "--status", "lost"),
        ("list", "--limit", 0),
        ("list", "--older-than", "1e300"),
        ("saga", "list", "--older-than", "1e300"),
        ("release", "a"),
        ("effects", "resolve", "a", "call", "--reason", "r"),
        ("effects", "resolve", "a", "call", "--reason", "r", "--happened", "{}", "--not-happened"),
        ("effects", "resolve", "a", "call", "--reason", "r", "--happened", "{not json"),
        ("nonsense",),
    ],
)
def test_a_wrong_command_line_is_status_2_and_prints_nothing_on_stdout(run: Run, arguments: Any) -> None:
    answer = run(*arguments)
    assert (answer.status, answer.out) == (2, "")
    assert answer.error


@pytest.mark.long
def test_a_database_without_the_tables_is_one_line(run: Run, engine: Engine) -> None:
    with engine.connect() as connection:
        connection.execute(text("DROP SCHEMA idempotency CASCADE"))
    answer = run("status", "--json")
    assert (answer.status, answer.out) == (1, "")
    assert answer.error.startswith("idempotency: the database does not have the tables of this version (UndefinedTable")
    assert answer.error.endswith("; run `idempotency migrate`\n")
    assert run("migrate", "--json").document["revision"]
    assert run("status", "--json").status == 0


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"password": "wrong"}, "idempotency_database_url: wrong password"),
        ({"database": "missing"}, "idempotency_database_url: no such database or user"),
        ({"port": 1}, "the database did not answer: connection refused"),
    ],
)
@pytest.mark.parametrize("command", ["status", "migrate", "list", "recover"])
def test_a_wrong_address_is_one_line_that_says_why(
    run: Run, bank: Celery, database: str, command: str, wrong: Any, why: str
) -> None:
    close_runtime(bank)
    bank.conf.idempotency_database_url = make_url(database).set(**wrong).render_as_string(hide_password=False)
    assert run(command) == Answer(1, "", f"idempotency: {why}\n")


def test_a_lock_that_times_out_is_the_databases_answer(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(*_: object, **__: object) -> None:
        raise OperationalError("SELECT secret", None, LockNotAvailable("canceling statement due to lock timeout"))

    monkeypatch.setattr(maintenance, "recover", waits)
    refused = run("recover")
    assert refused.error.startswith("idempotency: the database refused: LockNotAvailable")
    assert "secret" not in refused.error


def test_a_consumer_that_runs_on_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeadLetterConsumer, "run", lambda *_: None)
    assert run("dead-letters", "consume") == Answer(0, "", "consuming until stopped\n")


@pytest.mark.parametrize(("command", "field"), [("recover", "recovered"), ("purge", "purged")])
def test_recover_and_purge_answer_programs(run: Run, command: str, field: str) -> None:
    assert run(command, "--json").document == {field: 0}


@pytest.mark.long
def test_the_console_script_keeps_stdout_for_the_document(environment: dict[str, str], bank: Celery) -> None:
    def start(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "idempotency.cli", *arguments, "-A", "tests.support.bank"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    done = start("status", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["operations"] == {}
    refused = start("show", "nothing", "--json")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == "idempotency: key 'nothing': no operation has it\n"
    refused = start("cancel", "caf\udce9", "--reason", "r")  # a byte that is not UTF-8
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == "idempotency: argument 2 is not UTF-8\n"
