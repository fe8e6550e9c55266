"""A process is killed at every moment: nothing is lost, and nothing is there twice."""

from __future__ import annotations

import pytest

from tests.streams.conftest import Make
from tests.support.crashing import KILL_CHILD
from tests.support.outside import OutsideWorld
from tests.support.processes import eventually
from tests.support.streaming import Streaming, until_gone

# Between these, all else happens; see `observe/crash_points`.
POINTS = (
    "stream.assigned",
    "stream.fetched",
    "stream.run",
    "stream.recorded",
    "stream.advanced",
    "stream.committed",
    "stream.copied",
    "stream.given_up",
)
KINDS = ("rabbitmq", pytest.param("kafka", marks=pytest.mark.long))


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_kill_at_every_moment_loses_nothing_and_doubles_nothing(make_streaming: Make, kind: str) -> None:
    """A stream for each moment, all at once: a group of Kafka misses a member only after a while."""
    each = {point: make_streaming(kind, partitions=2, apart=True) for point in POINTS}
    accounts = {point: set(streaming.broker.publish_many(30)) for point, streaming in each.items()}
    killed = {}
    for point, streaming in each.items():
        planned = streaming.plan(point, KILL_CHILD)
        killed[point] = planned, streaming.start(batch=7)
    for point, (planned, process) in killed.items():
        if point == "stream.given_up":
            each[point].wait_until_handled()
            process.end()
        until_gone(planned, process)
        process.kill()
        assert process.status == -9, point
        accounts[point] |= set(each[point].broker.publish_many(10, first=100))
        each[point].start(batch=7)
    for point, streaming in each.items():
        streaming.wait_until_handled()
        assert sorted(streaming.entries()) == sorted(accounts[point]), point


@pytest.mark.few(1)
@pytest.mark.parametrize("apart", [False, True])
def test_without_position_and_records_in_the_commit_the_same_kill_doubles(make_streaming: Make, apart: bool) -> None:
    """What these tests compare with: positions that are committed apart, as a broker's offsets are."""
    streaming = make_streaming("rabbitmq")
    streaming.environment["POSITIONS_APART"] = "1" if apart else ""
    accounts = streaming.broker.publish_many(10)
    planned = streaming.plan("stream.committed", KILL_CHILD)
    process = streaming.start()
    until_gone(planned, process)
    process.kill()
    streaming.start()
    streaming.wait_until_handled()
    assert sorted(streaming.entries()) == sorted(accounts * 2 if apart else accounts)


def test_a_call_outside_happens_once_whenever_its_process_is_killed(
    make_streaming: Make, outside: OutsideWorld
) -> None:
    points = ("effect.begun", "effect.called", "effect.recorded", "stream.advanced", "finish.committed")
    each = {point: make_streaming("rabbitmq", apart=True) for point in points}
    killed = {}
    for point, streaming in each.items():
        streaming.environment["LEASE"] = "1.5"
        for account in ("a0", "a1"):
            streaming.broker.publish({"account": f"{point}-{account}", "how": "effect", "url": outside.url})
        planned = streaming.plan(point, KILL_CHILD)
        killed[point] = planned, streaming.start(max_attempts=10)
    for point, (planned, process) in killed.items():
        until_gone(planned, process)
        process.kill()
        each[point].start(max_attempts=10)
    for point, streaming in each.items():
        streaming.wait_until_handled()
        assert streaming.entries() == [f"{point}-a0", f"{point}-a1"]
    assert list(outside.acts.values()) == [1] * 2 * len(points)  # under a key for each, whoever has called


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_message_that_kills_each_process_ends_as_a_dead_letter(make_streaming: Make, kind: str) -> None:
    """In the transaction of many it is not counted; whoever takes over from the dead handles those one by one, and counts."""
    streaming = make_streaming(kind)
    streaming.environment["LEASE"] = "1"
    accounts = streaming.broker.publish_many(5)
    streaming.broker.publish({"account": "bad", "how": "kill"})
    accounts += streaming.broker.publish_many(20, first=100)
    processes = [streaming.start(max_attempts=2, batch=8)]

    def has_ended_all() -> bool:
        if processes[-1].has_ended and len(processes) < 9:
            processes.append(streaming.start(max_attempts=2, batch=8))
        return streaming.positions().get(0) == 26

    eventually(has_ended_all, timeout=60, what=streaming.logs())
    assert streaming.entries() == accounts
    assert streaming.letters() == [("attempts_exhausted", "open")]
    (record,) = streaming.query("SELECT status, attempts FROM idempotency.records WHERE key = 'bad'")
    assert record.status == "failed"
    assert [each.status for each in processes] == [-9, -9, -9, None]


@pytest.mark.long
def test_a_handler_that_calls_exit_fails_as_by_any_error_and_ends_no_process(rabbit: Streaming) -> None:
    rabbit.broker.publish_many(3)
    rabbit.broker.publish({"account": "bad", "how": "exit"})
    rabbit.broker.publish_many(3, first=10)
    process = rabbit.start(max_attempts=2)
    rabbit.wait_until_handled()
    assert rabbit.entries() == ["a0", "a1", "a2", "a10", "a11", "a12"]
    assert rabbit.letters() == [("attempts_exhausted", "open")]
    assert process.end() == 0


@pytest.mark.long
def test_one_that_is_stopped_ends_its_batch_and_gives_its_partitions_back(streaming: Streaming) -> None:
    streaming.broker.publish({"account": "a0", "how": "hold"})
    streaming.broker.publish_many(3, first=1)
    streaming.plan("held", "hold")
    process = streaming.start()
    streaming.wait_for("held.held")
    ending = streaming.ending(process)
    assert process.status is None
    (streaming.directory / "held.go").touch()
    assert ending() == 0
    # how much of it the broker had sent by then is the broker's affair
    entries = streaming.entries()
    assert entries[:1] == ["a0"]
    assert entries == [f"a{number}" for number in range(len(entries))]
    assert streaming.positions() == {0: len(entries)}
    assert streaming.owners() == {0: None}
