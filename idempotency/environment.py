"""The environment variables that the library reads. Everything else is in Celery's configuration."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings


class Environment(BaseSettings):
    """The variables, by their names in lower case."""

    # The directory in which the processes of one host count together (prometheus-client's multiprocess mode).
    prometheus_multiproc_dir: Path | None = None
    # Proves who runs an operator's command. An argument would end up in the shell's history and the process list.
    token: SecretStr | None = Field(None, validation_alias="IDEMPOTENCY_TOKEN")


def environment() -> Environment:
    """Read the environment as it is now."""
    return Environment(_env_ignore_empty=True)
