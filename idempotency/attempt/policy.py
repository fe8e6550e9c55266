"""What a task says about how its attempts end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..settings import Settings
from .conclusions import OnFailed


@dataclass(frozen=True, slots=True)
class Policy:
    """A task's options about how its attempts end, with the settings as defaults. Retentions in seconds."""

    max_attempts: int
    retention_completed: float
    retention_failed: float
    provider_key_retention: float
    provider_keeps_refusals: bool = True
    permanent_errors: tuple[type[BaseException], ...] = ()
    on_failed: OnFailed | None = None

    @classmethod
    def by_settings(cls, settings: Settings) -> Policy:
        """The policy of a task that sets no option."""
        return cls(
            settings.max_attempts,
            settings.retention_completed,
            settings.retention_failed,
            settings.provider_key_retention,
        )

    @classmethod
    def of(cls, task: Any, settings: Settings) -> Policy:
        return cls(
            task.max_attempts or settings.max_attempts,
            task.retention_completed or settings.retention_completed,
            task.retention_failed or settings.retention_failed,
            settings.provider_key_retention if task.provider is None else task.provider.keeps_keys_for,
            task.provider is None or task.provider.keeps_refusals,
            tuple(task.permanent_errors),
            task.on_failed,
        )
