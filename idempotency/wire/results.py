"""A result as stored text, which every duplicate gets byte for byte."""

from __future__ import annotations

from typing import Any

from ..errors import InvalidResult
from . import encoding


def to_text(value: Any, *, limit: int, what: str = "result") -> str:
    """Encode a value as JSON like Celery's results. Raises `InvalidResult`, which names the type or the size."""
    try:
        text = encoding.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidResult(f"{what}: must be JSON, got {type(value).__name__} ({type(error).__name__})") from None
    if len(text) > limit:
        raise InvalidResult(f"{what}: at most {limit} bytes, got {len(text)}")
    return text


def from_text(text: str) -> Any:
    """Decode a stored value."""
    return encoding.loads(text)
