"""Named moments of an attempt at which a test may kill, stop or hold the process. No-ops in production.

hint.left · claimed · body.entered · effect.begun · effect.called · effect.recorded · step.recorded ·
step.committed · finish.written (UPDATE done, COMMIT not sent) · finish.committed · released · relay.selected ·
relay.published · relay.confirmed · relay.marked · dead_letter.stored
"""

from __future__ import annotations

from collections.abc import Callable

Hook = Callable[[str], None]

_hook: Hook | None = None


def crash_point(name: str) -> None:
    """Mark a moment. Does nothing unless a test has installed a hook in this process."""
    if _hook is not None:
        _hook(name)


def install(hook: Hook | None) -> None:
    """Set the hook that every crash point calls; None removes it. For tests only."""
    global _hook
    _hook = hook
