"""Text without what forges a line, and without the values of rows."""

from __future__ import annotations

import pytest

from idempotency.errors import PermanentError
from idempotency.store.answers import error_fields, error_text
from idempotency.text import one_line, without_values

CANARY = "canary@bank.example"
UNIQUE = 'duplicate key value violates unique constraint "people_email"'


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, \u00e9 too", "plain text, \u00e9 too"),
        ("a\r\nb\tc", "a\\r\\nb\\tc"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("\x9b2J\x07\0", "\\x9b2J\\x07\\x00"),
        # a line separator, and what turns the direction of a line
        ("a\u2028b\u202ec", "a\\u2028b\\u202ec"),
        ("half \ud800", "half \\ud800"),
    ],
)
def test_a_line_holds_nothing_that_a_terminal_obeys(text: str, shown: str) -> None:
    assert one_line(text) == shown
    assert one_line(text).isprintable()


@pytest.mark.parametrize(
    "text",
    [
        f"{UNIQUE}\nDETAIL:  Key (email)=({CANARY}) already exists.",
        f"{UNIQUE}\nDETAIL:  Key (email)=(two\n\nlines {CANARY}) already exists.\n[SQL: INSERT INTO people]",
        f'{UNIQUE}\nDETAIL:  Failing row contains (1, {CANARY}).\nCONTEXT:  COPY people, line 1: "{CANARY}"\nHINT:  none',
        f"{UNIQUE}\n[SQL: INSERT INTO people]\n[parameters: {{'email': '{CANARY}'}}]\n(Background on this error at: u)",
        f"Traceback (most recent call last):\n  File\nUniqueViolation: {UNIQUE}\n  DETAIL:  Key (email)=({CANARY})\n\n"
        f"The above exception was the direct cause of the following exception:\n\nTraceback\nX: [parameters: ({CANARY})]",
    ],
)
def test_what_postgres_and_sqlalchemy_add_to_an_error_is_cut(text: str) -> None:
    text = text.replace("X: [parameters", "X: y\n[parameters")
    assert CANARY in text
    shown = without_values(text)
    assert CANARY not in shown
    assert UNIQUE in shown
    for kept in ("[SQL: INSERT INTO people]", "HINT:  none", "The above exception", "(Background on this error at: u)"):
        assert (kept in shown) == (kept in text)
    assert CANARY not in str(PermanentError(text))
    assert UNIQUE in error_fields(error_text("x", text))["message"]
    assert CANARY not in error_text("x", text)


@pytest.mark.parametrize("text", ["no detail here", "DETAILS: 3\nlines\nof text", "LINE up\nhere\n", "one\n\ntwo"])
def test_other_text_stays_as_it_is(text: str) -> None:
    assert without_values(text) == text


def test_the_line_of_a_statement_is_cut_and_what_follows_it_stays() -> None:
    """Django puts values into a statement before it sends it."""
    said = f"operator does not exist\nLINE 1: SELECT 1 WHERE '{CANARY}' = 1\n                       ^\nHINT:  add casts\nmore"
    assert without_values(said) == "operator does not exist\nHINT:  add casts\nmore"
    assert CANARY not in without_values(repr(ValueError(said)))
