"""How many messages wait: what is said of it is so, also of what the broker has not sent yet; otherwise that it is not known."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from idempotency.cli.root import cli
from idempotency.store import stream_status, streams
from idempotency.streams import kafka_reader, rabbitmq_ends
from idempotency.upkeep.backlog import Backlog
from tests.streams.conftest import Make
from tests.support import bank
from tests.support.processes import eventually
from tests.support.streaming import Streaming

KINDS = ("rabbitmq", pytest.param("kafka", marks=pytest.mark.long))


def seen(streaming: Streaming) -> tuple[int | None, bool | None]:
    with streaming.engine.connect() as connection:
        rows = stream_status.status(connection, "bank")
    return (rows[0].lag, rows[0].lag_is_least) if rows else (None, None)


def gauge() -> list[float]:
    return [
        sample.value
        for metric in Backlog(bank.app).collect()
        for sample in metric.samples
        if sample.name == "idempotency_stream_lag"
    ]


def status(*options: str) -> str:
    found = CliRunner().invoke(cli, ["stream", "status", "-A", "tests.support.bank", *options])
    assert found.exit_code == 0, found.output
    return found.stdout


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_the_lag_is_of_all_that_waits_and_rises_while_a_message_holds_its_partition_up(
    make_streaming: Make, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (rabbitmq_ends, kafka_reader):
        monkeypatch.setattr(module, "LOOK", 0.5)
    streaming = make_streaming(kind)
    streaming.environment["RETRY_BASE"] = "60"
    streaming.broker.publish({"account": "first", "how": "error"})
    streaming.broker.publish_many(499)
    with streaming.consuming(batch=5):
        eventually(lambda: (seen(streaming)[0] or 0) >= 500)
        streaming.broker.publish_many(300, first=1000)
        eventually(lambda: (seen(streaming)[0] or 0) >= 800)
        # RabbitMQ has entries of its own among them, a few at most
        lag, is_least = seen(streaming)
        assert lag is not None
        assert 800 <= lag < 850
        assert is_least is False
        assert gauge() == [lag]
        assert f"{lag} " in status()
        assert "or more" not in status()
    assert seen(streaming) == (lag, True)
    assert f"{lag} or more" in status()
    (row,) = json.loads(status("--json"))
    assert (row["lag"], row["lag_is_least"]) == (lag, True)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_caught_up_has_no_lag_and_without_an_owner_none_is_known(make_streaming: Make, kind: str) -> None:
    streaming = make_streaming(kind)
    streaming.broker.publish_many(20)
    with streaming.consuming():
        streaming.wait_until_handled()
        eventually(lambda: seen(streaming) == (0, None))
        assert gauge() == [0]
    assert seen(streaming) == (None, None)
    assert gauge() == []
    assert "not known" in status()
    streaming.broker.publish_many(20)
    with streaming.consuming():
        streaming.wait_until_handled()


def test_an_owner_that_has_not_seen_the_end_says_so(rabbit: Streaming) -> None:
    """Not what the one before it had seen: that one may have seen it long ago."""
    from idempotency.store.stream_places import Place

    place, kept = Place("bank", "deposits", "t", 0), dict[str, Any](source="s", lease=60.0, regardless=True)
    with rabbit.engine.connect() as connection:
        held = streams.take(connection, place, "one", **kept)
        assert held is not None
        held = streams.begin(connection, held, 5)
        assert held is not None
        assert seen(rabbit) == (None, None)
        streams.renew(connection, "bank", "deposits", {held: 9}, lease=60.0)
        assert seen(rabbit) == (4, False)
        streams.advance(connection, held, 12, lease=60.0)  # it has not noted that the end was further on by then
        assert seen(rabbit) == (0, None)
        assert streams.take(connection, place, "two", **kept) is not None
        assert seen(rabbit) == (None, None)
