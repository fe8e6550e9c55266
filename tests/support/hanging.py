"""The bank, whose workers hang in their main loop while the file HANG exists, and count as hung after two seconds."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from celery.signals import task_received

from idempotency.upkeep import presence
from tests.support.bank import app as app

presence.LONGEST_TURN = 2.0


def hang(**_: Any) -> None:
    while Path(os.environ["HANG"]).exists():
        time.sleep(0.05)


task_received.connect(hang, weak=False)
