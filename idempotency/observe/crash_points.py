"""Named points at which a test may kill, stop or pause the process. No-ops in production.

hint.left · claimed · body.entered · effect.begun · effect.called · effect.recorded · step.recorded ·
step.committed · result.put · finish.written (UPDATE done, COMMIT not sent) · finish.committed · released · relay.selected ·
relay.published · relay.confirmed · relay.marked · dead_letter.stored · partition.cleared · store.recording · store.recorded (of a
DeduplicatedTask: before and after the write that ends it) · stream.assigned · stream.fetched · stream.run (the bodies) ·
stream.recorded · stream.advanced (COMMIT not sent) · stream.committed · stream.copied (to the broker) · stream.given_up
"""

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
