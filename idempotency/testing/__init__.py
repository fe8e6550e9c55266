"""For the tests of an application. The fixtures are in the plugin, `idempotency_pytest`; docs/testing.md explains them.

`AssertIdempotent`: is this task idempotent? It runs once plainly. Then, each time on a fresh state, it is killed at every
crash point, delivered again, overtaken by another attempt, and left without an answer to its COMMIT. In the end, the
database and the outside world must have seen what they saw of the plain run.

`Outbox` runs what a test has enqueued, in the test's process; `rolled_back` and `joined` let that happen inside the
test's own transaction; `prepare` migrates the test database. They need no pytest.
"""

from ..errors import NotIdempotent
from .check import AssertIdempotent, Checked
from .database import prepare
from .inline import Enqueued, Outbox, Ran
from .recording import Call, RecordingServer
from .transaction import joined, rolled_back

__all__ = [
    "AssertIdempotent",
    "Call",
    "Checked",
    "Enqueued",
    "NotIdempotent",
    "Outbox",
    "Ran",
    "RecordingServer",
    "joined",
    "prepare",
    "rolled_back",
]
