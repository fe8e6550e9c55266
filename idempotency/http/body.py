"""JSON that all parsers read alike, for the fingerprint of a request."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from typing import Any, NoReturn

from ..errors import InvalidArguments
from ..wire.keys import MAX_DEPTH, depth


def strict_json(body: bytes) -> Any:
    """Read a JSON text; numbers with a fraction or an exponent become `Decimal`, so that none is rounded.

    Raises `InvalidArguments`, which names the rule and never shows the body, for what is not JSON in UTF-8 and for what
    parsers disagree about or cannot store: duplicate members, NaN, numbers beyond a float, unpaired surrogates,
    U+0000, nesting of more than 100.
    """
    try:
        value = json.loads(
            body.decode(), object_pairs_hook=_members, parse_constant=_constant, parse_float=_number, parse_int=_integer
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


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:  # Python's limit of digits
        raise _refusal("an integer of too many digits") from None


def _check_texts(value: Any) -> None:
    for text in _texts(value):
        if "\0" in text:
            raise _refusal("U+0000 in a text")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise _refusal("an unpaired surrogate in a text")


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
