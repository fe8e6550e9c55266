"""What a saga's code may not ask for: such code stops the saga, as code that does not fit does, instead of undoing it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import CallRefused, Misuse


@contextmanager
def raised_as_misuse() -> Iterator[None]:
    """What is refused in here is refused because of the code, not because of the data: raised as `Misuse`."""
    try:
        yield
    except Misuse:
        raise
    except CallRefused as refused:
        raise Misuse(str(refused)) from refused
