"""What a request's body says, for its fingerprint: JSON that all parsers read alike, forms, and bytes."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal, InvalidOperation
from typing import Any, NoReturn

from ..errors import InvalidArguments
from ..wire.keys import MAX_DEPTH, depth

# So that no digit is lost.
_EXACT = Context(prec=MAX_PREC, Emax=MAX_EMAX, Emin=MIN_EMIN)
# Before a number with a fraction, which becomes a text. No text of a body has this character.
_NUMBER = "\0"
# More characters than this may be a number beyond a float.
_SURELY_FINITE = 300
# U+0000, and surrogates: those left over when pairs have become characters.
_NOT_TEXT = re.compile("[\0\ud800-\udfff]")
# The characters that RFC 2046 allows, and some more.
_BOUNDARY = re.compile(r""";\s*boundary=(?:"([^"\\]+)"|([^\s;"]+))""", re.IGNORECASE)


def digest(body: bytes, content_type: str) -> dict[str, str]:
    """What makes two bodies the same: of JSON its meaning, of a multipart body its parts, of others every byte.

    Raises `InvalidArguments` for a JSON body that is none, or that readers would read differently.
    """
    media_type = media_type_of(content_type)
    if body and (media_type == "application/json" or media_type.endswith("+json")):
        return {"json": _sha256(canonical(body).encode())}
    said = {"media_type": media_type}
    if media_type.startswith("multipart/") and (boundary := _boundary(content_type)):
        # each sending has another boundary
        return said | {"parts": _sha256(*(_sha256(part).encode() for part in body.split(b"--" + boundary)))}
    return said | {"sha256": _sha256(body)}


def media_type_of(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _boundary(content_type: str) -> bytes | None:
    found = _BOUNDARY.search(content_type)
    return None if found is None else (found[1] or found[2]).encode("latin-1", "replace")


def _sha256(*parts: bytes) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()


def canonical(body: bytes) -> str:
    """The same text for JSON of the same meaning: members sorted, no white space, numbers by their exact value.

    Raises `InvalidArguments`, as `strict_json`.
    """
    value = _read(body, _canonical_number)
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    except RecursionError:
        raise _refusal(f"nested at most {MAX_DEPTH} deep") from None


def strict_json(body: bytes) -> Any:
    """Read a JSON text; numbers with a fraction or an exponent become `Decimal`, so that none is rounded.

    Raises `InvalidArguments`, which names the rule and never shows the body, for what is not JSON in UTF-8 and for what
    parsers disagree about or cannot store: duplicate members, NaN, numbers beyond a float, unpaired surrogates,
    U+0000, nesting of more than 100.
    """
    return _read(body, _number)


def _read(body: bytes, number: Callable[[str], Any]) -> Any:
    try:
        value = json.loads(
            body.decode(), object_pairs_hook=_members, parse_constant=_constant, parse_float=number, parse_int=_integer
        )
    except UnicodeDecodeError as error:
        raise _refusal(f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise _refusal(f"not JSON at character {error.pos}") from None
    except RecursionError:
        raise _refusal(f"nested at most {MAX_DEPTH} deep") from None
    if depth(value) > MAX_DEPTH:
        raise _refusal(f"nested at most {MAX_DEPTH} deep")
    if b"\\u" in body:  # only an escape can make these characters
        _check_texts(value)
    return value


def _refusal(what: str) -> InvalidArguments:
    return InvalidArguments(f"body: {what}")


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise _refusal("a member twice in one object")
    return members


def _constant(_: str) -> NoReturn:
    raise _refusal("NaN and infinity are not JSON")


def _number(text: str) -> Decimal:
    if math.isinf(float(text)):
        raise _refusal("a number beyond the range of a float")
    try:
        return Decimal(text)
    except InvalidOperation:
        raise _refusal("a number with an exponent of too many digits") from None


def _canonical_number(text: str) -> str | int:
    """A number with a fraction or an exponent: 1.5, 1.50 and 15e-1 are the same, and so are 1, 1.0 and 10e-1."""
    is_plain = "e" not in text and "E" not in text and "0.000000" not in text and len(text) < _SURELY_FINITE
    if is_plain:  # most are; what follows is the same for them, and slower
        text = text.rstrip("0")
        return int(text[:-1]) if text[-1] == "." else _NUMBER + text
    number = _number(text).normalize(_EXACT)
    return int(number) if number.as_tuple().exponent >= 0 else f"{_NUMBER}{number}"  # type: ignore[operator]


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:  # Python's limit of digits
        raise _refusal("an integer of too many digits") from None


def _check_texts(value: Any) -> None:
    for text in _texts(value):
        if found := _NOT_TEXT.search(text):
            raise _refusal("U+0000 in a text" if found[0] == "\0" else "an unpaired surrogate in a text")


def _texts(value: Any) -> Iterator[str]:
    """All texts of a value, names of members too; without recursion."""
    left = [value]
    while left:
        match left.pop():
            case str() as text:
                yield text
            case list() as items:
                left.extend(items)
            case dict() as members:
                left.extend(members)
                left.extend(members.values())
