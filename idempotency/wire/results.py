"""A result as stored text, which every duplicate gets byte for byte."""

from __future__ import annotations

from typing import Any

from ..errors import InvalidResult, ResultErased
from . import encoding

# In the place of a result that was erased: JSON that `to_text` never makes, and that older code reads as null.
ERASED = " null"


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
    """Decode a stored value. Raises `ResultErased`."""
    if text == ERASED:
        raise ResultErased("the operation was carried out once; its data has been erased since")
    return encoding.loads(text)
