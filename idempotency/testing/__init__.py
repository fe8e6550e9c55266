"""For the tests of an application: is this task idempotent? The fixtures are in the plugin, `idempotency_pytest`.

A task runs once plainly. Then, each time on a fresh state, it is killed at every crash point, delivered again, overtaken
by another attempt, and left without an answer to its COMMIT. In the end, the database and the outside world must have
seen what they saw of the plain run.
"""

from ..errors import NotIdempotent
from .check import AssertIdempotent, Checked
from .recording import Call, RecordingServer

__all__ = ["AssertIdempotent", "Call", "Checked", "NotIdempotent", "RecordingServer"]
