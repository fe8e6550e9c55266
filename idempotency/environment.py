"""The environment variables that the library reads. Everything else is in Celery's configuration."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings


class Environment(BaseSettings):
    """The variables, by their names in lower case."""

    # The directory in which the processes of one host count together (prometheus-client's multiprocess mode).
    prometheus_multiproc_dir: Path | None = None
    # The application that a command is about, if `-A` does not say it; Celery's own variable.
    celery_app: str | None = None
    # Proves who runs an operator's command. An argument would end up in the shell's history and the process list.
    token: SecretStr | None = Field(None, validation_alias="IDEMPOTENCY_TOKEN")
    # The cell that this process serves, for `use_cells`.
    cell: str | None = Field(None, validation_alias="IDEMPOTENCY_CELL")
    # With what the roles of `migrate --roles` may log in. A role without one keeps the password that it has, if any.
    idempotency_owner_password: SecretStr | None = None
    idempotency_application_password: SecretStr | None = None
    idempotency_relay_password: SecretStr | None = None
    idempotency_operator_password: SecretStr | None = None
    idempotency_read_only_password: SecretStr | None = None
    # Those of the users of `broker-users`. A user without one is left out.
    broker_application_password: SecretStr | None = Field(
        None, validation_alias="IDEMPOTENCY_BROKER_APPLICATION_PASSWORD"
    )
    broker_worker_password: SecretStr | None = Field(None, validation_alias="IDEMPOTENCY_BROKER_WORKER_PASSWORD")
    broker_relay_password: SecretStr | None = Field(None, validation_alias="IDEMPOTENCY_BROKER_RELAY_PASSWORD")
    broker_beat_password: SecretStr | None = Field(None, validation_alias="IDEMPOTENCY_BROKER_BEAT_PASSWORD")
    broker_flower_password: SecretStr | None = Field(None, validation_alias="IDEMPOTENCY_BROKER_FLOWER_PASSWORD")
    broker_stream_password: SecretStr | None = Field(None, validation_alias="IDEMPOTENCY_BROKER_STREAM_PASSWORD")
    broker_monitor_password: SecretStr | None = Field(None, validation_alias="IDEMPOTENCY_BROKER_MONITOR_PASSWORD")
    redis_hints_password: SecretStr | None = Field(None, validation_alias="IDEMPOTENCY_REDIS_HINTS_PASSWORD")


def role_passwords() -> dict[str, str]:
    """The passwords of database roles that are given, by the role's name."""
    return {f"idempotency_{role}": password for role, password in _passwords("idempotency_").items()}


def broker_passwords() -> dict[str, str]:
    """The passwords of RabbitMQ's users that are given, by kind of process."""
    return _passwords("broker_")


def redis_password() -> str | None:
    """The password of Redis' user for hints."""
    return _passwords("redis_").get("hints")


def _passwords(prefix: str) -> dict[str, str]:
    given = environment()
    return {
        name.removeprefix(prefix).removesuffix("_password"): password.get_secret_value()
        for name in Environment.model_fields
        if name.startswith(prefix) and name.endswith("_password") and (password := getattr(given, name)) is not None
    }


def environment() -> Environment:
    """Read the environment as it is now."""
    return Environment(_env_ignore_empty=True)
