"""Checks of the streams that an application declares: whether each can be read, and what its broker may delete too early."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from amqp.exceptions import NotFound
from celery import Celery

from ..broker.connections import connect
from ..errors import MissingExtra, SettingsError
from ..extras import extra
from ..observe.logs import log
from ..settings import Settings
from ..streams.declaring import Stream, declared_streams
from ..streams.kafka_options import configuration, connection_options
from ..streams.sources import KafkaTopics, RabbitStream
from ..text import number_of
from .findings import Finding, Level, ok, refusal, warning
from .unreachable import TIMEOUT, check_server

# Kafka's name for how long a topic keeps a message, in milliseconds; -1: for ever.
RETENTION = "retention.ms"


def check_streams(app: Celery, given: Settings) -> list[Finding]:
    """Check what is declared, and ask the brokers, unless an address is refused."""
    findings = check_stream_settings(app, given)
    refused = {finding.subject for finding in findings if finding.level is Level.REFUSAL}
    for stream in declared_streams().values():
        if _subject(stream) in refused:
            continue
        source = stream.source
        if isinstance(source, KafkaTopics):
            findings += _check_topics(stream, source, given)
        else:
            findings += check_server(_subject(stream), "broker_url", lambda s=stream: _check_queues(app, s))  # type: ignore[misc]
    return findings


def check_stream_settings(app: Celery, given: Settings) -> list[Finding]:
    """Check what needs no connection: addresses and options, the extra of Kafka, and how long records are kept."""
    findings: list[Finding] = []
    for stream in declared_streams().values():
        subject = _subject(stream)
        if isinstance(stream.source, KafkaTopics):
            try:
                configuration(stream.source, given, name=stream.name, instance=None)
                with extra("kafka"):
                    import confluent_kafka  # noqa: F401
            except (SettingsError, MissingExtra) as error:
                findings.append(refusal(subject, str(error), "correct it"))
        elif app.connection_for_read().transport.driver_type != "amqp":
            found = "is of RabbitMQ, and broker_url is not"
            findings.append(
                refusal(subject, found, "streams of RabbitMQ are read over AMQP on the application's broker")
            )
        kept = stream.retention_completed or given.retention_completed
        if kept < given.redelivery_horizon:
            found = f"retention_completed={kept:g} below redelivery_horizon={given.redelivery_horizon:g}"
            advice = "what is published again, or read again after a seek, is handled again once its record is gone"
            findings.append(warning(f"{subject} retention", found, advice))
    return findings


def _subject(stream: Stream) -> str:
    return f"stream {stream.name}"


def _check_topics(stream: Stream, source: KafkaTopics, given: Settings) -> Iterator[Finding]:
    """Whether Kafka answers, has the topics, and keeps their messages for long enough."""
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

    subject, options = _subject(stream), connection_options(source, given, name=stream.name)
    try:
        client = AdminClient(options | {"logger": log._logger})
        known = client.list_topics(timeout=TIMEOUT).topics
    except KafkaException as error:
        found = f"Kafka is unreachable: {error.args[0].name()}"
        yield refusal(subject, found, "check idempotency_kafka_servers, idempotency_kafka_options and the servers")
        return
    for topic in source.topics:
        if topic not in known:
            yield refusal(subject, f"Kafka has no topic {topic!r}", "make it, or correct its name")
        else:
            yield ok(subject, f"topic {topic!r}, {number_of(len(known[topic].partitions), 'partition')}")
            yield check_retention(subject, topic, _retention(client, topic), given.redelivery_horizon)


def _retention(client: Any, topic: str) -> float | None:
    """For how many seconds a topic keeps a message; None: its broker does not say."""
    from confluent_kafka import KafkaException, admin

    asked = admin.ConfigResource(admin.ConfigResource.Type.TOPIC, topic)  # type: ignore[attr-defined]
    try:
        found = client.describe_configs([asked], request_timeout=TIMEOUT)[asked].result(2 * TIMEOUT)
        milliseconds = float(found[RETENTION].value)
    except (KafkaException, KeyError, TypeError, ValueError, TimeoutError):
        return None
    return float("inf") if milliseconds < 0 else milliseconds / 1000


def check_retention(subject: str, topic: str, kept: float | None, horizon: float) -> Finding:
    """Whether a topic keeps messages (`kept`, in seconds; None: unknown) for as long as an application may be behind (`horizon`)."""
    subject = f"{subject} retention"
    if kept is None:
        return ok(subject, f"of topic {topic!r} is not known: its broker does not say, to this user at least")
    if kept < horizon:
        found = f"topic {topic!r} keeps a message for {kept:g} s, less than redelivery_horizon={horizon:g}"
        advice = f"a stream that is behind for longer stops, and messages are gone; raise {RETENTION}"
        return warning(subject, found, advice)
    return ok(subject, f"topic {topic!r} keeps messages " + ("for ever" if kept == float("inf") else f"for {kept:g} s"))


def _check_queues(app: Celery, stream: Stream) -> list[Finding]:
    """Whether RabbitMQ has the streams. What it deletes, by age or length, it does not say over AMQP."""
    assert isinstance(stream.source, RabbitStream)
    subject, missing = _subject(stream), []
    queues = stream.source.queues
    with connect(app.connection_for_read, connect_timeout=TIMEOUT) as connection:
        for queue in queues:
            try:
                with connection.channel() as channel:
                    channel.queue_declare(queue, passive=True)
            except NotFound:
                missing.append(queue)
    if missing:
        return [
            refusal(subject, f"RabbitMQ has no stream {missing[0]!r}", "make it, or correct its name or partitions=")
        ]
    return [ok(subject, f"of RabbitMQ, {number_of(len(queues), 'partition')}")]
