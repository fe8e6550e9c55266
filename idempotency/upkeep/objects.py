"""Delete large results that nothing refers to any more, or never did."""

from __future__ import annotations

from celery import Celery

from ..application import runtime_of
from ..observe.logs import log
from ..settings import DAY
from ..store import objects


def sweep(app: Celery) -> int:
    """Delete what is in `large_results_at` and no record refers to; returns how many.

    Such objects are left by purged or erased records, and by attempts that ended between the put and the commit. Nothing is deleted
    in its first day, or twice the longest run if that is more: an attempt's commit may still come. Lists the whole place,
    so run it a few times a day. What cannot be deleted holds up nothing else. Raises what the store raises: of a
    listing at once, of deletions the first error, at the end.
    """
    runtime = runtime_of(app)
    store, deleted, failed = runtime.settings.large_results_at, 0, None
    if store is None:
        return 0
    for names in store.older(max(DAY, 2 * runtime.settings.longest_run)):
        with runtime.autocommit() as connection:
            unused = objects.unused(connection, names)
        try:
            if unused:
                store.delete(unused)
                deleted += len(unused)
        except Exception as error:
            failed = failed or error
    if deleted:
        log.info("objects_deleted", objects=deleted)
    if failed is not None:
        raise failed
    return deleted
