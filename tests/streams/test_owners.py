"""Several processes: each partition has one owner that counts, whatever the others believe."""

from __future__ import annotations

import signal
from collections import Counter

import pytest

from idempotency.store import stream_status, streams
from idempotency.store.stream_places import Place
from idempotency.streams.shares import fair_share
from tests.streams.conftest import Make
from tests.support.outside import OutsideWorld
from tests.support.processes import eventually
from tests.support.streaming import Streaming

POINTS = ("stream.fetched", "stream.run", "stream.recorded", "stream.advanced", "stream.committed")


@pytest.mark.parametrize(
    ("kind", "points"),
    [
        ("rabbitmq", POINTS[1:4:2]),
        pytest.param("rabbitmq", POINTS[0:5:2], marks=pytest.mark.long),
        pytest.param("kafka", POINTS[1:4:2], marks=pytest.mark.long),
    ],
)
def test_one_that_was_frozen_for_longer_than_its_lease_commits_nothing(
    make_streaming: Make, kind: str, points: tuple[str, ...]
) -> None:
    each = {point: make_streaming(kind, apart=True) for point in points}
    accounts = {}
    zombies = {}
    for point, streaming in each.items():
        streaming.environment["LEASE"] = "1.5"
        accounts[point] = streaming.broker.publish_many(20)
        streaming.plan(point, "stop")
        zombies[point] = streaming.start(batch=5)
    for point, streaming in each.items():
        streaming.wait_for(f"{point}.stopped")
        streaming.start(batch=5)
    for streaming in each.values():
        streaming.wait_until_handled()
    for zombie in zombies.values():
        zombie.signal(signal.SIGCONT)
    for point, streaming in each.items():
        eventually(
            lambda z=zombies[point]: "stream_partition_lost" in z.log or "given_up" in z.log, what=zombies[point].log
        )
        assert sorted(streaming.entries()) == sorted(accounts[point]), point
        accounts[point] += streaming.broker.publish_many(10, first=50)
    for point, streaming in each.items():
        streaming.wait_until_handled()
        assert sorted(streaming.entries()) == sorted(accounts[point]), point


def test_a_former_owners_position_matches_nothing_even_if_nothing_else_is_in_its_way(rabbit: Streaming) -> None:
    place = Place("bank", "deposits", "t", 0)
    with rabbit.engine.connect() as connection:
        old = streams.take(connection, place, "one", source="s", lease=60.0, regardless=False)
        assert old is not None
        assert streams.take(connection, place, "two", source="s", lease=60.0, regardless=False) is None
        old = streams.begin(connection, old, 5)
        assert old is not None
        new = streams.take(connection, place, "two", source="s", lease=60.0, regardless=True)
        assert new is not None
        assert new.position == 5
        with pytest.raises(streams.PartitionLost):
            streams.advance(connection, old, 6, lease=60.0)
        assert not streams.pass_over(connection, old, 6, lease=60.0)
        assert streams.take_again(connection, old, lease=60.0) is None
        assert streams.renew(connection, "bank", "deposits", {old: None, new: 9}, lease=60.0) == {new}
        streams.release(connection, old)
        streams.advance(connection, new, 6, lease=60.0)
        with pytest.raises(streams.PartitionLost):
            streams.advance(connection, new, 7, lease=60.0)  # it has not read that it is at 6
        (row,) = stream_status.status(connection, "bank")
        assert (row.position, row.end_position, row.lag, row.owner) == (6, 9, 3, "two")


@pytest.mark.long
@pytest.mark.parametrize("point", ["stream.run", "stream.advanced"])
def test_a_zombie_after_a_call_outside_is_given_back_and_not_failed(
    rabbit: Streaming, outside: OutsideWorld, point: str
) -> None:
    """Once it has moved the position, its connection is ended within half a lease: the next owner waits for that row."""
    rabbit.environment["LEASE"] = "1.5"
    rabbit.broker.publish({"account": "a0", "how": "effect", "url": outside.url})
    rabbit.plan(point, "stop")
    zombie = rabbit.start(max_attempts=1)
    rabbit.wait_for(f"{point}.stopped")
    rabbit.start(max_attempts=2)
    rabbit.wait_until_handled()
    zombie.signal(signal.SIGCONT)
    eventually(lambda: "stream_partition_lost" in zombie.log, what=zombie.log)
    assert rabbit.entries() == ["a0"]
    assert rabbit.letters() == []
    assert sum(outside.calls.values()) == 1


@pytest.mark.parametrize("kind", ["rabbitmq", pytest.param("kafka", marks=pytest.mark.long)])
def test_partitions_are_divided_anew_when_processes_come_and_go(make_streaming: Make, kind: str) -> None:
    streaming = make_streaming(kind, partitions=4)

    def divided(*many: int) -> bool:
        return (
            sorted(Counter(streaming.owners().values()).values()) == sorted(many)
            and None not in streaming.owners().values()
        )

    accounts = streaming.broker.publish_many(40)
    first = streaming.start(batch=5)
    eventually(lambda: divided(4), what=streaming.logs())
    second = streaming.start(batch=5)
    accounts += streaming.broker.publish_many(40, first=100)
    eventually(lambda: divided(2, 2), what=streaming.logs())
    third = streaming.start(batch=5)
    accounts += streaming.broker.publish_many(40, first=200)
    eventually(lambda: divided(1, 1, 2), what=streaming.logs())
    second.kill()
    eventually(lambda: divided(2, 2) and second.pid not in streaming.owners().values(), what=streaming.logs())
    assert first.end() == 0
    eventually(lambda: divided(4), what=streaming.logs())
    streaming.wait_until_handled()
    assert sorted(streaming.entries()) == sorted(accounts)
    assert third.end() == 0
    assert set(streaming.owners().values()) == {None}


def test_a_share_is_fair_and_all_partitions_are_in_one() -> None:
    for partitions in range(12):
        for members in range(1, 7):
            names = [f"m{number}" for number in range(members)]
            found = [fair_share(partitions, names, each) for each in names]
            assert sum(found) == partitions
            assert max(found) - min(found) <= 1


def test_a_member_that_was_silent_for_longer_than_its_lease_is_among_its_own(rabbit: Streaming) -> None:
    """As one that is frozen between two statements finds itself."""
    with rabbit.engine.connect() as connection:
        assert streams.join(connection, "bank", "deposits", "one", lease=60.0) == ["one"]
        assert streams.join(connection, "bank", "deposits", "two", lease=-1.0) == ["one", "two"]
        assert streams.join(connection, "bank", "deposits", "one", lease=60.0) == ["one"]


def test_order_within_a_partition_is_kept_while_others_go_on(make_streaming: Make) -> None:
    streaming = make_streaming("rabbitmq", partitions=2)
    bank_events = [("a0", "ok"), ("a1", "error"), ("a2", "ok")]
    for account, how in bank_events:
        streaming.broker.publish({"account": account, "how": how}, 0)
    for number in range(3):
        streaming.broker.publish({"account": f"b{number}"}, 1)
    streaming.environment["RETRY_BASE"] = "3"
    streaming.start()
    eventually(lambda: {"b0", "b1", "b2"} <= set(streaming.entries()), what=streaming.logs())
    streaming.wait_until_handled()
    assert [each for each in streaming.entries() if each.startswith("a")] == ["a0", "a1", "a2"]
