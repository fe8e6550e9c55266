"""What beat schedules. Plain tasks: the work itself is safe to run any number of times at once."""

from __future__ import annotations

from idempotency import maintenance

from . import app


@app.task(name="maintenance.recover")
def recover() -> int:
    """Release orphaned operations; returns how many."""
    return maintenance.recover(app)


@app.task(name="maintenance.purge")
def purge() -> int:
    """Delete what is past its retention; returns how many records."""
    return maintenance.purge(app)
