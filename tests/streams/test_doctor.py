"""What the doctor finds about streams, and which set-ups do not start."""

from __future__ import annotations

from typing import Any

import pytest

from idempotency.application import settings_of
from idempotency.checks import streams as checks
from idempotency.checks.findings import Finding, Level
from idempotency.checks.startup import require_safe_setup
from idempotency.checks.streams import check_retention, check_streams
from idempotency.errors import MissingExtra
from idempotency.streams import declaring, kafka, rabbitmq_stream, stream
from tests.streams.conftest import Make
from tests.support import bank
from tests.support.streaming import Streaming, configure

pytestmark = pytest.mark.long


@pytest.fixture
def none_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other tests are not looked at; and the mock cluster does not say what a topic keeps, however long one waits."""
    monkeypatch.setattr(declaring, "_declared", {})
    monkeypatch.setattr(checks, "TIMEOUT", 1.0)


def findings(streaming: Streaming, source: Any, **options: Any) -> list[Finding]:
    configure(streaming.environment)
    stream("orders", source=source, **options)(lambda given, event: None)
    return check_streams(bank.app, settings_of(bank.app))


def refusals(found: list[Finding]) -> list[str]:
    return [str(each) for each in found if each.level is not Level.OK]


@pytest.mark.usefixtures("none_declared")
def test_a_sound_stream_has_nothing_to_refuse(streaming: Streaming) -> None:
    found = findings(streaming, streaming.broker.source())
    assert refusals(found) == []
    assert "stream orders" in {each.subject for each in found}


@pytest.mark.usefixtures("none_declared")
def test_of_several_brokers_one_that_answers_is_enough(rabbit: Streaming) -> None:
    """By itself, kombu tries two of them."""
    source = rabbit.broker.source()
    gone = [f"amqp://127.0.0.1:{port}" for port in (1, 2, 3)]
    rabbit.environment["BROKER_URL"] = ";".join([*gone, rabbit.environment["BROKER_URL"]])
    assert refusals(findings(rabbit, source)) == []


@pytest.mark.usefixtures("none_declared")
def test_what_the_broker_does_not_have_is_named(streaming: Streaming) -> None:
    of_kafka = "topics" in dir(streaming.broker.source())
    source = kafka("elsewhere") if of_kafka else rabbitmq_stream("elsewhere", partitions=2)
    wanted = "Kafka has no topic 'elsewhere'" if of_kafka else "RabbitMQ has no stream 'elsewhere-0'"
    assert any(wanted in each for each in refusals(findings(streaming, source)))


@pytest.mark.usefixtures("none_declared")
def test_a_kafka_that_does_not_answer_is_a_finding(make_streaming: Make) -> None:
    streaming = make_streaming("kafka")
    streaming.environment["KAFKA_SERVERS"] = "127.0.0.1:9"
    (line,) = refusals(findings(streaming, streaming.broker.source()))
    assert "Kafka is unreachable: _TRANSPORT" in line
    assert "127.0.0.1" not in line


@pytest.mark.usefixtures("none_declared")
def test_plain_text_to_another_machine_is_refused_before_anything_connects(
    make_streaming: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    streaming = make_streaming("kafka")
    monkeypatch.setattr(checks, "_check_topics", lambda *_: pytest.fail("asked"))
    streaming.environment["KAFKA_SERVERS"] = "kafka.example:9092"
    (line,) = refusals(findings(streaming, streaming.broker.source()))
    assert "security.protocol must be SSL or SASL_SSL" in line
    with pytest.raises(SystemExit, match="refused to start: stream orders: idempotency_kafka_options"):
        require_safe_setup(bank.app, has_streams=True)


@pytest.mark.usefixtures("none_declared")
def test_a_missing_extra_and_a_short_retention_are_named(make_streaming: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    streaming = make_streaming("kafka")
    found = refusals(findings(streaming, streaming.broker.source(), retention_completed=60.0))
    assert found == [
        "stream orders retention: retention_completed=60 below redelivery_horizon=86400; what is published again, or read "
        "again after a seek, is handled again once its record is gone"
    ]

    def missing(name: str) -> None:
        raise MissingExtra(f"needs the extra {name}")

    monkeypatch.setattr(checks, "extra", missing)
    assert any("needs the extra kafka" in each for each in refusals(findings(streaming, streaming.broker.source())))


@pytest.mark.parametrize(
    ("kept", "level", "words"),
    [
        (None, Level.OK, "is not known"),
        (float("inf"), Level.OK, "for ever"),
        (604_800.0, Level.OK, "for 604800 s"),
        (3600.0, Level.WARNING, "for 3600 s, less than redelivery_horizon=86400"),
    ],
)
def test_a_topic_that_keeps_less_than_one_may_be_behind_is_a_warning(
    kept: float | None, level: Level, words: str
) -> None:
    """librdkafka's mock cluster does not say what a topic keeps, so this is about the answer alone."""
    found = check_retention("stream orders", "orders", kept, 86_400.0)
    assert found.level is level
    assert words in found.found
