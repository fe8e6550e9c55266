"""Check of the place where large results are kept."""

from __future__ import annotations

from ..objects import ObjectStore
from .findings import Finding, Level, ok


def check_objects(store: ObjectStore) -> list[Finding]:
    """Whether it can be listed, which the sweep has to do. Whether it can be written shows with the first large result."""
    try:
        next(store.older(0.0), None)
    except Exception as error:
        what = "no such directory" if isinstance(error, FileNotFoundError) else type(error).__name__
        said = f"does not answer: {what}"  # its text may have an address in it
        return [Finding(Level.REFUSAL, "large results", said, "check idempotency_large_results_at and its place")]
    return [ok("large results", "their place can be read")]
