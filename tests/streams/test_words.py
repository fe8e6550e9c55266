"""What people are told: of letters that can only be discarded, of positions beyond the end, and what the doctor leaves out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from confluent_kafka.admin import AdminClient
from typer.testing import CliRunner

from idempotency import streams
from idempotency.attempt import entries
from idempotency.checks import doctor
from idempotency.checks.doctor import check_configuration
from idempotency.cli.root import cli
from idempotency.errors import InvalidArguments, ReplayRefused
from idempotency.operate.change import Change
from idempotency.operate.replay import replay
from idempotency.streams import declaring
from tests.streams.test_seek import command
from tests.support import bank as banking
from tests.support.processes import eventually
from tests.support.streaming import NAME, KafkaBroker, Streaming

ROOT = Path(__file__).parent.parent.parent


def letters(streaming: Streaming) -> dict[str, int]:
    return {row.reason: row.id for row in streaming.query("SELECT id, reason FROM idempotency.dead_letters")}


def test_a_letter_of_a_message_that_names_no_operation_says_so_and_where_it_is(rabbit: Streaming) -> None:
    rabbit.broker.publish({"amount": 1})
    rabbit.broker.publish(b"no json")
    rabbit.broker.publish({"account": "a0"})
    rabbit.broker.publish({"account": "a0", "amount": 2})
    with rabbit.consuming(key="{event[account]}"):
        rabbit.wait_until_handled()
    found = letters(rabbit)
    for reason, said in (
        ("missing_key", "no idempotency key, so it names no operation; it can only be discarded"),
        ("undecodable", "could not be decoded, so it names no operation; it can only be discarded"),
    ):
        with pytest.raises(ReplayRefused, match=said):
            replay(banking.app, found[reason], Change("ann", "again"))
    (row,) = rabbit.query("SELECT last_error FROM idempotency.dead_letters WHERE reason = 'fingerprint_mismatch'")
    assert "used with another value; only a message with another key can be handled" in row.last_error
    shown = CliRunner().invoke(
        cli, ["dead-letters", "show", str(found["fingerprint_mismatch"]), "-A", "tests.support.bank", "--json"]
    )
    fields = json.loads(shown.stdout)
    assert (fields["topic"], fields["partition"], fields["offset"]) == (rabbit.broker.topic, 0, 3)


@pytest.mark.long
def test_a_seek_beyond_the_known_end_says_so(rabbit: Streaming) -> None:
    rabbit.handler().declared()
    rabbit.broker.publish_many(5)
    with rabbit.consuming():
        rabbit.wait_until_handled()
    to = [NAME, "--topic", rabbit.broker.topic, "--reason", "again", "--as", "ann", "--to"]
    assert "beyond its end" not in command(rabbit, "seek", *to, 5).stdout
    said = " ".join(command(rabbit, "seek", *to, 50).stdout.split())
    assert "beyond its end, 5 as far as is known: the partition stops, unless there is a message 50 by then" in said
    with rabbit.consuming():
        rabbit.wait_until_stopped("ends at 5: it was recreated, or the position was moved beyond its end")


def test_a_reconcile_that_cannot_be_called_says_what_it_is_called_with(bank: Any) -> None:
    def reconcile(order: str) -> None: ...

    with pytest.raises(
        InvalidArguments, match="cannot be called with these arguments: got an unexpected keyword argument 'doubt'"
    ):
        entries.check_call("effect 'call': reconcile", reconcile, "o1", doubt=None)


def test_an_application_of_streams_alone_is_told_nothing_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declaring, "_declared", {})
    monkeypatch.setattr(doctor, "idempotent_tasks", lambda app: [])  # shared ones, which other tests have imported
    app = Celery("shop", broker="amqp://localhost", set_as_current=False)

    def subjects() -> set[str]:
        return {each.subject for each in check_configuration(app, None)}

    of_workers = {"queue celery", "worker_prefetch_multiplier"}
    assert of_workers <= subjects()
    streams.stream("orders", source=streams.rabbitmq_stream("orders"))(lambda given, event: None)
    assert not of_workers & subjects()


@pytest.mark.long
def test_a_kafka_to_try_has_its_topics_until_it_is_stopped() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "services", "kafka", "--topic", "orders:3", "--topic", "refunds:1"],
        cwd=ROOT,
        env=os.environ,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        servers = process.stdout.readline().strip()
        found = AdminClient({"bootstrap.servers": servers}).list_topics(timeout=10).topics
        assert {name: len(each.partitions) for name, each in found.items()} == {"orders": 3, "refunds": 1}
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait(60)


@pytest.mark.long
def test_one_that_waits_for_its_group_says_so(make_streaming: Any) -> None:
    """One partition, and two processes: the second has none, as one has none before a dead member is missed."""
    kafka = make_streaming("kafka")
    assert isinstance(kafka.broker, KafkaBroker)
    kafka.broker.publish_many(2)
    kafka.start()
    kafka.wait_until_handled()
    second = kafka.start()
    eventually(lambda: "stream_has_no_partition" in second.log, what=second.log, timeout=20)
    assert "session.timeout.ms" in second.log
