"""Delete large results that nothing refers to any more, or never did."""

from __future__ import annotations

import time

from celery import Celery

from ..application import runtime_of
from ..attempt.runtime import Runtime
from ..observe.logs import log
from ..settings import DAY
from ..store import objects

# Seconds between two looks at what has not ended.
PAUSE = 1.0


def sweep(app: Celery) -> int:
    """Delete what is in `large_results_at` and no record refers to; returns how many.

    Such objects are left by purged or erased records, and by attempts that ended between the put and the commit. Nothing is
    deleted in its first day, or twice the longest run if that is more: an attempt's commit may still come. One that has come
    may wait for a standby, for days, and is not seen meanwhile; so what is open when the first such object is found has to end,
    or nothing is deleted, and the next sweep tries again. Lists the whole place, so run it a few times a day. What cannot be
    deleted holds up nothing else. Raises what the store raises: the first error of a listing, else of a deletion, once all else
    is done.
    """
    runtime = runtime_of(app)
    store, is_sure, deleted, failed = runtime.settings.large_results_at, False, 0, None
    if store is None:
        return 0
    try:
        for names in store.older(max(DAY, 2 * runtime.settings.longest_run)):
            unused = _unused(runtime, names)
            if unused and not is_sure:
                if not _all_end(runtime):
                    log.warning("objects_not_swept", error="a transaction is open for longer than any attempt")
                    return 0
                is_sure, unused = True, _unused(runtime, unused)
            try:
                if unused:
                    store.delete(unused)
                    deleted += len(unused)
            except Exception as error:
                failed = failed or error
    finally:
        if deleted:
            log.info("objects_deleted", objects=deleted)
    if failed is not None:
        raise failed
    return deleted


def _unused(runtime: Runtime, names: list[str]) -> list[str]:
    with runtime.autocommit() as connection:
        return objects.unused(connection, names)


def _all_end(runtime: Runtime) -> bool:
    """Wait until all transactions have ended that are open now. False: one takes longer than any attempt."""
    until = time.monotonic() + runtime.settings.longest_run
    with runtime.autocommit() as connection:
        last = objects.last_begun(connection)
    while True:
        with runtime.autocommit() as connection:
            if objects.have_ended(connection, last):
                return True
        if time.monotonic() > until:
            return False
        time.sleep(PAUSE)
