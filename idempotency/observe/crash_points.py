"""Named points at which a test may kill, stop or pause the process. No-ops in production. docs/states.md lists them."""

from __future__ import annotations

from collections.abc import Callable

Hook = Callable[[str], None]

_hook: Hook | None = None


def crash_point(name: str) -> None:
    """Call the hook that a test has installed in this process, if any."""
    if _hook is not None:
        _hook(name)


def install(hook: Hook | None) -> None:
    """Set the hook that every crash point calls, or remove it with None. For tests only."""
    global _hook
    _hook = hook
