"""Text as Postgres stores it."""

from __future__ import annotations

# As long as a name may be in a table and on a screen, in characters.
NAME_LIMIT = 255


def storable(text: str) -> str:
    """The text without what Postgres refuses: U+FFFD for a NUL, "?" for half of a surrogate pair."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()
