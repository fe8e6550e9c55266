"""What watches streams: gauges, counters and alarms."""

from __future__ import annotations

from celery import Celery
from sqlalchemy import Engine, text

from idempotency import streams
from idempotency.application import settings_of
from idempotency.observe import metrics
from idempotency.store.overview import monitoring_connection
from idempotency.upkeep import overview
from idempotency.upkeep.alarms import lasting
from idempotency.upkeep.backlog import Backlog
from tests.support.streaming import NAME, Streaming

INSERT = text("""
INSERT INTO idempotency.stream_positions (service, consumer, topic, partition, position, fence, owner, locked_until, end_position, stopped)
VALUES ('bank', 'deposits', 't', 0, 5, 1, NULL, NULL, 9, NULL),
       ('bank', 'deposits', 't', 1, 5, 1, 'h|||7|', clock_timestamp() + interval '1 h', 9, 'offset 5 has failed'),
       ('bank', 'deposits', 't', 2, 5, 1, 'h|||7|', clock_timestamp() + interval '1 h', 9, NULL),
       ('other', 'deposits', 't', 0, 5, 1, NULL, NULL, 9, NULL)
""")


def test_gauges_and_alarms_tell_of_lag_and_of_what_has_stopped(bank: Celery, engine: Engine) -> None:
    with engine.connect() as connection:
        connection.execute(INSERT)
    samples = {
        (sample.name, sample.labels["partition"]): sample.value
        for metric in Backlog(bank).collect()
        for sample in metric.samples
        if sample.name.startswith("idempotency_stream_")
    }
    assert samples["idempotency_stream_position", "0"] == 5
    assert samples["idempotency_stream_lag", "0"] == 4
    assert [samples["idempotency_stream_stopped", str(number)] for number in range(3)] == [0, 1, 0]
    settings = settings_of(bank)
    with monitoring_connection(settings) as connection:
        found = overview.take_snapshot(connection, bank, settings)
    alarms = {alarm.name: alarm for alarm in lasting(found, settings) if alarm.name.startswith("stream")}
    assert set(alarms) == {"stream_unowned/deposits/t/0", "stream_stopped/deposits/t/1"}
    assert "offset 5 has failed" in alarms["stream_stopped/deposits/t/1"].found
    assert alarms["stream_unowned/deposits/t/0"].patience == settings.alarm_unconsumed


def test_a_partition_without_an_owner_alarms_though_nothing_has_been_seen_to_wait(bank: Celery, engine: Engine) -> None:
    """Nobody reads it, so nobody sees what comes. What the application no longer declares alarms only with what was seen to wait."""
    with engine.connect() as connection:
        connection.execute(INSERT)
        connection.exec_driver_sql("UPDATE idempotency.stream_positions SET end_position = position")
    settings = settings_of(bank)

    def unowned() -> list[str]:
        with monitoring_connection(settings) as connection:
            alarms = lasting(overview.take_snapshot(connection, bank, settings), settings)
        return [alarm.found for alarm in alarms if alarm.kind == "stream_unowned"]

    assert unowned() == []
    streams.stream("deposits", source=streams.kafka("t"))(lambda stream, event: None)
    assert unowned() == ["no process handles t/0; whether messages wait is not known"]
    # it has moved to another topic: nothing that it reads is without an owner
    streams.stream("deposits", source=streams.kafka("other"))(lambda stream, event: None)
    assert unowned() == []


def test_what_was_handled_is_counted(rabbit: Streaming) -> None:
    rabbit.broker.publish_many(5)
    rabbit.broker.publish_many(5)
    rabbit.broker.publish({"amount": 1})
    counters = {
        kind: metrics.stream_messages.labels(NAME, kind) for kind in ("handled", "duplicate", "refused", "failed")
    }
    before = {kind: counter._value.get() for kind, counter in counters.items()}
    with rabbit.consuming():
        rabbit.wait_until_handled()
    assert {kind: counter._value.get() - before[kind] for kind, counter in counters.items()} == {
        "handled": 5,
        "duplicate": 5,
        "refused": 1,
        "failed": 0,
    }
