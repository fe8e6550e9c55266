"""What `NotIdempotent` says of a difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..errors import NotIdempotent
from .differences import Difference, Left, Masked, first_difference


class Comparison:
    """Compares what scenarios leave with what the plain run left."""

    def __init__(self, title: str, plain: Left, ignored: Masked, not_compared: Sequence[str]) -> None:
        self._title, self._plain, self._ignored, self._not_compared = title, plain, ignored, not_compared

    def __call__(self, name: str, left: Left, *, in_doubt: bool = False, hint: str | None = None) -> None:
        """Raise `NotIdempotent` at the first difference. `hint` replaces that of the difference."""
        __tracebackhide__ = True
        difference = first_difference(self._plain, left, self._ignored, in_doubt=in_doubt)
        if difference is not None:
            if hint is not None:
                difference = replace(difference, hint=hint)
            raise NotIdempotent(report(self._title, name, difference, self._not_compared))


def report(title: str, scenario: str, difference: Difference, not_compared: Sequence[str]) -> str:
    lines = [
        f"{title} is not idempotent",
        "",
        f"    Scenario:  {scenario}",
        f"    Where:     {difference.where}",
        f"    Expected:  {difference.expected}",
        f"    Seen:      {difference.seen}",
        f"    Usually:   {difference.hint}",
    ]
    if not_compared:
        lines.append(f"    Not compared, because two plain runs differ in it: {', '.join(not_compared)}")
    return "\n".join(lines)
