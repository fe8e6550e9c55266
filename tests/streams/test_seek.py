"""People see where streams are, and move that."""

from __future__ import annotations

import json
import signal
import threading
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from idempotency.application import close_runtime
from idempotency.cli.root import cli
from idempotency.errors import ChangeRefused, NotAuthenticated, OperationNotFound, ReplayRefused
from idempotency.operate.change import Change
from idempotency.operate.rename import rename_service
from idempotency.operate.replay import replay
from idempotency.operate.seek import forget_position, seek_stream
from idempotency.streams import Handling, declaring
from idempotency.upkeep.maintenance import purge_once
from tests.streams.conftest import Make
from tests.support import bank
from tests.support.processes import eventually
from tests.support.streaming import NAME, Handler, Streaming, configure, insert

CHANGE = Change("ann", "an error in the handler", request_id="r1")


def command(streaming: Streaming, *typed: object) -> Result:
    configure(streaming.environment)
    return CliRunner().invoke(cli, ["stream", *map(str, typed), "-A", "tests.support.bank"])


@pytest.mark.few(1)
def test_a_stream_that_is_sent_back_handles_nothing_twice(streaming: Streaming) -> None:
    accounts = streaming.broker.publish_many(20)
    streaming.handler().declared()  # one that is not known here counts as moving money
    process = streaming.start()
    streaming.wait_until_handled()
    configure(streaming.environment)
    topic = streaming.broker.topic
    with pytest.raises(ChangeRefused, match="is being handled"):
        seek_stream(bank.app, NAME, topic, 0, 5, CHANGE)
    assert seek_stream(bank.app, NAME, topic, 0, 5, CHANGE, take=True) == 20
    assert seek_stream(bank.app, NAME, topic, 0, 5, CHANGE, take=True) == 20  # the same request again
    accounts += streaming.broker.publish_many(5, first=100)
    streaming.wait_until_handled()
    assert streaming.entries() == accounts
    assert process.end() == 0
    assert "stream_partition_lost" in process.log
    (row,) = streaming.query("SELECT actor, reason, details FROM idempotency.audit WHERE action = 'seek_stream'")
    assert (row.actor, row.details["from"], row.details["to"]) == ("ann", 20, 5)
    assert row.details["taken_from"].split("|")[3] == str(process.pid)


@pytest.mark.long
def test_a_renamed_application_goes_on_where_it_was(streaming: Streaming) -> None:
    accounts = streaming.broker.publish_many(10)
    process = streaming.start()
    streaming.wait_until_handled()
    assert process.end() == 0
    streaming.environment["SERVICE"] = "ledger"
    configure(streaming.environment)
    close_runtime(bank.app)
    renamed = rename_service(bank.app, "bank", "ledger", replace(CHANGE, request_id=None, is_verified=True))
    assert (renamed["records"], renamed["stream_positions"]) == (10, 1)
    streaming.broker.publish_many(10)  # what was handled is known under the new name
    accounts += streaming.broker.publish_many(5, first=50)
    streaming.start()
    streaming.wait_until_handled()
    assert streaming.entries() == accounts


@pytest.mark.long
def test_an_application_is_renamed_also_if_a_process_has_run_under_the_new_name(rabbit: Streaming) -> None:
    """What it found under the old name is another application's, and refused; the earlier position counts."""
    accounts = rabbit.broker.publish_many(5)
    process = rabbit.start()
    rabbit.wait_until_handled()
    assert process.end() == 0
    rabbit.environment["SERVICE"] = "ledger"
    accounts += rabbit.broker.publish_many(5, first=100)
    process = rabbit.start()
    eventually(lambda: sorted(rabbit.entries()) == sorted(accounts), what=rabbit.logs())
    assert rabbit.letters() == [("service_mismatch", "open")] * 5
    configure(rabbit.environment)
    close_runtime(bank.app)
    renamed = rename_service(bank.app, "bank", "ledger", replace(CHANGE, request_id=None, is_verified=True))
    assert (renamed["records"], renamed["stream_positions"]) == (5, 1)
    eventually(lambda: "stream_partition_lost" in process.log, what=process.log)  # it reads again what it had handled
    accounts += rabbit.broker.publish_many(5, first=200)
    eventually(lambda: sorted(rabbit.entries()) == sorted(accounts), what=rabbit.logs())
    (row,) = rabbit.query("SELECT service, position FROM idempotency.stream_positions")
    assert (row.service, row.position) == ("ledger", 15)
    assert process.end() == 0
    assert (
        rename_service(bank.app, "bank", "ledger", replace(CHANGE, request_id="r2", is_verified=True))[
            "stream_positions"
        ]
        == 0
    )


@pytest.mark.long
def test_the_way_back_where_money_is_moved_needs_a_token(rabbit: Streaming) -> None:
    rabbit.broker.publish_many(10)
    process = rabbit.start()
    rabbit.wait_until_handled()
    assert process.end() == 0
    configure(rabbit.environment)
    topic = rabbit.broker.topic
    rabbit.handler(moves_money=True).declared()
    with pytest.raises(NotAuthenticated, match="needs an operator's token"):
        seek_stream(bank.app, NAME, topic, 0, 5, CHANGE)
    with pytest.raises(NotAuthenticated, match="needs an operator's token"):
        seek_stream(bank.app, NAME, topic, 0, 5, CHANGE, take=True)
    typed = ("seek", NAME, "--topic", topic, "--to", 5, "--reason", "again", "--as", "ann")
    refused = command(rabbit, *typed)
    assert refused.exit_code == 1
    assert "IDEMPOTENCY_TOKEN" in str(refused.exception)
    assert rabbit.positions() == {0: 10}
    seek_stream(bank.app, NAME, topic, 0, 12, CHANGE)  # forwards: nothing is handled again
    seek_stream(bank.app, NAME, topic, 0, 5, replace(CHANGE, request_id="r2", is_verified=True))
    rabbit.handler().declared()
    seek_stream(bank.app, NAME, topic, 0, 3, replace(CHANGE, request_id="r3"))
    assert rabbit.positions() == {0: 3}


def test_the_position_is_never_moved_where_no_one_has_been(rabbit: Streaming) -> None:
    configure(rabbit.environment)
    with pytest.raises(OperationNotFound, match="has ever had nowhere/0"):
        seek_stream(bank.app, NAME, "nowhere", 0, 5, CHANGE)


@pytest.mark.long
def test_the_commands_show_and_move_positions(make_streaming: Make) -> None:
    streaming = make_streaming("rabbitmq", partitions=2)
    streaming.handler().declared()
    streaming.broker.publish_many(10)
    assert json.loads(command(streaming, "status", "--json").stdout) == []
    process = streaming.start()
    streaming.wait_until_handled()
    (first, _) = json.loads(command(streaming, "status", "--json").stdout)
    assert (first["consumer"], first["topic"], first["partition"]) == (NAME, streaming.broker.topic, 0)
    assert (first["position"], first["lease_left"] > 0, first["stopped"]) == (5, True, None)
    table = command(streaming, "status", "--only", NAME).stdout
    assert f"{streaming.broker.topic}/1" in table
    assert str(process.pid) in table
    moved = (
        "seek",
        NAME,
        "--topic",
        streaming.broker.topic,
        "--partition",
        1,
        "--to",
        2,
        "--reason",
        "again",
        "--as",
        "ann",
    )
    refused = command(streaming, *moved)
    assert refused.exit_code == 1
    assert "--take" in str(refused.exception)
    assert process.end() == 0
    done = command(streaming, *moved)
    assert done.exit_code == 0
    assert "goes on from 2, was at 5" in done.stdout
    assert "handled again" in done.stdout
    assert streaming.positions() == {0: 5, 1: 2}


@pytest.mark.long
def test_the_ends_of_streams_are_stored_and_counted(streaming: Streaming) -> None:
    """A lag that is not nought, of one that waits for its first message."""
    streaming.environment["LEASE"] = "1"
    streaming.broker.publish({"account": "a0", "how": "hold"})
    streaming.broker.publish_many(9, first=1)
    streaming.plan("held", "hold")
    process = streaming.start(batch=5)
    streaming.wait_for("held.held")
    eventually(
        lambda: (
            [
                row.lag
                for row in streaming.query("SELECT end_position - position AS lag FROM idempotency.stream_positions")
            ]
            == [10]
        ),
        what=process.log,
    )
    (streaming.directory / "held.go").touch()
    streaming.wait_until_handled()


@pytest.mark.long
def test_two_streams_of_one_process_are_independent(make_streaming: Make) -> None:
    from tests.support.streaming import Handler

    one, two = make_streaming("rabbitmq"), make_streaming("kafka")
    one.broker.publish({"account": "bad", "how": "permanent"})
    accounts = two.broker.publish_many(10)
    process = one.start(
        Handler(one.broker.source(), "one", options={"on_failure": "stop"}), Handler(two.broker.source(), "two")
    )
    eventually(lambda: sorted(two.entries()) == sorted(accounts), what=process.log)
    eventually(lambda: "offset 0 has failed" in one.stopped(), what=process.log)
    assert process.end() == 0
    rows = one.query("SELECT DISTINCT task FROM idempotency.records ORDER BY task")
    assert [row.task for row in rows] == ["stream.one", "stream.two"]


def test_nothing_is_left_behind_by_a_consumer_that_has_stopped_before_its_first_turn(rabbit: Streaming) -> None:
    stop = threading.Event()
    stop.set()
    rabbit.consumer(stop).run()
    assert rabbit.owners() == {}


@pytest.mark.long
def test_a_partition_that_is_read_no_more_can_be_forgotten(make_streaming: Make) -> None:
    """And not one that a process has, or that the application reads."""
    streaming = make_streaming("rabbitmq", partitions=2)
    streaming.broker.publish_many(10)
    both = streaming.handler().declared()
    process = streaming.start()
    streaming.wait_until_handled()
    topic = streaming.broker.topic
    configure(streaming.environment)
    verified = replace(CHANGE, is_verified=True)
    with pytest.raises(ChangeRefused, match="is being handled"):
        forget_position(bank.app, NAME, topic, 1, verified)
    assert process.end() == 0
    with pytest.raises(ChangeRefused, match="the application reads"):
        forget_position(bank.app, NAME, topic, 1, verified)
    Handler(streaming.broker.source(partitions=1), options={"moves_money": True}).declared()
    assert (both.source.reads(topic, 1), both.source.reads("other", 1)) == (True, False)
    with pytest.raises(NotAuthenticated):
        forget_position(bank.app, NAME, topic, 1, CHANGE)
    assert forget_position(bank.app, NAME, topic, 1, verified) == 5
    assert forget_position(bank.app, NAME, topic, 1, verified) == 5, "the same request again"
    shown = json.loads(command(streaming, "status", "--json").stdout)
    assert [(row["partition"], row["position"]) for row in shown] == [(0, 5)]
    with pytest.raises(OperationNotFound):
        forget_position(bank.app, NAME, topic, 1, replace(verified, request_id="r2"))
    (row,) = streaming.query("SELECT actor, details FROM idempotency.audit WHERE action = 'forget_position'")
    assert (row.actor, row.details["partition"], row.details["from"]) == ("ann", 1, 5)
    streaming.handler().declared()
    answer = command(streaming, "forget", NAME, "--topic", topic, "--partition", 0, "--reason", "x")
    assert (answer.exit_code, "the application reads" in str(answer.exception)) == (1, True)


@pytest.mark.long
def test_a_frozen_owner_of_a_forgotten_partition_does_nothing_again(make_streaming: Make) -> None:
    """Its row is there with another fence, and says that a person has to decide: its records may be gone by then."""
    streaming = make_streaming("rabbitmq", partitions=2)
    streaming.environment["LEASE"] = "1"
    accounts = streaming.broker.publish_many(10)
    process = streaming.start()
    streaming.wait_until_handled()
    process.signal(signal.SIGSTOP)
    topic, change = streaming.broker.topic, replace(CHANGE, request_id=None)
    configure(streaming.environment)
    Handler(streaming.broker.source(partitions=1)).declared()  # the new code reads one partition
    is_over = "SELECT FROM idempotency.stream_positions WHERE partition = 1 AND locked_until < now()"
    eventually(lambda: streaming.query(is_over))
    assert forget_position(bank.app, NAME, topic, 1, change) == 5
    streaming.query("WITH gone AS (DELETE FROM idempotency.records) SELECT")  # by retention
    process.signal(signal.SIGCONT)
    streaming.wait_until_stopped("position 5 was forgotten by a person; say with `idempotency stream seek`")
    assert sorted(streaming.entries()) == sorted(accounts)
    assert process.end() == 0
    assert forget_position(bank.app, NAME, topic, 1, change) == 5, "it is shown again, and can be forgotten again"
    assert streaming.stopped() == ""


@pytest.mark.long
def test_a_forgotten_partition_that_is_read_again_skips_nothing(rabbit: Streaming) -> None:
    """Also from `latest`, which without a position would be where the stream ends now."""
    rabbit.broker.publish_many(3)
    process = rabbit.start_from("latest")
    eventually(lambda: rabbit.positions().get(0) == 3, what=process.log)
    accounts = rabbit.broker.publish_many(2, first=10)
    rabbit.wait_until_handled()
    assert process.end() == 0
    configure(rabbit.environment)
    topic, change = rabbit.broker.topic, replace(CHANGE, request_id=None, is_verified=True)
    declaring._declared.pop(NAME, None)  # code that does not read it for a while
    assert forget_position(bank.app, NAME, topic, 0, change) == 5
    accounts += rabbit.broker.publish_many(5, first=100)  # meanwhile
    rabbit.start_from("latest")
    rabbit.wait_until_stopped("position 5 was forgotten by a person")
    seek_stream(bank.app, NAME, topic, 0, 5, change, take=True)
    rabbit.wait_until_handled()
    assert rabbit.entries() == accounts
    assert rabbit.stopped() == ""


@pytest.mark.long
def test_what_a_seek_has_passed_over_between_two_attempts_ends_as_a_dead_letter(rabbit: Streaming) -> None:
    """Its call outside has happened. Not while a partition may still come to it, and a way back lets a replay finish it."""
    rabbit.environment["RETRY_BASE"] = "250"
    fails = [True]

    def handle(stream: Handling, event: Any) -> None:
        if event["account"] == "bad":
            stream.effect("call", lambda idempotency_key: 1)
            if fails:
                raise ValueError("again")
        insert(stream, event["account"])

    rabbit.broker.publish({"account": "bad"})
    rabbit.broker.publish({"account": "a1"})
    with rabbit.handled_by(handle, "passed"):
        eventually(lambda: rabbit.query("SELECT FROM idempotency.records WHERE status = 'released'"))
    change = replace(CHANGE, request_id=None, is_verified=True)
    topic = rabbit.broker.topic
    seek_stream(bank.app, "passed", topic, 0, 1, change)
    rabbit.query("WITH aged AS (UPDATE idempotency.records SET available_at = now() - interval '30 hours') SELECT")
    purge_once(bank.app, limit=100)
    assert rabbit.letters() == [], "no process has the partition: it may wait there"
    with rabbit.handled_by(handle, "passed"):
        eventually(lambda: rabbit.entries() == ["a1"])
        purge_once(bank.app, limit=100)
        assert rabbit.letters() == [("unfinished", "open")]
        (letter,) = rabbit.query("SELECT id, last_error FROM idempotency.dead_letters")
        assert "its stream has gone on without it" in letter.last_error
        with pytest.raises(ReplayRefused, match="its message is not known yet"):
            replay(bank.app, letter.id, change)
        fails.clear()
        seek_stream(bank.app, "passed", topic, 0, 0, change, take=True)
        rabbit.wait_until_handled()
        replay(bank.app, letter.id, change)
        eventually(lambda: rabbit.entries() == ["a1", "bad"])
    purge_once(bank.app, limit=100)
    assert rabbit.letters() == [("unfinished", "replayed")]
