"""The worked application (tasks/) in its processes under chaos: it can be killed at any point, and signs its connections."""

from __future__ import annotations

import os

from tasks import app as app
from tests.chaos import ledgers
from tests.support import crashing

if "CRASH_DIRECTORY" in os.environ:
    crashing.install()
    ledgers.sign_writers()
