"""Text that Postgres stores as it is."""

from __future__ import annotations

import pytest

from idempotency.text import storable


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ("", ""),
        ("naïve café €", "naïve café €"),
        ("a\0b", "a\ufffdb"),
        ("a\ud800b", "a?b"),
        ("\U0001f600", "\U0001f600"),
        ("\0\udfff\0", "\ufffd?\ufffd"),
    ],
)
def test_what_postgres_refuses_is_replaced(text: str, stored: str) -> None:
    assert storable(text) == stored
    assert storable(stored) == stored
