"""How Kafka is connected to: over TLS, and as a static member.

librdkafka's mock cluster speaks plain text and forgets static members. So these show what librdkafka is told and does by itself:
whom it trusts, and that it takes the name. That a restart under the same name moves no partition is Kafka's part, and not shown.
"""

from __future__ import annotations

import hashlib
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from idempotency.application import close_runtime
from idempotency.errors import SettingsError
from idempotency.streams import StreamMessage
from idempotency.streams.process import run_streams
from idempotency.wire import keys
from tests.streams.conftest import Make
from tests.support import bank
from tests.support.encrypted import HOST, OTHER_HOST, authority, make_certificates
from tests.support.processes import eventually
from tests.support.streaming import KafkaBroker, Streaming, configure


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@contextmanager
def listening(certificates: Path, host: str) -> Iterator[tuple[str, list[str]]]:
    """A TLS server that hangs up after the handshake: its address, and how each handshake has ended."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "rabbitmq" / "server.crt", certificates / "rabbitmq" / "server.key")
    ended: list[str] = []
    listener = socket.create_server((host, 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.settimeout(5)
            try:
                with context.wrap_socket(connection, server_side=True) as encrypted:
                    # with TLS 1.3, a client that does not trust the server says so after the server's part
                    ended.append("trusted" if encrypted.recv(1) else "refused")
            except OSError:
                ended.append("refused")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"{host}:{listener.getsockname()[1]}", ended
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


def reader_of(streaming: Streaming, servers: str, **options: str) -> Any:
    configure(streaming.environment | {"KAFKA_SERVERS": servers})
    bank.app.conf.idempotency_kafka_options = {"security.protocol": "SSL", **options}
    close_runtime(bank.app)
    handled = streaming.consumer(threading.Event(), configured=True)
    return handled._make_reader(handled._holdings)


@pytest.mark.long
@pytest.mark.parametrize(
    ("host", "trusts", "ended"), [(HOST, True, "trusted"), (HOST, False, "refused"), (OTHER_HOST, True, "refused")]
)
def test_librdkafka_speaks_only_to_servers_that_the_authority_has_named(
    make_streaming: Make, certificates: Path, tmp_path: Path, host: str, trusts: bool, ended: str
) -> None:
    streaming = make_streaming("kafka")
    other = certificates if trusts else make_certificates(tmp_path / "others")
    with listening(certificates, host) as (servers, seen):
        reader = reader_of(streaming, servers, **{"ssl.ca.location": authority(other)})
        try:
            eventually(lambda: reader._consumer.poll(0.1) is not None or seen)
            assert set(seen) == {ended}
        finally:
            reader.close()


def test_an_authority_that_is_not_there_is_an_error_of_the_settings(make_streaming: Make) -> None:
    with pytest.raises(SettingsError, match=r"idempotency_kafka_options: .*ssl\.ca\.location"):
        reader_of(make_streaming("kafka"), f"{HOST}:9", **{"ssl.ca.location": "/nowhere/ca.crt"})


def test_a_static_member_handles_messages_as_any_other(make_streaming: Make) -> None:
    streaming = make_streaming("kafka")
    accounts = streaming.broker.publish_many(5)
    configure(streaming.environment)
    handler, stop = streaming.handler(), threading.Event()
    thread = threading.Thread(
        target=run_streams, args=(bank.app, {handler.name: handler.declared()}, stop), kwargs={"instance": "one"}
    )
    thread.start()
    try:
        streaming.wait_until_handled()
    finally:
        stop.set()
        thread.join(20)
    assert streaming.entries() == accounts


def test_a_message_without_a_value_is_an_event_of_none(make_streaming: Make) -> None:
    """In a compacted topic it says that its key is deleted."""
    kafka = make_streaming("kafka")
    assert isinstance(kafka.broker, KafkaBroker)
    seen: list[tuple[str, Any]] = []
    for value in (b"{}", None):
        kafka.broker.cluster._producer.produce(kafka.broker.topic, value, b"a0", partition=0)
    kafka.broker.flush()
    with kafka.handled_by(
        lambda stream, event: seen.append((stream.key, event)), key=lambda event, m: f"{m.key}{m.offset}"
    ):
        eventually(lambda: kafka.positions() == {0: 2}, timeout=20)
    assert [event for _, event in seen] == [{}, None]
    assert kafka.letters() == []


def test_a_deletion_is_no_duplicate_of_an_empty_value(make_streaming: Make) -> None:
    """Of a protobuf whose members all have their defaults, say. Under one key, the second of them is another message."""
    kafka = make_streaming("kafka")
    assert isinstance(kafka.broker, KafkaBroker)
    seen: list[Any] = []
    for value in (b"", None, b""):
        kafka.broker.cluster.publish(kafka.broker.topic, 0, value, key=b"k1")
        kafka.broker.published[0] += 1
    kafka.broker.flush()
    with kafka.handled_by(lambda stream, _: seen.append(stream.message.value), key="{key}", decode=lambda value: value):
        kafka.wait_until_handled()
    assert seen == [b""]
    assert kafka.letters() == [("fingerprint_mismatch", "open")]


@pytest.mark.long
@pytest.mark.parametrize("value", [b"", None])
def test_what_was_handled_before_empty_values_had_fingerprints_of_their_own_is_a_duplicate(
    make_streaming: Make, monkeypatch: pytest.MonkeyPatch, value: bytes | None
) -> None:
    """What an earlier version has begun or ended is known by the fingerprint that it has given."""
    kafka = make_streaming("kafka")
    assert isinstance(kafka.broker, KafkaBroker)
    broker, seen = kafka.broker, list[Any]()

    def publish() -> None:
        broker.cluster.publish(broker.topic, 0, value, key=b"k1")
        broker.published[0] += 1
        broker.flush()

    def handle(stream: Any, event: Any) -> None:
        seen.append(stream.message.value)

    options: dict[str, Any] = {"key": "{key}", "decode": lambda value: value}
    publish()
    by_bytes = keys.fingerprints({"sha256": hashlib.sha256(b"").hexdigest()}, None)
    with monkeypatch.context() as earlier:
        earlier.setattr(StreamMessage, "fingerprints", by_bytes)
        with kafka.handled_by(handle, "empties", **options):
            kafka.wait_until_handled()
    publish()
    with kafka.handled_by(handle, "empties", **options):
        kafka.wait_until_handled()
    assert seen == [value]
    assert kafka.letters() == []
