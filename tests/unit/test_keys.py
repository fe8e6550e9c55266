"""Keys and fingerprints: what is accepted, what is refused, and what never collides."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kombu.utils.json import dumps, loads

from idempotency.errors import InvalidArguments, InvalidKey, MissingKey, SettingsError
from idempotency.wire import keys
from idempotency.wire.keys import (
    MAX_KEY_LENGTH,
    OperationId,
    bind,
    canonical_json,
    check_key,
    content_hash,
    fingerprint,
    made_by,
)
from idempotency.wire.keys import template as key_template

# what a JSON message can carry; integers as large as a driver or another language still reads
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
ARGUMENTS = st.dictionaries(st.text(min_size=1), JSON, max_size=4)


# ---------------------------------------------------------------- keys


def test_a_missing_key_is_refused_as_missing() -> None:
    with pytest.raises(MissingKey, match="idempotency key: none given"):
        check_key(None)


@pytest.mark.parametrize("key", ["", " ", "   ", "\t", "\r\n"])
def test_an_empty_or_blank_key_is_refused(key: str) -> None:
    with pytest.raises(InvalidKey, match="idempotency key: must not be empty or blank"):
        check_key(key)


@pytest.mark.parametrize("key", ["a", "0", "None", "a b", "order:4711/refund", "!", "~"])
def test_printable_text_is_a_key_as_it_is(key: str) -> None:
    assert check_key(key) == key


def test_a_key_of_255_characters_is_accepted_and_one_more_is_refused() -> None:
    assert check_key("k" * MAX_KEY_LENGTH) == "k" * 255
    with pytest.raises(InvalidKey, match="at most 255 characters, got 256"):
        check_key("k" * 256)


@pytest.mark.parametrize(
    ("character", "name"),
    [
        ("\0", "U+0000"),
        ("\r", "U+000D"),
        ("\n", "U+000A"),
        ("\t", "U+0009"),
        ("\x1b", "U+001B"),
        ("\x7f", "U+007F"),
        ("\x80", "U+0080"),
        ("\xa0", "U+00A0"),
        ("é", "U+00E9"),
        ("\u202e", "U+202E"),
        ("\ud800", "U+D800"),
        ("😀", "U+1F600"),
    ],
)
def test_anything_but_printable_ascii_is_refused_with_its_position(character: str, name: str) -> None:
    assert check_key("abc-def")
    with pytest.raises(InvalidKey) as refused:
        check_key(f"abc{character}def")
    assert name in str(refused.value)
    assert "position 3" in str(refused.value)


@pytest.mark.parametrize("key", [" a", "a ", " a b "])
def test_a_key_with_a_blank_at_either_end_is_refused_and_not_stripped(key: str) -> None:
    assert check_key(key.strip())
    with pytest.raises(InvalidKey, match="must not begin or end with a blank"):
        check_key(key)


@pytest.mark.parametrize("key", [1, 1.5, True, b"abc", ["a"], {"a": 1}, object()])
def test_what_is_neither_text_nor_a_uuid_is_refused_by_its_type(key: object) -> None:
    with pytest.raises(InvalidKey, match=f"must be text or a UUID, got {type(key).__name__}"):
        check_key(key)


def test_a_uuid_and_its_text_are_one_key() -> None:
    id = uuid4()
    assert check_key(id) == check_key(str(id)) == str(id)
    assert check_key(UUID("0192F0A4-7B1C-7D3E-8F00-0123456789AB")) == "0192f0a4-7b1c-7d3e-8f00-0123456789ab"


def test_a_refusal_names_the_field_it_is_about() -> None:
    with pytest.raises(InvalidKey, match=r"^tenant: "):
        check_key("", field="tenant")


@pytest.mark.parametrize("key", ["s3cret" * 50, "s3cret\n", " s3cret", "s3crét"])
def test_a_refusal_never_shows_the_key(key: str) -> None:
    with pytest.raises(InvalidKey) as refused:
        check_key(key)
    assert "s3cr" not in str(refused.value)


@given(st.text())
def test_every_accepted_key_is_printable_ascii_of_1_to_255_characters(key: str) -> None:
    try:
        accepted = check_key(key)
    except InvalidKey:
        return
    assert accepted == key
    assert key.isascii()
    assert key.isprintable()
    assert 1 <= len(key) <= 255


@given(st.tuples(st.text(), st.text(), st.text()), st.tuples(st.text(), st.text(), st.text()))
def test_operations_share_a_digest_only_when_they_are_one(
    one: tuple[str, str, str], other: tuple[str, str, str]
) -> None:
    assert (OperationId(*one).digest == OperationId(*other).digest) == (one == other)


def test_the_digest_has_a_fixed_length_and_shows_nothing_of_the_key() -> None:
    digest = OperationId("acme", "payments.capture", "order-4711").digest
    assert len(digest) == 32
    assert set(digest) <= set("0123456789abcdef")


# ---------------------------------------------------------------- keys from a template


def test_a_template_of_one_field_makes_the_value_the_key() -> None:
    assert key_template("{payment_id}")({"payment_id": "p-1", "amount": 5}) == "p-1"
    assert key_template("capture {payment_id}")({"payment_id": 17}) == "capture 17"


def test_a_template_of_several_fields_sets_the_encoded_values_apart() -> None:
    make = key_template("{customer}:{request}")
    assert make({"customer": "c1", "request": "r1"}) == "c1:r1"
    assert make({"customer": "c:1", "request": "r/1"}) == "c%3A1:r%2F1"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("a:b", "c"), ("a", "b:c")),
        (("a", "b%3Ac"), ("a:b", "c")),
        (("a%3A", "b"), ("a:", "b")),
        (("é", "x"), ("%C3%A9", "x")),
    ],
)
def test_separators_inside_values_do_not_make_two_operations_one(one: tuple[str, str], other: tuple[str, str]) -> None:
    make = key_template("{a}:{b}")
    assert make({"a": one[0], "b": one[1]}) != make({"a": other[0], "b": other[1]})


# no surrogates: they cannot be percent-encoded, and a key made from one is refused
VALUES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda text: bool(text.strip()))


@given(
    st.text(st.characters(min_codepoint=32, max_codepoint=126, exclude_characters="{}"), max_size=3),
    VALUES,
    VALUES,
    VALUES,
    VALUES,
)
def test_composite_keys_never_collide(separator: str, a: str, b: str, c: str, d: str) -> None:
    try:
        make = key_template("{a}" + separator + "{b}")
    except SettingsError:
        make = key_template("{a}:{b}")
    same_key = make({"a": a, "b": b}) == make({"a": c, "b": d})
    assert same_key == ((a, b) == (c, d))


@given(
    st.lists(st.integers() | VALUES, min_size=3, max_size=3), st.lists(st.integers() | VALUES, min_size=3, max_size=3)
)
def test_composite_keys_of_three_collide_only_for_the_same_text(one: list[Any], other: list[Any]) -> None:
    make = key_template("{a}:{b}/{c}")
    same_key = make(dict(zip("abc", one, strict=True))) == make(dict(zip("abc", other, strict=True)))
    assert same_key == (list(map(str, one)) == list(map(str, other)))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "contains no argument"),
        ("capture", "contains no argument"),
        ("{{payment_id}}", "contains no argument"),
        ("{", "Single '{'"),
        ("{a", "expected '}'"),
        ("{}", "only plain argument names"),
        ("{0}", "only plain argument names"),
        ("{a.b}", "only plain argument names"),
        ("{a[0]}", "only plain argument names"),
        ("{a!r}", "only plain argument names"),
        ("{a:>3}", "only plain argument names"),
        ("{a}{b}", "separate the fields"),
        ("{a}-{b}", "separate the fields"),
        ("{a}.x_{b}", "separate the fields"),
        ("{a}:{b}{c}", "separate the fields"),
    ],
)
def test_a_bad_template_is_refused_where_it_is_defined(text: str, reason: str) -> None:
    with pytest.raises(SettingsError) as refused:
        key_template(text)
    assert "key template" in str(refused.value)
    assert reason in str(refused.value)


@pytest.mark.parametrize("text", ["{a}", "x-{a}", "{a}:{b}", "{a}/{b}", "{a} {b}", "{a}-:-{b}", "{a}:{b}:{c}"])
def test_a_good_template_is_accepted(text: str) -> None:
    assert check_key(key_template(text)({"a": "1", "b": "2", "c": "3"}))


@pytest.mark.parametrize("text", ["{a}%{b}", "{a}%3A{b}"])
def test_the_escape_character_of_the_encoding_does_not_set_fields_apart(text: str) -> None:
    # quote("x:") + "%" + quote("3A") is quote("x") + "%" + quote("3A:")
    with pytest.raises(SettingsError, match="separate the fields"):
        key_template(text)


@pytest.mark.parametrize("value", [None, "missing"])
def test_an_argument_that_the_key_needs_and_the_call_has_not_is_named(value: str | None) -> None:
    arguments, says = ({}, "is missing") if value == "missing" else ({"payment_id": value}, "must not be None")
    with pytest.raises(MissingKey, match=f"argument payment_id: used in the idempotency key, {says}"):
        key_template("{payment_id}")(arguments)


@pytest.mark.parametrize("value", [True, 1.5, ["a"], {"a": 1}, b"a", datetime(2026, 1, 1, tzinfo=UTC)])
def test_a_value_without_one_spelling_makes_no_key(value: object) -> None:
    with pytest.raises(InvalidKey, match=f"argument a: .* got {type(value).__name__}"):
        key_template("{a}")({"a": value})


@pytest.mark.parametrize("value", ["", " ", "\n"])
def test_a_blank_value_makes_no_key(value: str) -> None:
    for text in ("{a}", "x-{a}", "{a}:{b}"):
        with pytest.raises(InvalidKey, match=r"argument a: .* blank"):
            key_template(text)({"a": value, "b": "b"})


def test_a_lone_surrogate_makes_no_key_and_is_named_without_the_value() -> None:
    for text in ("{a}", "{a}:{b}"):
        with pytest.raises(InvalidKey, match=r"U\+D800 at position 6") as refused:
            check_key(key_template(text)({"a": "s3cret\ud800", "b": "b"}))
        assert "s3cret" not in str(refused.value)
    assert check_key(key_template("{a}:{b}")({"a": "😀", "b": "b"}))


def test_a_uuid_makes_the_same_key_before_and_after_the_wire() -> None:
    id = UUID("0192F0A4-7B1C-7D3E-8F00-0123456789AB")
    make = key_template("{a}:{b}")
    assert make({"a": id, "b": 1}) == make(loads(dumps({"a": id, "b": 1}))) == make({"a": str(id), "b": "1"})


# ---------------------------------------------------------------- keys from content


def test_a_content_hash_is_a_valid_key_that_depends_on_its_fields_alone() -> None:
    make = content_hash("order_id", "amount")
    key = make({"order_id": 1, "amount": 5, "note": "first"})
    assert check_key(key) == key
    assert make({"amount": 5, "note": "second", "order_id": 1}) == key


@pytest.mark.parametrize("other", [{"a": 1, "b": 3}, {"a": "1", "b": 2}, {"a": 1.0, "b": 2}, {"a": True, "b": 2}])
def test_other_content_is_another_key(other: dict[str, Any]) -> None:
    make = content_hash("a", "b")
    assert make({"a": 1, "b": 2}) != make(other)


@given(JSON.filter(lambda value: value is not None), JSON.filter(lambda value: value is not None))
def test_two_contents_share_a_key_only_when_their_json_is_the_same(one: Any, other: Any) -> None:
    make = content_hash("a")
    assert (make({"a": one}) == make({"a": other})) == (canonical_json(one) == canonical_json(other))


def test_a_content_hash_needs_its_fields_named_and_given() -> None:
    with pytest.raises(SettingsError, match="name at least one argument"):
        content_hash()
    with pytest.raises(MissingKey, match="argument amount"):
        content_hash("order_id", "amount")({"order_id": 1})


# ---------------------------------------------------------------- arguments


def capture(payment_id: str, amount: int, currency: str = "EUR", **extra: Any) -> None: ...


SIGNATURE = inspect.signature(capture)


def test_positional_and_keyword_calls_are_one() -> None:
    calls = [
        bind(SIGNATURE, ("p1", 5, "USD"), {}),
        bind(SIGNATURE, ("p1",), {"amount": 5, "currency": "USD"}),
        bind(SIGNATURE, (), {"currency": "USD", "amount": 5, "payment_id": "p1"}),
    ]
    assert len({fingerprint(arguments) for arguments in calls}) == 1


def test_defaults_are_not_filled_in() -> None:
    # a default that a deploy adds must not change the messages already in flight
    assert bind(SIGNATURE, ("p1", 5), {}) == {"payment_id": "p1", "amount": 5}
    assert fingerprint(bind(SIGNATURE, ("p1", 5), {})) != fingerprint(bind(SIGNATURE, ("p1", 5, "EUR"), {}))


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), (("p1",), {}), (("p1", 5, "EUR", 1), {}), (("p1", 5), {"payment_id": "p2"})]
)
def test_arguments_that_do_not_fit_are_refused(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with pytest.raises(InvalidArguments, match=r"^arguments: "):
        bind(SIGNATURE, args, kwargs)


# ---------------------------------------------------------------- fingerprints


def test_member_order_and_white_space_do_not_count() -> None:
    spellings = ['{"a": 1, "b": {"c": [1, 2], "d": null}}', '{"b":{"d":null,"c":[1,2]},\n "a":1}']
    assert len({fingerprint(json.loads(text)) for text in spellings}) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1}, {"a": 1.0}),
        ({"a": 1}, {"a": "1"}),
        ({"a": 1}, {"a": True}),
        ({"a": 0}, {"a": None}),
        ({"a": None}, {}),
        ({"a": ""}, {"a": None}),
        ({"a": []}, {"a": {}}),
        ({"a": [1, 2]}, {"a": [2, 1]}),
        ({"a": 0.0}, {"a": -0.0}),
        ({"a": "é"}, {"a": "e\u0301"}),
        ({"a": "\ud800"}, {"a": "\ufffd"}),
        ({"a": "\ud800"}, {"a": "\\ud800"}),
        ({"a": "x\u0000y"}, {"a": "xy"}),
    ],
)
def test_other_arguments_have_another_fingerprint(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert fingerprint(one) == fingerprint(dict(one))
    assert fingerprint(one) != fingerprint(other)


def test_a_fingerprint_names_its_rule_and_is_pure_ascii() -> None:
    text = fingerprint({"a": "\u0000\ud800é"})
    assert text.startswith("v1:")
    assert len(text) == len("v1:") + 64
    # pinned: a stored fingerprint must still match after an upgrade of anything
    assert fingerprint({"a": [1, 1.5, "é", None, True]}) == (
        "v1:b70083bd910bd421dc1534cf8b4553a3d574b6b9d9f903e3874a87ef0f0119e2"
    )


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (float("nan"), "a: NaN or infinity"),
        (float("-inf"), "a: NaN or infinity"),
        ([1, float("nan")], "a[1]: NaN or infinity"),
        (object(), "a: object"),
        ({(1, 2): 3}, "a: a tuple as the name of a member"),
        (json, "a: module"),
        ({"lines": [{}, {"price": 1}, {"price": {1, 2}}]}, "a.lines[2].price: set"),
        # the name of a member may be data
        ({"4242 4242 4242 4242": [object()]}, "a[*][0]: object"),
    ],
)
def test_what_is_not_json_has_no_fingerprint_and_says_where_it_is(value: object, where: str) -> None:
    with pytest.raises(InvalidArguments) as raised:
        fingerprint({"a": value})
    assert str(raised.value) == (
        f"arguments: not JSON: {where}; "
        "pass an id, text or a number instead, or register the type with kombu.utils.json.register_type"
    )


def test_arguments_that_contain_themselves_are_not_json() -> None:
    around: list[Any] = []
    around.append(around)
    with pytest.raises(InvalidArguments, match="arguments: not JSON: ValueError; "):
        fingerprint({"a": around})


def test_a_key_function_that_asks_for_what_is_not_given_says_so() -> None:
    with pytest.raises(MissingKey, match="its key function asks for the argument 'currency', which this call"):
        made_by(lambda arguments: arguments["currency"], {"payment": 1})
    with pytest.raises(MissingKey, match="its key function has returned None"):
        made_by(lambda arguments: arguments.get("currency"), {"payment": 1})  # type: ignore[arg-type, return-value]


def test_a_key_function_may_handle_what_is_not_given_and_keeps_its_own_errors() -> None:
    def handled(arguments: Mapping[str, Any]) -> str:
        try:
            return str(arguments["currency"])
        except KeyError:
            return str(arguments.get("payment"))

    assert made_by(handled, {"payment": "p"}) == "p"
    with pytest.raises(KeyError, match="gold"):
        made_by(lambda arguments: {"silver": "s"}[arguments["plan"]], {"plan": "gold"})


@pytest.mark.parametrize("depth", [100, 1_000, 100_000])
def test_arguments_nested_too_deep_are_refused_with_the_limit(depth: int) -> None:
    for value in (nested(depth), [[[]] * 1000, nested(depth - 1)], {"b": {"c": nested(depth - 2)}}):
        with pytest.raises(InvalidArguments, match=r"^arguments: nested at most 100 deep$"):
            fingerprint({"a": value})


def test_arguments_nested_as_deep_as_they_may_be_are_accepted() -> None:
    for value in (nested(99), [[[]] * 1000, nested(98)], {"b": {"c": nested(97)}}):
        assert fingerprint({"a": value}).startswith("v1:")


@pytest.mark.parametrize("value", [1e308, 5e-324, -0.0, nested(50), {"1": 2}, 2**63, -(2**200)])
def test_unusual_json_has_one(value: object) -> None:
    assert fingerprint({"a": value}).startswith("v1:")


@given(ARGUMENTS, ARGUMENTS)
def test_fingerprints_are_equal_exactly_when_the_canonical_json_is(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert (fingerprint(one) == fingerprint(other)) == (canonical_json(one) == canonical_json(other))


@given(ARGUMENTS)
def test_canonical_json_has_the_same_value_and_is_its_own_canonical_form(arguments: dict[str, Any]) -> None:
    text = canonical_json(arguments)
    assert text.isascii()
    assert canonical_json(json.loads(text)) == text
    assert repr(sorted(json.loads(text))) == repr(sorted(arguments))


@given(
    ARGUMENTS | st.dictionaries(st.text(min_size=1), st.uuids() | st.datetimes(timezones=st.just(UTC)) | st.decimals())
)
def test_a_fingerprint_survives_the_wire(arguments: dict[str, Any]) -> None:
    assert fingerprint(loads(dumps(arguments))) == fingerprint(arguments)


# ---------------------------------------------------------------- versions of fingerprints


def test_a_fingerprint_is_made_by_the_newest_rule_or_by_that_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"order": 1}
    old, key = keys.fingerprint(arguments), keys.content_hash("order")(arguments)
    assert keys.other_fingerprints(arguments, old) == []
    monkeypatch.setitem(keys.FINGERPRINT_RULES, "v2", lambda _: "v2:newer")
    assert keys.fingerprint(arguments) == "v2:newer"
    assert keys.fingerprint(arguments, like=old) == keys.fingerprint(arguments, like="v1:of other arguments") == old
    assert keys.other_fingerprints(arguments, "v2:newer") == [old]
    for unknown in ("v3:later", "no version", "", None, 5):
        assert keys.fingerprint(arguments, like=unknown) == "v2:newer"
    # a key has to stay the same for ever, unlike a fingerprint
    assert keys.content_hash("order")(arguments) == key
