"""The encoding agrees with Celery's own, text for text, in a process that has not loaded it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import UTC, date, datetime, time
from decimal import Decimal
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kombu.utils import json as kombu

from idempotency.wire import encoding

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.floats(allow_nan=False)
    | st.datetimes(timezones=st.just(UTC) | st.none())
    | st.dates()
    | st.times()
    | st.decimals(allow_nan=False)
    | st.uuids()
    | st.binary()
)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4))


@pytest.fixture(autouse=True)
def without_kombu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "kombu.utils.json")
        yield


@given(VALUES)
def test_a_value_is_written_and_read_as_celery_does(value: object) -> None:
    text = encoding.dumps(value)
    assert text == kombu.dumps(value)
    assert encoding.loads(text) == kombu.loads(text)


@pytest.mark.parametrize(
    "value",
    [
        datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        date(2026, 1, 2),
        time(3, 4),
        Decimal("1.10"),
        UUID(int=7),
        b"a",
        b"\xff",
    ],
)
def test_what_was_written_is_read_again(value: object) -> None:
    assert encoding.loads(encoding.dumps(value)) == value


def test_a_value_may_say_itself_how_it_is_written() -> None:
    class Money:
        def __json__(self) -> dict[str, int]:
            return {"cents": 1}

    assert encoding.dumps(Money()) == '{"cents": 1}'


def test_an_unknown_type_is_named() -> None:
    with pytest.raises(TypeError, match="object is not JSON"):
        encoding.dumps(object())
    with pytest.raises(ValueError, match="unknown type 'money'"):
        encoding.loads('{"__type__": "money", "__value__": 1}')


def test_types_registered_with_celery_are_known_where_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Money:
        pass

    monkeypatch.setitem(sys.modules, "kombu.utils.json", kombu)
    monkeypatch.setitem(kombu._encoders, Money, ("money", lambda _: 1))
    monkeypatch.setitem(kombu._decoders, "money", lambda _: "one")
    assert encoding.loads(encoding.dumps(Money())) == "one"
