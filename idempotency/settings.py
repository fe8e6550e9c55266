"""The settings, their defaults, and the rules between them.

They live in Celery's configuration under `idempotency_`, so that an application has one place to configure:
`idempotency_lease = 30`. Durations are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Self

import redis
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from .errors import CallRefused, SettingsError
from .wire.keys import check_key

PREFIX = "idempotency_"
HOUR = 3600.0
DAY = 24 * HOUR
NOT_AN_ADDRESS = "not an address"


def _web_address(value: SecretStr) -> SecretStr:
    if not value.get_secret_value().startswith(("https://", "http://")):
        raise ValueError("must begin with https:// or http://")
    return value


def _database_address(value: SecretStr) -> SecretStr:
    try:
        driver = make_url(value.get_secret_value()).get_dialect().driver
    except (ArgumentError, ValueError):
        raise ValueError(NOT_AN_ADDRESS) from None  # their texts show parts of it
    if driver != "psycopg":
        raise ValueError("must be of Postgres with the driver psycopg")
    return value


def _redis_address(value: SecretStr) -> SecretStr:
    try:
        redis.Redis.from_url(value.get_secret_value()).close()  # connects to nothing
    except ValueError:
        raise ValueError(NOT_AN_ADDRESS) from None
    return value


def _key(value: str) -> str:
    try:
        return check_key(value, field="tenant")
    except CallRefused as error:
        raise ValueError(str(error)) from None


class Settings(BaseModel):
    """What an application may set. Every duration is in seconds, every size in bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False)

    # A Postgres URL in SQLAlchemy's form; the tables of the promise and of the business share one database.
    database_url: Annotated[SecretStr, AfterValidator(_database_address)]
    # Redis saves work and decides nothing; without an address every claim goes to Postgres alone.
    redis_url: Annotated[SecretStr, AfterValidator(_redis_address)] | None = None
    # Scopes every key when a call names no tenant.
    tenant: Annotated[str, AfterValidator(_key)] = "default"

    # How long a claim is respected without renewal. Long enough to outlast a garbage collection or a busy
    # machine, short enough that a dead holder on another host is replaced within about a minute.
    lease: float = Field(60.0, gt=0)
    # Two renewals may fail before a lease runs out.
    heartbeat: float = Field(20.0, gt=0)
    # The longest one attempt is renewed: a hung body must not hold for ever. Default: 10 leases.
    max_run: float | None = Field(None, gt=0)
    # How often a relay looks for messages that the broker has lost; it looks for orphaned operations every 2 s.
    sweep: float = Field(15.0, gt=0)
    # How long after its publish an operation without a trace may be sent again; doubles each time, up to an hour.
    # Only what its queue lacks is sent, so this is about patience, not about load.
    resend_after: float = Field(60.0, gt=0)
    # For about how long a duplicate with on_busy="wait" keeps coming back for the result.
    wait: float = Field(30.0, ge=0)

    # How long a message that no worker took, without a visible defect, comes back before its operation ends: longer
    # than a deploy in which old workers meet tasks that only the new ones know.
    unknown_task_grace: float = Field(HOUR, ge=0)

    max_attempts: int = Field(5, ge=1)
    # Exponential back-off with full jitter: uniform between 0 and min(retry_cap, retry_base * 2 ** (attempt - 1)).
    retry_base: float = Field(1.0, ge=0)
    retry_cap: float = Field(300.0, ge=0)
    # Deferrals use no attempt, so time has to bound them, and below what the provider keeps a key for.
    defer_budget: float = Field(12 * HOUR, gt=0)
    # How long the provider keeps an idempotency key. Stripe: at least 24 hours (docs.stripe.com/api/idempotent_requests).
    provider_key_retention: float = Field(24 * HOUR, gt=0)

    # A bug made on Friday evening is still there on Monday.
    retention_completed: float = Field(72 * HOUR, gt=0)
    retention_failed: float = Field(30 * DAY, gt=0)
    # The latest moment at which a message may still be delivered: the longest backlog, delay or dead-letter stay.
    redelivery_horizon: float = Field(24 * HOUR, gt=0)

    # Messages and records carry references, not documents. RabbitMQ accepts 16 MiB by default.
    result_limit: int = Field(256 * 1024, gt=0)
    arguments_limit: int = Field(1024 * 1024, gt=0)

    # Redis may save a round trip; it may not cost more than this when it hangs.
    redis_timeout: float = Field(0.1, gt=0)
    redis_pause: float = Field(5.0, ge=0)
    # Connections kept per process for bodies, and as many for claims; each pool may double. The heartbeat has its own.
    pool_size: int = Field(10, ge=1)

    # Names this application in dead letters, alerts and reports. Default: the Celery application's name.
    service: str = Field("celery", min_length=1, max_length=255)
    # Where alerts are posted as {"text": ...}, which is what Slack's incoming webhooks take. Default: log and metric only.
    alert_webhook_url: Annotated[SecretStr, AfterValidator(_web_address)] | None = None
    # A service and reason that goes on failing alerts once in so many seconds, with a count.
    alert_interval: float = Field(60.0, gt=0)
    # An alarm of its own when a service has more open dead letters than this.
    alert_open_letters: int = Field(100, ge=1)
    # How often a worker, a relay or a beat writes its sign of life: one small row each, by a thread of its own.
    sign_of_life: float = Field(10.0, gt=0)
    # A process that is silent for longer is an alarm. Two signs at least may fail: Postgres restarts, a host swaps.
    alarm_silence: float = Field(60.0, gt=0)
    # How long a process that has fallen silent is remembered: a working day and its night.
    retention_processes: float = Field(DAY, gt=0)
    # A queue that has work and no consumers for longer is an alarm. Longer than a restart of all workers takes.
    alarm_unconsumed: float = Field(60.0, ge=0)
    # The oldest operation that was accepted, is due and has not begun for longer than this is an alarm.
    alarm_accepted: float = Field(300.0, gt=0)
    # The alert's receiver may not hold up more than this.
    alert_timeout: float = Field(3.0, gt=0)
    # Who gets the weekly report, and by which server (smtp://[user:password@]host:port, or smtps://).
    report_mail_to: str | None = None
    report_mail_from: str = "idempotency@localhost"
    report_smtp_url: SecretStr = SecretStr("smtp://127.0.0.1:25")
    # How long a closed dead letter is kept.
    retention_dead_letters: float = Field(30 * DAY, gt=0)

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.heartbeat >= self.lease / 2:
            raise ValueError(f"heartbeat must be below half the lease: heartbeat={self.heartbeat} lease={self.lease}")
        if self.retry_base > self.retry_cap:
            raise ValueError(f"retry_base must not exceed retry_cap: {self.retry_base} > {self.retry_cap}")
        for name in ("retention_completed", "retention_failed"):
            retention = getattr(self, name)
            if retention < self.redelivery_horizon:
                raise ValueError(
                    f"{name} must outlive the redelivery horizon: {name}={retention} "
                    f"redelivery_horizon={self.redelivery_horizon}"
                )
        if self.defer_budget >= self.provider_key_retention:
            raise ValueError(
                f"defer_budget must stay below what the provider keeps a key for: defer_budget={self.defer_budget} "
                f"provider_key_retention={self.provider_key_retention}"
            )
        if self.alarm_silence < 3 * self.sign_of_life:
            raise ValueError(
                f"alarm_silence must be at least three times sign_of_life: alarm_silence={self.alarm_silence} "
                f"sign_of_life={self.sign_of_life}"
            )
        if self.retention_processes <= self.alarm_silence:
            raise ValueError(
                f"retention_processes must outlast alarm_silence: retention_processes={self.retention_processes} "
                f"alarm_silence={self.alarm_silence}"
            )
        if self.longest_run < self.lease:
            raise ValueError(f"max_run must not be shorter than the lease: max_run={self.max_run} lease={self.lease}")
        return self

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """The settings with these values, named without the prefix.

        Raises `SettingsError`: one line per problem, naming the setting and, where two disagree, both values; never
        a URL or a password.
        """
        try:
            return cls(**given)
        except ValidationError as error:
            problems = error.errors(include_url=False, include_context=False, include_input=False)
            raise SettingsError("\n".join(map(_described, problems))) from None

    @property
    def database_name(self) -> str:
        """Which database it is, without who connects: `host:port/name`."""
        url = make_url(self.database_url.get_secret_value())
        return f"{url.host}:{url.port}/{url.database}"

    @property
    def longest_run(self) -> float:
        """Seconds for which one attempt is renewed."""
        return self.max_run or 10 * self.lease


def _described(problem: Any) -> str:
    field = PREFIX + ".".join(map(str, problem["loc"])) if problem["loc"] else "settings"
    said = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        near = get_close_matches(str(problem["loc"][0]), Settings.model_fields, n=1)
        said = "no such setting" + "".join(f"; did you mean {PREFIX}{name}?" for name in near)
    return f"{field}: {said}"
