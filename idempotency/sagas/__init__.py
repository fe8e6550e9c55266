"""Sagas: tasks that call others, wait for events, and are undone if they fail."""

from .calls import Call, call
from .observing import observe
from .task import SagaTask, saga

__all__ = ["Call", "SagaTask", "call", "observe", "saga"]
