"""Keys and fingerprints: what makes two calls the same call.

The key names the operation. The fingerprint identifies its arguments, so that a key reused with different arguments is
refused instead of answered with another call's result.
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

# The limit of Stripe and of implementers of the IETF draft; also fits a text index comfortably.
MAX_KEY_LENGTH = 255
# Deeper nesting is a mistake. JSON readers have their own limits, and Python's depends on the current stack depth: what
# one process sends, another might not be able to read.
MAX_DEPTH = 100
# What quote() does not encode. A separator must not be one of these: "a-b" + "c" and "a" + "b-c" would be one key.
UNRESERVED = frozenset(string.ascii_letters + string.digits + "-_.~")

_WAYS_OUT = "pass an id, text or a number instead, or register the type with kombu.utils.json.register_type"

KeyFunction = Callable[[Mapping[str, Any]], str]


@dataclass(frozen=True, slots=True)
class KeyFrom:
    """A key function of which it is known what it uses: these arguments and nothing else."""

    fields: tuple[str, ...]
    make: KeyFunction

    def __call__(self, arguments: Mapping[str, Any]) -> str:
        return self.make(arguments)


# The task in the id of every HTTP request's operation. Method and path are in its fingerprint instead, so a key that is
# reused on another route is refused.
HTTP_TASK = "http"


@dataclass(frozen=True, slots=True)
class OperationId:
    """One operation of one tenant: the primary key of its record."""

    tenant: str
    task: str
    key: str

    def __str__(self) -> str:
        return f"{self.tenant}/{self.task}/{self.key}"

    @property
    def digest(self) -> str:
        """A fixed-length name that does not reveal the key: 128 bits of SHA-256, in hex."""
        return _sha256(json.dumps([self.tenant, self.task, self.key]))[:32]


def check_key(key: object, *, field: str = "idempotency key") -> str:
    """Check a key and return it as text: 1 to 255 printable ASCII characters, no blank at either end.

    Raises `MissingKey` for None, and `InvalidKey`, which names the rule; neither shows the key.
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
    """Map arguments to parameter names, so that positional and keyword calls are the same.

    Defaults are not filled in: a default added by a deploy must not change messages already in flight.
    Raises `InvalidArguments` if the arguments do not match the signature.
    """
    try:
        return dict(signature.bind(*args, **kwargs).arguments)
    except TypeError as error:
        raise InvalidArguments(f"arguments: {error}") from None


def fingerprint(arguments: Mapping[str, Any], *, like: object = None) -> str:
    """The fingerprint of bound arguments, by the rule of the fingerprint `like` if that is known, else by the newest.

    `v1:` is followed by the SHA-256 of their canonical JSON.
    """
    version = fingerprint_version(like)
    return FINGERPRINT_RULES[version if version in FINGERPRINT_RULES else next(reversed(FINGERPRINT_RULES))](arguments)


def fingerprints(arguments: Mapping[str, Any], given: object) -> list[str]:
    """The fingerprints of bound arguments by every known rule, that of the message's own fingerprint `given` first."""
    first = fingerprint(arguments, like=given)
    return [first, *other_fingerprints(arguments, first)]


def is_fingerprint(value: object) -> bool:
    """Whether a header's value is a fingerprint by a known rule."""
    return (
        isinstance(value, str)
        and value.isascii()
        and value.isprintable()
        and fingerprint_version(value) in FINGERPRINT_RULES
    )


def other_fingerprints(arguments: Mapping[str, Any], fingerprint: str) -> list[str]:
    """The fingerprints of bound arguments by the other known rules, since a record may have been stored by one of those."""
    made_by = fingerprint_version(fingerprint)
    return [rule(arguments) for version, rule in FINGERPRINT_RULES.items() if version != made_by]


def fingerprint_version(fingerprint: object) -> str | None:
    """The rule of a fingerprint; None if it is not one."""
    version, colon, _ = fingerprint.partition(":") if isinstance(fingerprint, str) else ("", "", "")
    return version if colon else None


def _v1(arguments: Mapping[str, Any]) -> str:
    return f"v1:{_sha256(canonical_json(arguments))}"


# By version, newest last. Keep a rule for as long as records that used it are retained.
FINGERPRINT_RULES: dict[str, Callable[[Mapping[str, Any]], str]] = {"v1": _v1}


def canonical_json(value: Any) -> str:
    """Encode a value as canonical JSON: members sorted, no white space, no NaN.

    Celery's encoding is applied first, so that a UUID or a datetime equals what a message carries.
    Raises `InvalidArguments` for values that are not JSON or are nested more than 100 deep.
    """
    try:
        plain = json.loads(encoding.dumps(value))
        text = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except RecursionError:
        raise InvalidArguments(f"arguments: nested at most {MAX_DEPTH} deep") from None
    except (TypeError, ValueError) as error:
        where = encoding.first_defect(value) or type(error).__name__
        raise InvalidArguments(f"arguments: not JSON: {where}; {_WAYS_OUT}") from None
    # cheap check first: few brackets cannot be nested deeply
    if text.count("[") + text.count("{") > MAX_DEPTH and depth(plain) > MAX_DEPTH:
        raise InvalidArguments(f"arguments: nested at most {MAX_DEPTH} deep")
    return text


def made_by(function: KeyFunction, arguments: Mapping[str, Any]) -> str:
    """The key that a key function makes. Raises `InvalidKey`, and `MissingKey` if it returns None.

    Raises `MissingKey`, too, if it asks for an argument that the call does not give.
    """
    given = _Given(arguments)
    try:
        key = function(given)
    except KeyError as error:
        if not given.missed.intersection(error.args):
            raise  # of the function's own making
        raise MissingKey(
            f"its key function asks for the argument {error.args[0]!r}, which this call does not give "
            "(defaults are not filled in)"
        ) from None
    if key is None:
        raise MissingKey("its key function has returned None for this call")
    return check_key(key)


class _Given(dict[str, Any]):
    """Arguments by name, for a key function; `missed`: those that it asked for in vain."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__(arguments)
        self.missed: set[object] = set()

    def __missing__(self, name: str) -> Any:
        self.missed.add(name)
        raise KeyError(name)


def content_hash(*fields: str) -> KeyFrom:
    """Use a hash of the named arguments as the key, for operations without an id.

    Name only fields that never change and together identify one operation. Never hash all arguments: two equal
    purchases are two purchases. Raises `SettingsError` without a field.
    """
    if not fields:
        raise SettingsError("content_hash: name at least one argument")

    def key(arguments: Mapping[str, Any]) -> str:
        chosen = {field: _field(arguments, field) for field in fields}
        # fixed: unlike a fingerprint's rule, a key's may never change
        return f"v1-{_sha256(canonical_json(chosen))}"

    return KeyFrom(fields, key)


def template(text: str) -> KeyFrom:
    """Make keys from a template of arguments: `"{payment_id}"`, `"{customer_id}:{request_id}"`.

    With several fields, values are percent-encoded and must be separated by a character that encoding never leaves
    in a value (`:` or `/`), so that different values never give the same key.
    Raises `SettingsError` for any other template.
    """
    try:
        parts = [(literal, field, spec, conv) for literal, field, spec, conv in string.Formatter().parse(text)]
    except ValueError as error:
        raise SettingsError(f"key template {text!r}: {error}") from None
    fields = tuple(field for _, field, _, _ in parts if field is not None)
    if not fields:
        raise SettingsError(f"key template {text!r}: contains no argument, so every call would be the same operation")
    if not (text.isascii() and text.isprintable()):
        raise SettingsError(f"key template {text!r}: must be printable ASCII")
    for _, field, spec, conversion in parts:
        if field is not None and (not field.isidentifier() or spec or conversion):
            raise SettingsError(f"key template {text!r}: only plain argument names, got {field!r}")
    separators = [literal for literal, field, _, _ in parts[1:] if field is not None]
    # "%" appears in encoded values
    if any((UNRESERVED | {"%"}).issuperset(separator) for separator in separators):
        raise SettingsError(f"key template {text!r}: separate the fields with ':' or '/'")

    def key(arguments: Mapping[str, Any]) -> str:
        values = {field: _plain(field, _field(arguments, field)) for field in fields}
        if len(fields) > 1:
            values = {field: _quoted(field, value) for field, value in values.items()}
        return text.format_map(values)

    return KeyFrom(fields, key)


def _field(arguments: Mapping[str, Any], field: str) -> Any:
    if field not in arguments:
        raise MissingKey(f"argument {field}: used in the idempotency key, is missing (defaults are not filled in)")
    if arguments[field] is None:
        raise MissingKey(f"argument {field}: used in the idempotency key, must not be None")
    return arguments[field]


def _plain(field: str, value: Any) -> str:
    # A float or a container has several spellings, and True would become the key "True".
    if isinstance(value, bool) or not isinstance(value, str | int | UUID):
        raise InvalidKey(
            f"argument {field}: used in the idempotency key, must be text, an integer or a UUID, got {type(value).__name__}"
        )
    if not str(value).strip():
        raise InvalidKey(f"argument {field}: used in the idempotency key, must not be blank")
    return str(value)


def _quoted(field: str, value: str) -> str:
    try:
        return quote(value, safe="")
    except UnicodeEncodeError as error:
        # the original message would show the value
        surrogate = f"U+{ord(value[error.start]):04X} at position {error.start}"
        raise InvalidKey(
            f"argument {field}: used in the idempotency key, contains an unpaired surrogate {surrogate}"
        ) from None


def depth(value: Any) -> int:
    """The nesting depth of containers, counted without recursion."""
    depth, level = 0, [value]
    while containers := [each for each in level if isinstance(each, list | dict)]:
        depth += 1
        level = [inner for each in containers for inner in (each.values() if isinstance(each, dict) else each)]
    return depth


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
