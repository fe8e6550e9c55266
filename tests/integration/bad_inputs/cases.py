"""Tables of cases, named by their numbers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.refused_messages import SECRET


def cases(table: dict[str, Any]) -> list[Any]:
    """The rows of a table as pytest takes them."""
    return [pytest.param(*(row if isinstance(row, tuple) else (row,)), id=name) for name, row in table.items()]


def nested(depth: int) -> Any:
    value: Any = SECRET
    for _ in range(depth):
        value = [value]
    return value
