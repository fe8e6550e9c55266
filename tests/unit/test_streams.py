"""Streams, without a server: what they may be declared with, how a message is named and kept, and Kafka's options."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from idempotency.errors import InvalidKey, MissingKey, SettingsError
from idempotency.settings import Settings
from idempotency.streams import StreamMessage, kafka, rabbitmq_stream, stream
from idempotency.streams.declaring import stream_of
from idempotency.streams.kafka_options import configuration
from idempotency.streams.message import from_kept
from idempotency.streams.naming import naming
from idempotency.streams.preparing import Prepared, Refused, prepare, share
from idempotency.wire import keys

SETTINGS = Settings.read({"database_url": "postgresql+psycopg://localhost/x"})


def message(value: bytes = b"{}", offset: int = 0, **fields: Any) -> StreamMessage:
    return StreamMessage("t", 0, offset, fields.pop("key", None), value, **fields)


@pytest.mark.parametrize(
    ("pattern", "event", "name"),
    [
        ("{event[id]}", {"id": "o1"}, "o1"),
        ("{event[order][id]}:{event[version]}", {"order": {"id": "a:b"}, "version": 2}, "a%3Ab:2"),
        ("{event[lines][1]}", {"lines": ["x", "y"]}, "y"),
        ("{key}", {}, "k1"),
        ("order-{header[h]}", {}, "order-v"),
        ("{event[id]}/{event[id]}", {"id": 1}, "1/1"),
    ],
)
def test_a_pattern_names_what_is_in_a_message(pattern: str, event: Any, name: str) -> None:
    assert naming(pattern, "key")(event, message(key=b"k1", headers=[("h", b"v")])) == name


@pytest.mark.parametrize(
    ("pattern", "event", "error"),
    [
        ("{event[id]}", {}, MissingKey),
        ("{event[id]}", [], MissingKey),
        ("{event[id]}", {"id": None}, MissingKey),
        ("{event[id]}", {"id": 1.5}, InvalidKey),
        ("{event[id][no]}", {"id": "text"}, MissingKey),
        ("{key}", {}, MissingKey),
    ],
)
def test_a_message_that_lacks_it_has_no_name(pattern: str, event: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        naming(pattern, "key")(event, message())


@pytest.mark.parametrize(
    "pattern", ["", "fixed", "{id}", "{event}", "{event[id]:>3}", "{event[a]}{event[b]}", "{event[a"]
)
def test_other_patterns_are_refused_where_they_are_written(pattern: str) -> None:
    with pytest.raises(SettingsError, match="key"):
        stream("named", source=kafka("t"), key=pattern)(lambda given, event: None)


def test_what_a_stream_may_not_be_is_refused() -> None:
    async def handler(given: object, event: object) -> None: ...

    for refused in (
        lambda: kafka(),
        lambda: kafka("^t.*"),
        lambda: kafka("t", start="middle"),  # type: ignore[arg-type]
        lambda: rabbitmq_stream(""),
        lambda: rabbitmq_stream("s", partitions=0),
        lambda: stream("s", source=kafka("t"), on_failure="skip"),  # type: ignore[arg-type]
        lambda: stream("s", source=kafka("t"), batch=0),
        lambda: stream("é", source=kafka("t")),
        lambda: stream("s", source=kafka("t"))(handler),
    ):
        with pytest.raises(SettingsError):
            refused()


def test_two_streams_of_one_group_may_not_read_one_topic() -> None:
    stream("grouped", source=kafka("t1", "t2", group="g"))(lambda given, event: None)
    stream("grouped", source=kafka("t1", "t2", group="g"))(
        lambda given, event: None
    )  # as when its module is imported again
    stream("grouped-too", source=kafka("t3", group="g"))(lambda given, event: None)
    stream("of-a-group-of-its-own", source=kafka("t2", group="h"))(lambda given, event: None)
    with pytest.raises(SettingsError, match="group 'g' reads 't2' for stream 'grouped'"):
        stream("grouped-as-well", source=kafka("t2", group="g"))(lambda given, event: None)
    assert stream_of("stream.grouped-as-well") is None


def test_no_two_applications_have_one_default_group() -> None:
    groups = set()
    for service, name in (
        ("shop", "eu.orders"),
        ("shop.eu", "orders"),
        ("shop%2Eeu", "orders"),
        ("shop", "eu%2Eorders"),
    ):
        given = {"kafka_servers": "127.0.0.1:9092", "service": service}
        settings = Settings.read({"database_url": "postgresql+psycopg://localhost/x", **given})
        groups.add(configuration(kafka("t"), settings, name=name, instance=None)["group.id"])
    assert len(groups) == 4


def test_a_letter_gives_the_message_back_byte_for_byte() -> None:
    of_amqp = {
        "at": datetime(2026, 1, 1, tzinfo=UTC),
        "d": Decimal("1.50"),
        "utf-8": "x",
        "in": [{"b": b"\xff", "n": None}],
    }
    for value in (b'{"a": 1}', b"\xff\x00", b"", None, "naïve\0".encode()):
        headers = [("a", b"\xff"), ("a", b"x"), ("n", 5), ("at", datetime(2026, 1, 1, tzinfo=UTC)), ("t", of_amqp)]
        kept = StreamMessage("t", 3, 7, b"\xfe", value, headers, 12.5)
        import json

        assert from_kept(json.dumps(kept.kept())) == kept
    with pytest.raises(ValueError, match="no message"):
        from_kept("{}")


def test_what_shares_a_transaction_is_of_one_tenant_and_one_value_for_each_key() -> None:
    declared = stream("shared", source=kafka("t"), key="{event[id]}", tenant="{event[of]}")(lambda given, event: None)
    values = [
        b'{"id": "1", "of": "a"}',
        b'{"id": "1", "of": "a"}',
        b'{"id": "2", "of": "a"}',
        b'{"id": "1", "of": "a", "more": 1}',
        b'{"id": "3", "of": "b"}',
        b"no JSON",
    ]
    prepared = [prepare(declared, message(value, offset), SETTINGS) for offset, value in enumerate(values)]
    assert [type(each) for each in prepared] == [Prepared] * 5 + [Refused]
    assert [each.message.offset for each in share(prepared, range(0))] == [0, 1, 2]
    assert [each.message.offset for each in share(prepared[3:], range(0))] == [3]
    assert [each.message.offset for each in share(prepared, range(1, 3))] == [0]
    assert share(prepared[5:], range(0)) == []


@pytest.mark.parametrize(
    ("servers", "options", "is_accepted"),
    [
        ("127.0.0.1:9092", {}, True),
        ("localhost:9092,[::1]:9092", {}, True),
        ("kafka.example:9092", {}, False),
        ("127.0.0.1:9092,kafka.example:9092", {}, False),
        ("kafka.example:9093", {"security.protocol": "SSL"}, True),
        ("kafka.example:9093", {"security.protocol": "SASL_SSL"}, True),
        ("kafka.example:9093", {"security.protocol": "SASL_PLAINTEXT"}, False),
        ("kafka.example:9093", {"security.protocol": "SSL", "ssl.endpoint.identification.algorithm": "none"}, False),
        ("kafka.example:9093", {"security.protocol": "SSL", "enable.ssl.certificate.verification": "false"}, False),
        ("kafka.internal:9092", {}, True),
        ("127.0.0.1:9092", {"enable.auto.commit": "true"}, False),
        ("127.0.0.1:9092", {"auto.offset.reset": "latest"}, False),
    ],
)
def test_kafka_off_this_machine_needs_verified_tls(servers: str, options: dict[str, str], is_accepted: bool) -> None:
    given = {"kafka_servers": servers, "kafka_options": options, "plain_text_hosts": "kafka.internal"}
    settings = Settings.read({"database_url": "postgresql+psycopg://localhost/x", **given})
    if is_accepted:
        found = configuration(kafka("t"), settings, name="s", instance="one")
        assert (found["group.id"], found["group.instance.id"]) == ("celery.s", "one.s")
        assert (found["auto.offset.reset"], found["isolation.level"]) == ("error", "read_committed")
        assert servers not in repr(settings)
        return
    with pytest.raises(SettingsError) as refused:
        configuration(kafka("t"), settings, name="s", instance=None)
    assert "example" not in str(refused.value)


def test_a_message_is_known_by_every_rule_for_fingerprints(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record may have been stored by the one before."""

    @stream("ruled", source=kafka("ruled"), key="{event[id]}")
    def handle(given: object, event: object) -> None: ...

    message = StreamMessage("ruled", 0, 7, None, b'{"id": "k1"}')
    before = prepare(handle, message, SETTINGS)
    monkeypatch.setitem(keys.FINGERPRINT_RULES, "v2", lambda arguments: "v2:" + str(arguments["sha256"]))
    after = prepare(handle, message, SETTINGS)
    assert isinstance(before, Prepared)
    assert isinstance(after, Prepared)
    assert (before.delivery.also, after.delivery.also) == ([], [before.delivery.fingerprint])
    assert after.delivery.fingerprint.startswith("v2:")
