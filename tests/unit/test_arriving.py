"""What comes from a broker as bytes: whatever they are, nothing but a message arrives, and it says whether all of it was read."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from amqp import serialization
from amqp.abstract_channel import AbstractChannel
from amqp.basic_message import Message
from amqp.method_framing import frame_handler
from amqp.spec import Basic
from hypothesis import example, given, settings
from hypothesis import strategies as st

from idempotency.store.letters import headers_text
from idempotency.store.stream_places import Place
from idempotency.streams.message import StreamMessage, from_kept
from idempotency.streams.rabbitmq_message import as_stream_message
from idempotency.wire.arriving import REST, bound_what_arrives, unreadable, unreadable_bytes

PROPERTIES: list[tuple[str, str]] = Message.PROPERTIES
TEXTS = [name for name, kind in PROPERTIES if kind == "s"]
DELIVERED = struct.pack(">HH", *Basic.Deliver)


def text(raw: bytes) -> bytes:
    return bytes([len(raw)]) + raw


class Channel(AbstractChannel):
    """Where py-amqp brings a message: without a connection."""

    def __init__(self) -> None:
        self.arrived: list[Message] = []
        self.is_closing, self.auto_decode = False, False
        self._pending: dict[Any, Any] = {}
        self._callbacks = {Basic.Deliver: self.deliver}
        self._METHODS = {each.method_sig: each for each in _methods()}

    def deliver(
        self, tag: str, number: int, redelivered: bool, exchange: str, routing_key: str, message: Message
    ) -> None:
        message.delivery_info = {"exchange": exchange, "routing_key": routing_key, "delivery_tag": number}
        self.arrived.append(message)


def _methods() -> Any:
    from amqp.channel import Channel as Amqp

    return Amqp._METHODS.values()


class Connection:
    bytes_recv = 0


def arrived(properties: bytes, routing_key: bytes = b"q", body: bytes = b"{}") -> Message:
    """What py-amqp makes of three frames: of the delivery, the properties and the body."""
    bound_what_arrives()
    channel = Channel()
    on_frame = frame_handler(Connection(), lambda _, *method: channel.dispatch_method(*method))
    arguments = text(b"tag") + struct.pack(">QB", 7, 0) + text(b"x") + text(routing_key)
    on_frame((1, 1, DELIVERED + arguments))
    on_frame((2, 1, struct.pack(">HHQ", Basic.CLASS_ID, 0, len(body)) + properties))
    on_frame((3, 1, body))
    (message,) = channel.arrived
    return message


def frame(**properties: Any) -> bytes:
    found: bytes = Message(b"", **properties)._serialize_properties()
    return found


@pytest.mark.parametrize("name", TEXTS)
def test_text_that_is_not_utf8_is_there_as_bytes_and_the_rest_as_ever(name: str) -> None:
    given = {"application_headers": {"task": "t", "n": 1}, "priority": 3, "timestamp": 10**12, name: b"caf\xe9"}
    message = arrived(frame(**given))
    assert message.properties == given
    assert unreadable(message.properties, message.delivery_info) == f"{name}: not UTF-8"
    assert unreadable_bytes(message.properties, message.delivery_info) == {name: b"caf\xe9"}


def test_a_routing_key_that_is_not_utf8_is_there_as_bytes() -> None:
    message = arrived(frame(type="t"), b"caf\xe9")
    assert message.delivery_info == {"exchange": "x", "routing_key": b"caf\xe9", "delivery_tag": 7}
    assert unreadable(message.properties, message.delivery_info) == "routing_key: not UTF-8"


def test_what_is_sound_says_nothing() -> None:
    given = dict.fromkeys(TEXTS, "é") | {
        "application_headers": {"a": [1, {"b": "c"}], "x": b"\xff"},
        "delivery_mode": 2,
    }
    message = arrived(frame(**given), "é".encode())
    assert message.properties == given
    assert unreadable(message.properties, message.delivery_info) is None


# a table: its entries, and how long it says that it is
TABLES = {
    "longer than the frame": (text(b"task") + b"S" + struct.pack(">I", 1) + b"t", 2**31),
    "with a value of no type": (text(b"task") + b"S" + struct.pack(">I", 1) + b"t" + text(b"n") + b"?\0", None),
    "with a text beyond the frame": (
        text(b"task") + b"S" + struct.pack(">I", 1) + b"t" + text(b"n") + b"S" + b"\x7f" * 4,
        None,
    ),
    "with a name beyond the frame": (text(b"task") + b"S" + struct.pack(">I", 1) + b"t" + b"\xff" + b"n", None),
}


@pytest.mark.parametrize("name", TABLES)
def test_of_a_broken_table_what_comes_before_is_there(name: str) -> None:
    entries, length = TABLES[name]
    table = struct.pack(">I", len(entries) if length is None else length) + entries
    message = arrived(struct.pack(">H", 0x8000 | 0x2000) + text(b"application/json") + table)
    assert message.content_type == "application/json"
    assert message.headers["task"] == "t"
    assert unreadable(message.properties) == "properties: not as AMQP has them"
    assert message.properties[REST] == table


@settings(max_examples=500, deadline=None)
@example(b"", b"q")
@example(b"\xff\xff" + b"\xff" * 40, b"\xff")
@example(struct.pack(">HI", 0x2000, 6) + b"\1aF\xff\xff\xff", b"q")
@given(st.binary(max_size=400), st.binary(max_size=40))
def test_whatever_the_bytes_are_a_message_arrives(properties: bytes, routing_key: bytes) -> None:
    message = arrived(properties, routing_key)
    assert message.body == b"{}"
    assert isinstance(message.headers or {}, dict)
    kept = as_stream_message(("t", 0), 5, message)
    text_of(kept)


# of a table's values: a letter for the type, and what follows; most of them are what a broken producer would send
ITEMS = st.one_of(
    st.tuples(st.sampled_from([b"S", b"x"]), st.binary(max_size=20)).map(
        lambda t: t[0] + struct.pack(">I", len(t[1])) + t[1]
    ),
    st.tuples(st.sampled_from(list(b"sbBUuIiLlfdDtTV?")), st.binary(min_size=8, max_size=8)).map(
        lambda t: bytes([t[0]]) + t[1]
    ),
    st.binary(min_size=8, max_size=8).map(lambda raw: b"d" + raw),
)


def table_of(entries: list[tuple[bytes, bytes]]) -> bytes:
    raw = b"".join(text(name) + value for name, value in entries)
    return struct.pack(">I", len(raw)) + raw


ENTRIES = st.lists(st.tuples(st.binary(max_size=8), st.one_of(ITEMS, st.lists(st.tuples(st.binary(max_size=4), ITEMS)).map(
    lambda entries: b"F" + table_of(entries)
))))  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(ENTRIES)
def test_whatever_its_headers_are_a_message_of_a_stream_is_kept(entries: list[tuple[bytes, bytes]]) -> None:
    message = arrived(struct.pack(">H", 0x2000) + table_of(entries))
    text_of(as_stream_message(("t", 0), 5, message))


def text_of(message: StreamMessage) -> None:
    """What its letter would keep, which is read again."""
    assert message.digest(Place("s", "c", "t", 0)).startswith("s/")
    message.beyond()
    found = from_kept(headers_text(message.kept()))
    assert (found.offset, found.value) == (message.offset, message.value)
    assert from_kept(headers_text(message.kept(limit=10))).value == (message.value or b"")[:10]


def test_py_amqp_reads_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours reads only what py-amqp's own reader fails on: it must not see what is sound."""
    from idempotency.wire import arriving

    def unexpected(*_: Any) -> Any:
        raise AssertionError("read again")

    monkeypatch.setattr(arriving, "_read_as_far_as_possible", unexpected)
    assert arrived(frame(type="é", application_headers={b"\xff": b"\xff"})).type == "é"
    assert serialization.PROPERTY_CLASSES[Basic.CLASS_ID] is arriving._read_properties
