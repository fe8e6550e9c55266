"""Text as Postgres stores it, as a log shows it, and without the values of rows."""

from __future__ import annotations

import re

# As long as a name may be in a table and on a screen, in characters.
NAME_LIMIT = 255
# What Postgres says below its first line, and SQLAlchemy below the statement, as an error's text has it: up to the next part of
# the text, or of the traceback that it is in. DETAIL quotes the row, CONTEXT the line of a COPY, the other the parameters; LINE
# is one of the statement, with values where the client has put them into it, and below it a mark.
_VALUES = re.compile(
    r"^[^\S\n]*(?:DETAIL:|CONTEXT:|\[parameters: ).*?"
    r"(?=^[^\S\n]*(?:HINT:|LINE \d+:|\[SQL|\(Background on|The above|During handling|Traceback)|\Z)"
    r"|^[^\S\n]*LINE \d+:[^\n]*(?:\n[^\S\n]*\^[^\S\n]*$)?\n?"
    # the same where the text is quoted, as in the repr of an error
    r"|\\n(?:DETAIL:|CONTEXT:|LINE \d+:|\[parameters: )[^\n]*",
    re.DOTALL | re.MULTILINE,
)


def storable(text: str) -> str:
    """The text without what Postgres refuses: U+FFFD for a NUL, "?" for half of a surrogate pair."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def one_line(text: str) -> str:
    """The text with every character escaped that is not printable: no line break, nothing that a terminal would obey."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def without_values(text: str) -> str:
    """The text of a database's error, alone or in a traceback, without the values of rows and parameters."""
    if not any(each in text for each in ("DETAIL:", "CONTEXT:", "LINE ", "[parameters: ")):
        return text
    return shown.rstrip("\n") if (shown := _VALUES.sub("", text)) != text else text


def number_of(number: int, one: str, many: str | None = None) -> str:
    """A number with its word: `1 letter`, `2,000 letters`, `3 processes`."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


def attempts_made(attempts: int, spent_at: int | None) -> str:
    """How often an operation has been tried, as a record counts it: `3 attempts`, `3 attempts, and 1 claim to end it`.

    `spent_at`: the first claim that has found all attempts used up. It and later ones begin nothing new, so they are none.
    """
    begun = attempts if spent_at is None else min(attempts, spent_at - 1)
    ending = "" if attempts == begun else f", and {number_of(attempts - begun, 'claim')} to end it"
    return f"{number_of(begun, 'attempt')}{ending}"


# In the place of a value that is a customer's.
MASK = "•••"


def masked(value: object) -> str:
    """The kind of a value, with nothing of the value."""
    match value:
        case None | bool():
            return MASK
        case str():
            return f"{MASK} text"
        case int() | float():
            return f"{MASK} number"
        case list() | tuple():
            return f"{MASK} list of {len(value)}"
        case dict():
            return f"{MASK} object of {len(value)}"
    return MASK
