"""The application of the controls' workers: that of `tests.support.bank`, without the safeguards that $WITHOUT names.

WITHOUT=fence celery -A tests.controls.app worker
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from celery import Celery

from idempotency.checks import queues
from idempotency.observe import crash_points
from tests.chaos import ledgers
from tests.controls.safeguards import remove
from tests.support import bank, crashing

app: Celery = bank.app

# Small, so that a poison message reaches it soon; a worker refuses to start with less than 20 unless that is allowed.
DELIVERY_LIMIT = 2
# No value means "no limit" in all versions of RabbitMQ.
NO_LIMIT = 1_000_000


def configure(environment: dict[str, str]) -> None:
    """Point the application at one control's servers, with the queue it asks for."""
    bank.configure(environment)
    for queue in app.amqp.queues.values():
        unlimited = "delivery_limit" in environment["WITHOUT"].split(",")
        queue.queue_arguments["x-delivery-limit"] = NO_LIMIT if unlimited else DELIVERY_LIMIT
        if "MAX_LENGTH" in environment:
            queue.queue_arguments["x-max-length"] = int(environment["MAX_LENGTH"])


def kill_always(point: str) -> None:
    """Die at $KILL_ALWAYS every time, after a mark for the count."""
    if point == os.environ["KILL_ALWAYS"]:
        with (Path(os.environ["CRASH_DIRECTORY"]) / "killed").open("a") as marks:
            marks.write("x")
        os.kill(os.getpid(), signal.SIGKILL)
    crashing.reach(point)


if "WITHOUT" in os.environ:
    setattr(queues, "DELIVERY_LIMIT", DELIVERY_LIMIT)  # noqa: B010 - a name that the module only imports
    remove(name for name in os.environ["WITHOUT"].split(",") if name)
    configure(dict(os.environ))
    ledgers.sign_writers()
    if "KILL_ALWAYS" in os.environ:
        crash_points.install(kill_always)
