"""The signature of a message: what it covers, and what it survives."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from idempotency.errors import SettingsError
from idempotency.settings import Settings
from idempotency.wire.headers import SIGNATURE_HEADER
from idempotency.wire.signing import claimed_at, sign, signed_at

OLD, NEW, FOREIGN = (SecretStr(letter * 32) for letter in "abc")
HEADERS = {
    "task": "payments.capture",
    "id": "0b5f",
    "eta": None,
    "timelimit": [None, 90],
    "retries": 0,
    "idempotency-key": "p1",
    "idempotency-tenant": "acme",
    "idempotency-generation": 2,
    "idempotency-outbox-id": "77",
    "traceparent": "00-1",
}
BODY = '[["p1"], {}, {}]'


def signed(headers: dict[str, Any] = HEADERS, body: str = BODY, secret: SecretStr = NEW) -> dict[str, Any]:
    return {**headers, SIGNATURE_HEADER: sign(headers, body, secret, at=1_700_000_000.25)}


def test_a_signed_message_says_when_it_was_signed() -> None:
    assert signed_at(signed(), BODY.encode(), [NEW]) == claimed_at(signed()) == 1_700_000_000.25


def test_while_a_secret_is_replaced_both_are_accepted() -> None:
    assert signed_at(signed(secret=OLD), BODY, [NEW, OLD]) == signed_at(signed(secret=NEW), BODY, [NEW, OLD])
    assert signed_at(signed(secret=FOREIGN), BODY, [NEW, OLD]) is None


@pytest.mark.parametrize("name", [name for name in HEADERS if name != "traceparent"])
def test_no_header_that_matters_can_be_changed_or_taken_away(name: str) -> None:
    assert signed_at(signed() | {name: "another"}, BODY, [NEW]) is None
    without = {other: value for other, value in signed().items() if other != name}
    assert (signed_at(without, BODY, [NEW]) is None) is (HEADERS[name] is not None)


def test_none_can_be_added() -> None:
    for name in ("expires", "group", "idempotency-origin", "idempotency-eta", "idempotency-marker"):
        assert signed_at(signed() | {name: "x"}, BODY, [NEW]) is None


@pytest.mark.parametrize(
    ("said", "other"),
    [
        ("77", Decimal(77)),
        ("2026-03-04 00:00:00+00:00", datetime(2026, 3, 4, tzinfo=UTC)),
        ("b'77'", b"77"),
        (["1"], [Decimal(1)]),
    ],
)
def test_a_value_of_another_type_is_not_the_one_that_was_signed(said: Any, other: object) -> None:
    """AMQP has types that JSON lacks, and a task would see another value."""
    headers = {**HEADERS, "idempotency-key": said}
    assert signed_at(signed(headers), BODY, [NEW]) is not None
    assert signed_at(signed(headers) | {"idempotency-key": other}, BODY, [NEW]) is None


def test_a_name_that_is_no_text_is_answered() -> None:
    assert signed_at(signed() | {"idempotency-x": {b"\xff": 1}}, BODY, [NEW]) is None


def test_what_is_not_json_is_not_signed() -> None:
    with pytest.raises(TypeError):
        sign({**HEADERS, "timelimit": [None, Decimal(90)]}, BODY, NEW, at=1.0)


def test_processes_of_other_versions_sign_alike() -> None:
    """During a deploy, each runs what the other has signed."""
    digest = "53d49bf1fab362b68ba0c23da93feb060850096327cc98affdceb77dc7ba642d"
    assert signed()[SIGNATURE_HEADER] == f"v1 1700000000.250 {digest}"


def test_the_body_and_the_time_are_covered() -> None:
    assert signed_at(signed(), BODY.replace("p1", "p2"), [NEW]) is None
    later = signed()[SIGNATURE_HEADER].replace("1700000000.250", "1800000000.250")
    assert signed_at(signed() | {SIGNATURE_HEADER: later}, BODY, [NEW]) is None


def test_what_tracing_tools_and_brokers_add_changes_nothing() -> None:
    added = {"traceparent": "00-2", "x-death": [{"queue": "q"}], "sentry-trace": "1", "compression": "gzip"}
    assert signed_at(signed() | added, BODY, [NEW]) is not None


@pytest.mark.parametrize(
    "value",
    [None, 7, "", "v1", "v1 1 ", "v2 1 ab", "v1 now 00", "v1 nan 00", "v1 1 é", "v1  1 ab", ["v1 1 ab"], b"v1 1 ab"],
)
def test_what_is_no_signature_is_none(value: Any) -> None:
    assert signed_at({**HEADERS, SIGNATURE_HEADER: value}, BODY, [NEW]) is None


HEADER_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(
    st.dictionaries(st.sampled_from([*HEADERS, "idempotency-x", "eta", "other"]), HEADER_VALUES),
    st.text() | st.binary(),
)
def test_whatever_is_signed_is_accepted_as_json_brings_it(headers: dict[str, Any], body: str | bytes) -> None:
    value = sign(headers, body, NEW, at=1.0)
    arrived = json.loads(json.dumps(headers)) | {SIGNATURE_HEADER: value}
    assert signed_at(arrived, body, [OLD, NEW]) == 1.0
    assert signed_at(arrived, body, [OLD]) is None


@given(HEADER_VALUES | st.text(), st.binary())
def test_whatever_comes_as_a_signature_is_answered(value: Any, body: bytes) -> None:
    assert signed_at({"task": "t", SIGNATURE_HEADER: value}, body, [NEW]) is None
    claimed_at({SIGNATURE_HEADER: value})


def test_secrets_come_from_the_environment_and_are_long_enough() -> None:
    url = "postgresql+psycopg://localhost/x"
    read = Settings.read({"database_url": url, "message_secrets": f"{'n' * 32}, {'o' * 40},"})
    assert [each.get_secret_value() for each in read.message_secrets] == ["n" * 32, "o" * 40]
    assert "n" * 32 not in repr(read)
    assert Settings.read({"database_url": url, "message_secrets": ""}).message_secrets == ()
    with pytest.raises(SettingsError) as refused:
        Settings.read({"database_url": url, "message_secrets": ["n" * 32, "short"]})
    assert str(refused.value) == "idempotency_message_secrets: each must have at least 32 characters"
