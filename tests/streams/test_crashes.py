"""A process is killed at every moment: nothing is lost, and nothing is there twice."""

from __future__ import annotations

import pytest

from tests.streams.conftest import Make
from tests.support.crashing import KILL_CHILD
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


@pytest.mark.parametrize("kind", ["rabbitmq", "kafka"])
def test_a_kill_at_every_moment_loses_nothing_and_doubles_nothing(make_streaming: Make, kind: str) -> None:
    streaming = make_streaming(kind, partitions=2)
    accounts = streaming.broker.publish_many(40)
    for number, point in enumerate(POINTS):
        planned = streaming.plan(point, KILL_CHILD)
        process = streaming.start(batch=7)
        if point == "stream.given_up":
            streaming.wait_until_handled()
            process.end()
        until_gone(planned, process)
        process.kill()
        assert process.status == -9, point
        accounts += streaming.broker.publish_many(10, first=100 * (number + 1))
    process = streaming.start(batch=7)
    streaming.wait_until_handled()
    assert sorted(streaming.entries()) == sorted(accounts)
    assert process.end() == 0


def test_one_run(streaming: Streaming) -> None:
    accounts = streaming.broker.publish_many(25)
    process = streaming.start(batch=10)
    streaming.wait_until_handled()
    assert streaming.entries() == accounts
    assert process.end() == 0
    assert streaming.owners() == {0: None}
