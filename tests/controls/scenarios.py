"""The controls: for each safeguard, a scenario that passes only with it, and the oracle that must report its absence.

A scenario is the same with and without its safeguard. It returns what its oracle and the checker report: nothing with
the safeguard in place, and something of the oracle's own without it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from amqp.exceptions import MessageNacked
from sqlalchemy.orm import Session

from idempotency import OperationNotFound, lookup
from idempotency.application import runtime_of
from idempotency.attempt.hints import hint_name
from idempotency.letters.consumer import DeadLetterConsumer
from idempotency.relay.resend import resend_lost
from idempotency.upkeep.maintenance import recover
from idempotency.wire.headers import FINGERPRINT_HEADER
from idempotency.wire.keys import OperationId
from tests.chaos.checker import Violation
from tests.controls.app import DELIVERY_LIMIT
from tests.controls.stage import TENANT, Stage
from tests.support import bank, crashing
from tests.support.processes import Worker, eventually


@dataclass(frozen=True, slots=True)
class Control:
    """One safeguard, the oracle that must report its absence, and what else is off in both runs, and why."""

    name: str
    safeguard: str
    invariant: str
    oracle: str
    run: Callable[[Stage], Sequence[Violation]]
    also_off: str = ""
    environment: dict[str, str] = field(default_factory=dict)


def _stopped_and_taken_over(stage: Stage, *, wipe_redis: bool = False) -> tuple[Any, list[Worker], int]:
    """An attempt frozen in its body and taken over; the new holder waits in its own body.

    Returns the record as the new holder has claimed it, the workers, and the frozen process.
    """
    workers = [stage.worker(), stage.worker()]
    for worker in workers:
        worker.wait_until_ready()
    crashing.plan(stage.crashes, "body.entered", crashing.STOP)
    stage.send(bank.slow_deposit, "a", 0.1)
    frozen = _pid(stage.crashes / "body.entered.stopped")
    crashing.plan(stage.crashes, "working", crashing.HOLD)
    if wipe_redis:
        stage.redis.flushdb()
    stage.sql("UPDATE idempotency.records SET locked_until = clock_timestamp() - interval '1 s'")
    assert recover(stage.app) == 1
    stage.relay_everything()
    holder = _pid(stage.crashes / "working.held")
    record = stage.record("a")
    assert record is not None
    assert f"|{holder}|" in record.locked_by
    return record, workers, frozen


def _pid(path: Path) -> int:
    eventually(path.exists, timeout=45, what=path.name)
    return int(path.read_text())


def fence(stage: Stage) -> Sequence[Violation]:
    # Frozen in its body: in a finishing transaction the server would end its session, and the fence decide nothing.
    _, workers, frozen = _stopped_and_taken_over(stage)
    os.kill(frozen, signal.SIGCONT)
    eventually(
        lambda: any("event=fenced" in worker.log for worker in workers) or _status(stage, "a") == "completed",
        timeout=45,
        what="the former holder has tried to finish",
    )
    (stage.crashes / "working.go").touch()
    stage.wait_for("a", "completed", *workers)
    return stage.check()


def status(stage: Stage) -> Sequence[Violation]:
    stage.sql("ALTER TABLE idempotency.records DISABLE TRIGGER check_record")
    worker = stage.worker().wait_until_ready()
    crashing.plan(stage.crashes, "finish.committed", crashing.RAISE_EXIT)  # a shutdown just after the commit
    stage.send(bank.deposit, "a")
    eventually(
        lambda: "event=fenced" in worker.log or "event=released" in worker.log, timeout=45, what="the late release"
    )
    stage.relay_everything()
    stage.wait_for_everything_sent(worker)
    return stage.check()


def mandatory(stage: Stage) -> Sequence[Violation]:
    with stage.session() as session:
        stage.enqueue(session, "routed")
    stage.relay_everything()
    with stage.app.connection_for_write() as connection:
        connection.default_channel.queue_unbind(stage.queue, stage.queue, stage.queue)
    with stage.session() as session:
        stage.enqueue(session, "unroutable")
    stage.relay.run_once()
    return stage.check(drained=False, queues={stage.queue: stage.held_by_broker()})


def confirm(stage: Stage) -> Sequence[Violation]:
    with stage.session() as session:
        stage.enqueue(session, "taken")
    stage.relay_everything()

    def is_full() -> bool:
        with stage.app.connection_for_write() as connection:
            channel = connection.channel()
            filler = channel.prepare_message("filler", None, "text/plain", "utf-8", {}, {})
            try:
                channel.basic_publish(filler, exchange=stage.queue, routing_key=stage.queue)
            except MessageNacked:
                return True
        return False

    eventually(is_full, timeout=30, what="the queue is full")  # and refuses, which only a confirm tells
    with stage.session() as session:
        stage.enqueue(session, "refused")
    stage.relay.run_once()
    return stage.check(drained=False, queues={stage.queue: stage.held_by_broker()})


def delivery_limit(stage: Stage) -> Sequence[Violation]:
    marks = stage.crashes / "killed"

    def deliveries() -> int:
        return len(marks.read_text()) if marks.exists() else 0

    worker = stage.worker(KILL_ALWAYS="hint.left").wait_until_ready()
    stage.send(bank.deposit, "poison")
    consumer = DeadLetterConsumer(stage.app)
    eventually(
        lambda: consumer.run_once() or deliveries() > DELIVERY_LIMIT + 3,
        timeout=50,
        what="the end of the loop",
    )
    consumer.close()
    found = list(stage.check(drained=False, queues={stage.queue: 1}))
    if deliveries() > DELIVERY_LIMIT + 1:
        what = f"an endless loop: delivered {deliveries()} times, the limit is {DELIVERY_LIMIT}"
        found.append(Violation("I13", f"{TENANT}/{bank.deposit.name}/poison", what))
    assert worker.process.poll() is None
    return found


def select_by_state(stage: Stage) -> Sequence[Violation]:
    worker = stage.worker()
    with Session(stage.engine.execution_options(isolation_level="READ COMMITTED")) as slow, slow.begin():
        stage.enqueue(slow, "slow")  # has the smaller id, and is committed later
        with stage.session() as session:
            stage.enqueue(session, "quick")
        stage.relay_everything()
    for _ in range(3):
        stage.relay.run_once()
    stage.wait_for_everything_sent(worker.wait_until_ready())
    return stage.check()


def outbox_until_terminal(stage: Stage) -> Sequence[Violation]:
    with stage.session() as session:
        for account in ("a", "b", "c"):
            stage.enqueue(session, account)
    stage.relay_everything()
    with stage.app.connection_for_write() as connection:
        connection.default_channel.queue_delete(stage.queue)
    stage.relay.close()  # its next connection declares the queue again
    stage.sql("UPDATE idempotency.outbox SET published_at = published_at - interval '1 hour'")
    resend_lost(stage.app)
    stage.relay_everything()
    stage.wait_for_everything_sent(stage.worker().wait_until_ready())
    return stage.check()


def tenant(stage: Stage) -> Sequence[Violation]:
    worker = stage.worker().wait_until_ready()
    stage.send(bank.deposit, "a", tenant="shop")
    stage.wait_for("a", "completed", worker)
    found = list(stage.check(tenants=frozenset({"shop"})))
    with contextlib.suppress(OperationNotFound):
        stored = lookup(stage.app, bank.deposit.name, "a", tenant="other")
        what = f"was shown the result of 'shop': {stored.result_text}"
        found.append(Violation("I23", f"other/{bank.deposit.name}/a", what))
    return found


def hint_compare(stage: Stage) -> Sequence[Violation]:
    record, workers, frozen = _stopped_and_taken_over(stage, wipe_redis=True)
    os.kill(frozen, signal.SIGCONT)
    # fenced, it drops its hint with its next call to Redis, finds the new holder, and is counted as a duplicate
    eventually(lambda: (row := stage.record("a")) and row.duplicates > 0, timeout=45, what="the duplicate was counted")
    value = stage.redis.get(
        hint_name(OperationId(TENANT, bank.slow_deposit.name, "a"), runtime_of(stage.app).hints.owner)
    )
    found = []
    if value is None or not str(value).startswith(record.token):
        found.append(Violation("hint", "a", "a former holder has removed the hint of the living one"))
    (stage.crashes / "working.go").touch()
    stage.wait_for("a", "completed", *workers)
    return [*found, *stage.check()]


def counted_mark(stage: Stage) -> Sequence[Violation]:
    worker = stage.worker().wait_until_ready()
    # An eager caller that died before its claim: there is no record, and nothing that the broker would hand out again.
    id, headers = bank.deposit._checked(("a",), {}, None, None)
    runtime_of(stage.app).hints.take(id, "the dead one's", headers[FINGERPRINT_HEADER])
    stage.send(bank.deposit, "a")
    ignored = re.compile(rf"Task {bank.deposit.name}\[[^]]+\] ignored")
    eventually(
        lambda: _status(stage, "a") == "completed" or ignored.search(worker.log), timeout=45, what="the delivery"
    )
    stage.wait_for_everything_sent(worker)
    return stage.check()


def _status(stage: Stage, account: str) -> str | None:
    row = stage.record(account)
    return None if row is None else row.status


CONTROLS: tuple[Control, ...] = (
    Control(
        "fence",
        "fence and token in every write",
        "I4",
        "the record's history has a write of a process that did not hold it",
        fence,
    ),
    Control(
        "status",
        "status in every write",
        "I5",
        "a completed record is released again by its own attempt",
        status,
        also_off="the table's own check of a record's shape, which refuses such a row",
    ),
    Control(
        "confirm",
        "a row is marked after its confirm",
        "I8",
        "a row is marked, and the broker has refused its message",
        confirm,
        also_off="resend does not run: it would send the row again",
        environment={"MAX_LENGTH": "1"},
    ),
    Control(
        "mandatory",
        "unroutable messages come back",
        "I8",
        "a row is marked, and no queue holds its message",
        mandatory,
        also_off="resend does not run: it would send the row again",
    ),
    Control(
        "delivery_limit",
        "the queue's delivery limit",
        "I13",
        "a message that kills its worker before the claim is delivered again and again",
        delivery_limit,
        also_off="the refusal to start on a queue with a low limit",
    ),
    Control(
        "select_by_state",
        "the relay selects by state",
        "I8",
        "a row committed late, with a small id, is never published",
        select_by_state,
    ),
    Control(
        "outbox_until_terminal",
        "a row stays until its operation has ended",
        "I15",
        "accepted operations are nowhere after the queue was deleted",
        outbox_until_terminal,
    ),
    Control(
        "tenant",
        "the tenant in every WHERE",
        "I23",
        "one tenant is shown the record of another",
        tenant,
    ),
    Control(
        "hint_compare",
        "the token is compared before a hint is dropped",
        "hint",
        "the hint of a living holder is gone from Redis",
        hint_compare,
    ),
    Control(
        "counted_mark",
        "only the counted mark acknowledges",
        "I15",
        "a message is acknowledged on a dead holder's hint, and its operation is nowhere",
        counted_mark,
        also_off="no outbox row: sent with delay(), or the row would send it again",
    ),
)
