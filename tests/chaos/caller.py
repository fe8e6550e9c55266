"""`python -m tests.chaos.caller`: calls eagerly, in this process, what others enqueue or send under the same keys.

Every caller makes every call, so that callers meet each other, too: Celery's `apply` for any tenant, and every other
time the plain call of the task, which is for the tenant of the settings.
"""

from __future__ import annotations

import signal
import sys
import time
from typing import Any, NoReturn

from sqlalchemy import Row, text
from sqlalchemy.exc import DBAPIError

from idempotency.application import runtime_of
from tests.chaos.application import TENANT, app

# What was made before that had its calls before this process started.
RECENT = 20
POLL = 0.1

_CALLS = text("SELECT id, task, tenant, arguments FROM calls WHERE id > :last ORDER BY id LIMIT 20")
_LATEST = text("SELECT coalesce(max(id), 0) FROM calls")


def main() -> NoReturn:
    """Call until told to end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    last: int | None = None
    while True:
        calls: list[Row[Any]] = []
        try:
            with runtime_of(app).autocommit() as connection:
                last = connection.execute(_LATEST).scalar_one() - RECENT if last is None else last
                calls = list(connection.execute(_CALLS, {"last": last}))
        except DBAPIError:
            pass  # away; it comes back
        for call in calls:
            last = call.id
            _call(call)
        time.sleep(POLL)


def _call(call: Row[Any]) -> None:
    task = app.tasks[call.task]
    try:
        if call.tenant == TENANT and call.id % 2:
            task(**call.arguments)
            said = "returned"
        else:
            said = task.apply(kwargs=call.arguments, tenant=call.tenant).state
    except Exception as error:  # busy, failed, deferred: every answer that a caller may get
        said = type(error).__name__
    print(f"{call.task} {call.tenant} {call.arguments['number']}: {said}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
