"""The key of a request: the header `Idempotency-Key`, as in draft-ietf-httpapi-idempotency-key-header.

The draft writes it as a string of RFC 8941, in double quotes; most clients send it bare. Both name the same key:
`Idempotency-Key: "a-1"` and `Idempotency-Key: a-1`. A bare key cannot have a comma, which joins two headers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..errors import InvalidKey
from ..wire.keys import check_key
from .asgi import Scope
from .problems import refused

FIELD = "Idempotency-Key"
_NAME = FIELD.lower().encode()
_BLANKS = " \t"
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


def key_of(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The key that a request's headers give; None if there is no such header.

    Raises `InvalidKey`, which names the rule and the position, and never shows the key.
    """
    given = [value for name, value in headers if name.lower() == _NAME]
    if not given:
        return None
    if len(given) > 1:
        raise InvalidKey(f"{FIELD}: one header at most, got {len(given)}")
    # every byte is a character, so that positions are those of the header
    text = given[0].decode("latin-1").strip(_BLANKS)
    return check_key(_quoted(text) if text.startswith('"') else _bare(text), field=FIELD)


def checked_key(scope: Scope) -> str | None:
    """The key of a request; None if it has none. Raises `Refused`: 400."""
    try:
        return key_of(scope["headers"])
    except InvalidKey as error:
        raise refused(400, "idempotency_key_invalid", f"{FIELD} is malformed", str(error)) from None


def _bare(text: str) -> str:
    if (position := text.find(",")) >= 0:
        raise InvalidKey(f"{FIELD}: one key, not a list: a comma at position {position}; quote a key that has one")
    return text


def _quoted(text: str) -> str:
    """The value of a string of RFC 8941: only a quote and a backslash are escaped, each with a backslash."""
    position = 1
    while position < len(text) and text[position] != '"':
        if text[position] == "\\":
            position += 1
            if text[position : position + 1] not in ('"', "\\"):
                raise InvalidKey(
                    f"{FIELD}: a backslash before neither a quote nor a backslash at position {position - 1}"
                )
        position += 1
    if position >= len(text):
        raise InvalidKey(f"{FIELD}: no quote at its end")
    if position != len(text) - 1:
        raise InvalidKey(f"{FIELD}: one key, not a list and without parameters: it goes on at position {position + 1}")
    return _ESCAPED.sub(r"\1", text[1:position])
