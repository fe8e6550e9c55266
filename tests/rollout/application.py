"""The application of a rollout, in each of its releases: that of the chaos suite, with a lease of the run's own.

This file stands beside older code, too, and names nothing of it that is younger.
"""

from __future__ import annotations

import os
from typing import Any, NoReturn

from tests.chaos import application

app = application.app
# Code whose bodies raise, as a bad release's do.
BAD, BROKEN = "bad", "a bad release"


def configure(lease: float) -> None:
    """Give the application the run's lease."""
    app.conf.update(idempotency_lease=lease, idempotency_heartbeat=lease / 4)


def _broken(*_: Any) -> NoReturn:
    raise RuntimeError(BROKEN)


if "ROLLOUT_LEASE" in os.environ:
    configure(float(os.environ["ROLLOUT_LEASE"]))
    if os.environ.get("ROLLOUT_RELEASE") == BAD:
        application._write_last = _broken  # type: ignore[assignment]
