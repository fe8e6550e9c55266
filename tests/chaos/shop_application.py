"""The worked application (tasks/) in its processes under chaos: it can be killed at any point, and signs its connections."""

from __future__ import annotations

import os

from idempotency.webhooks import tasks as webhooks
from tasks import app as app
from tests.chaos import ledgers
from tests.support import crashing

# Days in production.
webhooks.PAUSES, webhooks.ATTEMPTS, webhooks.BUSY_PAUSE = (0.3, 1.0, 2.0), 4, 1.0  # type: ignore[assignment]

if "CRASH_DIRECTORY" in os.environ:
    crashing.install()
    ledgers.sign_writers()
