"""The library in a Django project: add "idempotency.contrib.django" to INSTALLED_APPS.

    from idempotency.contrib.django import IdempotentTask

Names are imported when they are used: Django imports this package before its settings may be read.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .task import IdempotentTask, idempotent_task, publish

__all__ = ["IdempotentTask", "idempotent_task", "publish"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".task", __name__), name)
