"""Sagas: tasks that call others, wait for events, and are undone if they fail.

Read `task._body`, then `attempt.SagaAttempt.step` and `wait`, `journal.Journal.next`, `waits.wait`, `compensation.run`; and what
wakes a saga in the database: `signal_saga` and `end_of_operation` in migration 0014.
"""

from ..errors import CallFailed
from .calls import Call, call
from .observing import observe
from .task import SagaTask, saga

__all__ = ["Call", "CallFailed", "SagaTask", "call", "observe", "saga"]
