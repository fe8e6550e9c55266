"""What each store promises, in words, and which tests show it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

T = TypeVar("T", bound=Callable[..., Any])


def promise(words: str) -> Callable[[T], T]:
    """Mark a test as one that shows a promise."""
    return pytest.mark.promise(words)
