"""Keys and fingerprints: what makes two calls the same call. Pure; nothing here talks to anything.

The key says which operation is meant. The fingerprint says which arguments it was meant with, so that a key
used again with other arguments is refused instead of answered with somebody else's result.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote
from uuid import UUID

from ..errors import InvalidArguments, InvalidKey, MissingKey, SettingsError
from . import encoding

# The limit Stripe and the IETF draft's implementers use; also what a text index carries comfortably.
MAX_KEY_LENGTH = 255
# Arguments nested deeper than this are a mistake, and each JSON reader has a limit of its own: Python's depends on how
# deep its stack is at that moment, so that a message could be sent by one process and be unreadable in another.
MAX_DEPTH = 100
# What quote() leaves alone; a separator must lie outside, or "a-b" + "c" and "a" + "b-c" would be one key.
UNRESERVED = frozenset(string.ascii_letters + string.digits + "-_.~")

KeyFunction = Callable[[Mapping[str, Any]], str]


@dataclass(frozen=True, slots=True)
class OperationId:
    """What a key names: one operation of one tenant. The primary key of its record."""

    tenant: str
    task: str
    key: str

    def __str__(self) -> str:
        return f"{self.tenant}/{self.task}/{self.key}"

    @property
    def digest(self) -> str:
        """A name of fixed length that shows nothing of the key: 128 bits of SHA-256, in hex."""
        return _sha256(json.dumps([self.tenant, self.task, self.key]))[:32]


def check_key(key: object, *, field: str = "idempotency key") -> str:
    """Return the key as text if it keeps the rules: 1 to 255 printable ASCII characters, no blank at either end.

    Raises `MissingKey` for None and `InvalidKey` naming the rule; never shows the key itself.
    """
    if key is None:
        raise MissingKey(f"{field}: none given")
    if isinstance(key, UUID):
        return str(key)
    if not isinstance(key, str):
        raise InvalidKey(f"{field}: must be text or a UUID, got {type(key).__name__}")
    if not key.strip():
        raise InvalidKey(f"{field}: must not be empty or blank")
    if len(key) > MAX_KEY_LENGTH:
        raise InvalidKey(f"{field}: at most {MAX_KEY_LENGTH} characters, got {len(key)}")
    for position, character in enumerate(key):
        if not " " <= character <= "~":
            raise InvalidKey(f"{field}: only printable ASCII, got U+{ord(character):04X} at position {position}")
    if key != key.strip():
        raise InvalidKey(f"{field}: must not begin or end with a blank")
    return key


def bind(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Name the arguments by their parameters, so that positional and keyword calls are one.

    Defaults are not filled in: a default added in a deploy must not change messages already in flight.
    Raises `InvalidArguments` when they do not fit.
    """
    try:
        return dict(signature.bind(*args, **kwargs).arguments)
    except TypeError as error:
        raise InvalidArguments(f"arguments: {error}") from None


def fingerprint(arguments: Mapping[str, Any], *, like: object = None) -> str:
    """Make the fingerprint of bound arguments, by the newest rule or by that of the fingerprint `like`, if it is known.

    `v1:` is followed by SHA-256 over their canonical JSON.
    """
    version = fingerprint_version(like)
    return FINGERPRINT_RULES[version if version in FINGERPRINT_RULES else next(reversed(FINGERPRINT_RULES))](arguments)


def fingerprints(arguments: Mapping[str, Any], given: object) -> list[str]:
    """Everything that the request of a message may be stored under; `given` is the fingerprint it carries.

    First by the rule of the one it carries, then by the other rules.
    """
    first = fingerprint(arguments, like=given)
    return [first, *other_fingerprints(arguments, first)]


def is_fingerprint(value: object) -> bool:
    """Whether a header's value is a fingerprint by a rule that is known here."""
    return (
        isinstance(value, str)
        and value.isascii()
        and value.isprintable()
        and fingerprint_version(value) in FINGERPRINT_RULES
    )


def other_fingerprints(arguments: Mapping[str, Any], fingerprint: str) -> list[str]:
    """Make the fingerprints of bound arguments by the other known rules: a stored one is compared by its own."""
    made_by = fingerprint_version(fingerprint)
    return [rule(arguments) for version, rule in FINGERPRINT_RULES.items() if version != made_by]


def fingerprint_version(fingerprint: object) -> str | None:
    """Name the rule by which a fingerprint was made; None for what is no fingerprint."""
    version, colon, _ = fingerprint.partition(":") if isinstance(fingerprint, str) else ("", "", "")
    return version if colon else None


def _v1(arguments: Mapping[str, Any]) -> str:
    return f"v1:{_sha256(canonical_json(arguments))}"


# By version, the newest last. A rule stays for as long as records made by it are kept.
FINGERPRINT_RULES: dict[str, Callable[[Mapping[str, Any]], str]] = {"v1": _v1}


def canonical_json(value: Any) -> str:
    """Write JSON in one way only: members sorted, no white space, no NaN.

    Goes through Celery's encoding first, so that a UUID or a datetime counts as what the wire carries.
    Raises `InvalidArguments` for what is not JSON, or nested more than 100 deep.
    """
    try:
        plain = json.loads(encoding.dumps(value))
        text = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except RecursionError:
        raise InvalidArguments(f"arguments: nested at most {MAX_DEPTH} deep") from None
    except (TypeError, ValueError) as error:
        raise InvalidArguments(f"arguments: not JSON: {type(error).__name__}") from None
    # few brackets cannot be deep: nearly every call is spared the walk
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(plain) > MAX_DEPTH:
        raise InvalidArguments(f"arguments: nested at most {MAX_DEPTH} deep")
    return text


def content_hash(*fields: str) -> KeyFunction:
    """Use a hash over the named arguments as the key: for operations that have no id of their own.

    Name only fields that never change and that together name one operation. Never hash everything: two equal
    purchases are two purchases.
    """
    if not fields:
        raise SettingsError("content_hash: name at least one argument")

    def key(arguments: Mapping[str, Any]) -> str:
        chosen = {field: _field(arguments, field) for field in fields}
        # part of the key for ever, whatever becomes of the fingerprints
        return f"v1-{_sha256(canonical_json(chosen))}"

    key.fields = fields  # type: ignore[attr-defined]
    return key


def template(text: str) -> KeyFunction:
    """Make keys from a template over the arguments: `"{payment_id}"`, `"{customer_id}:{request_id}"`.

    With several fields the values are percent-encoded and must be set apart by a character that encoding never
    leaves in a value (`:` or `/`), so that no two lists of values give one key.
    Raises `SettingsError` for a template that is not of this form.
    """
    try:
        parts = [(literal, field, spec, conv) for literal, field, spec, conv in string.Formatter().parse(text)]
    except ValueError as error:
        raise SettingsError(f"key template {text!r}: {error}") from None
    fields = tuple(field for _, field, _, _ in parts if field is not None)
    if not fields:
        raise SettingsError(f"key template {text!r}: names no argument, so every call would be one operation")
    if not (text.isascii() and text.isprintable()):
        raise SettingsError(f"key template {text!r}: only printable ASCII can be part of a key")
    for _, field, spec, conversion in parts:
        if field is not None and (not field.isidentifier() or spec or conversion):
            raise SettingsError(f"key template {text!r}: only plain argument names, got {field!r}")
    separators = [literal for literal, field, _, _ in parts[1:] if field is not None]
    # "%" is what the encoding itself writes
    if any((UNRESERVED | {"%"}).issuperset(separator) for separator in separators):
        raise SettingsError(f"key template {text!r}: set the fields apart by ':' or '/'")

    def key(arguments: Mapping[str, Any]) -> str:
        values = {field: _plain(field, _field(arguments, field)) for field in fields}
        if len(fields) > 1:
            values = {field: _quoted(field, value) for field, value in values.items()}
        return text.format_map(values)

    key.fields = fields  # type: ignore[attr-defined]
    return key


def _field(arguments: Mapping[str, Any], field: str) -> Any:
    value = arguments.get(field)
    if value is None:
        raise MissingKey(f"argument {field}: the idempotency key is made from it, and it is not given")
    return value


def _plain(field: str, value: Any) -> str:
    # A float or a container has no one spelling, and True would be the key "True".
    if isinstance(value, bool) or not isinstance(value, str | int | UUID):
        raise InvalidKey(f"argument {field}: a key is made from text, integers or UUIDs, got {type(value).__name__}")
    if not str(value).strip():
        raise InvalidKey(f"argument {field}: the idempotency key is made from it, and it is blank")
    return str(value)


def _quoted(field: str, value: str) -> str:
    try:
        return quote(value, safe="")
    except UnicodeEncodeError as error:
        # its own text would show the value
        surrogate = f"U+{ord(value[error.start]):04X} at position {error.start}"
        raise InvalidKey(f"argument {field}: a key is made from whole characters, got {surrogate}") from None


def _depth(value: Any) -> int:
    """How many containers lie in each other, counted without recursion."""
    depth, level = 0, [value]
    while containers := [each for each in level if isinstance(each, list | dict)]:
        depth += 1
        level = [inner for each in containers for inner in (each.values() if isinstance(each, dict) else each)]
    return depth


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
