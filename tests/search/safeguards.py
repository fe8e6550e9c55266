"""Safeguards that a search can do without: each is taken away in this process, in the style of `tests/controls`.

Name, and how its removal changes the library's statements or functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.controls.safeguards import Removal, fence

SAFEGUARDS: dict[str, Callable[[Removal], None]] = {"fence": fence}


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Search without these safeguards."""
    removal = Removal()
    try:
        for name in names:
            SAFEGUARDS[name](removal)
        yield
    finally:
        removal.undo()
