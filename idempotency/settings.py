"""The settings, their defaults, and the rules between them.

They are part of Celery's configuration, prefixed with `idempotency_`: `idempotency_lease = 30`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FilePath,
    InstanceOf,
    SecretStr,
    ValidationError,
    model_validator,
)
from sqlalchemy.orm import Session

from . import setting_values as values
from .cells import Cell, CellOfSetting, check_agree, which
from .errors import SettingsError, WrongCell
from .hosts import check_hosts
from .objects import ObjectStore, are_one_place
from .setting_values import StoreAddress, WebAddress
from .wire.results import LONGEST as LONGEST_RESULT

PREFIX = "idempotency_"
HOUR = 3600.0
DAY = 24 * HOUR


class Settings(BaseModel):
    """What an application may set. Durations are in seconds, sizes in bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False)

    # A SQLAlchemy URL. The library's tables and the application's must be in one database to share transactions.
    database_url: Annotated[SecretStr, AfterValidator(values.database_address)]
    # Called instead of SQLAlchemy's create_engine, with the same arguments, and returns the Engine: for passwords that
    # expire, connect arguments, or listeners of your own. Or its name, "yourapp.db:engine".
    engine: Annotated[values.Imported, AfterValidator(values.engine)] | None = None
    # The class of `self.session`: a subclass of Session, or a sessionmaker, whose class and options are used and whose
    # bind is not. Or its name.
    session: Annotated[values.Imported, AfterValidator(values.session)] = Session
    # Redis only saves work; without it, every claim and duplicate goes to Postgres. redis://…, rediss://… or, behind Sentinel,
    # sentinel://[user:password@]host:port[,host:port]/primary, sentinels:// with TLS.
    redis_url: Annotated[SecretStr, AfterValidator(values.redis_address)] | None = None
    # Where a DeduplicatedTask keeps its records: redis://…, rediss://…, sentinel://…, redis+cluster://…, or
    # dynamodb://region/table.
    store: StoreAddress | None = None
    # Where its results go that are too long for a record, as with `large_results_at`, and never the same place: a relay deletes
    # there what Postgres does not refer to. Nothing deletes here.
    store_results_at: Annotated[InstanceOf[ObjectStore] | None, BeforeValidator(values.object_store)] = None
    # How long its key stays failed, for copies of the message that are still on their way; then a new call runs.
    store_retention_failed: float = Field(HOUR, gt=0)
    # Hosts and networks at which Postgres, Redis, the broker and the result backend may be reached in plain text, or over
    # TLS that does not verify them: where the network itself does. From the environment, separated by commas.
    plain_text_hosts: Annotated[tuple[str, ...], BeforeValidator(values.separated), AfterValidator(check_hosts)] = ()
    # The tenant of calls that name none; keys are unique per tenant.
    tenant: Annotated[str, AfterValidator(values.tenant)] = "default"
    # Tenants spread over several databases: what differs in each cell, by its name; which cell a tenant is of, by a mapping, a
    # function or its name; and the one cell that this process serves. `use_cells` takes that from IDEMPOTENCY_CELL.
    cells: dict[str, Cell] = {}
    cell_of: CellOfSetting = None
    cell: str | None = None

    # How long a claim is respected without renewal. Long enough to survive a garbage collection or a busy machine,
    # short enough that a holder that died on another host is replaced within about a minute.
    lease: float = Field(60.0, gt=0)
    # How often a lease is renewed. With the defaults, two renewals may fail before it runs out.
    heartbeat: float = Field(20.0, gt=0)
    # How long one attempt's lease is renewed at most, so that a hung body does not hold it forever. Default: 10 leases.
    max_run: float | None = Field(None, gt=0)
    # How often a relay looks for messages that the broker has lost. (For orphaned operations it looks every 2 s.)
    sweep: float = Field(15.0, gt=0)
    # How long after publishing a message may be resent if it has disappeared; doubles each time, up to an hour.
    # Only messages that have left their queue are resent, so a low value adds little load.
    resend_after: float = Field(60.0, gt=0)
    # About how long a duplicate with on_busy="wait" keeps coming back for the result.
    wait: float = Field(30.0, ge=0)

    # How long a valid message that no worker can run keeps coming back before its operation fails. Longer than a
    # deploy, during which old workers receive tasks that only new ones have.
    unknown_task_grace: float = Field(HOUR, ge=0)

    max_attempts: int = Field(5, ge=1)
    # Exponential back-off with full jitter: between 0 and min(retry_cap, retry_base * 2 ** (attempt - 1)), uniformly.
    retry_base: float = Field(1.0, ge=0)
    retry_cap: float = Field(300.0, ge=0)
    # Deferrals use up no attempts, so they are limited by time, which must be less than the provider keeps a key.
    defer_budget: float = Field(12 * HOUR, gt=0)
    # How long the provider keeps an idempotency key. Stripe: at least 24 hours (docs.stripe.com/api/idempotent_requests).
    provider_key_retention: float = Field(24 * HOUR, gt=0)

    # Long enough that Friday evening's records are still there on Monday.
    retention_completed: float = Field(72 * HOUR, gt=0)
    retention_failed: float = Field(30 * DAY, gt=0)
    # How long the answers to HTTP requests are kept that have no effects and no steps, and requests that died and were not
    # sent again. No message delivers them, so it need not reach the redelivery horizon.
    retention_http: float = Field(24 * HOUR, gt=0)
    # How long an event is kept for sagas that will wait for it, whether one has used it or not.
    retention_events: float = Field(30 * DAY, gt=0)
    # How many keys of HTTP requests a tenant may keep at a time, and about how many bytes with the answers. None: no limit.
    tenant_keys_limit: int | None = Field(None, gt=0)
    tenant_bytes_limit: int | None = Field(None, gt=0)
    # How long after publishing a message may still be delivered: the longest backlog, delay or time as a dead letter.
    redelivery_horizon: float = Field(24 * HOUR, gt=0)

    # Pass references rather than documents. RabbitMQ accepts messages of up to 16 MiB by default.
    result_limit: int = Field(256 * 1024, gt=0)
    # Longer results are compressed, if the extra `zstd` is installed: then install it in whatever reads results. None: never.
    compress_results_above: int | None = Field(64 * 1024, ge=1024)
    # Where results go that are longer than `result_limit`, of up to `large_result_limit` bytes of JSON: file:///a/directory
    # that all processes share, s3://bucket/prefix with the extra `s3`, or an ObjectStore of your own or its name. One
    # database's own: what its records do not refer to is deleted. Default: longer results are refused.
    large_results_at: Annotated[InstanceOf[ObjectStore] | None, BeforeValidator(values.object_store)] = None
    large_result_limit: int = Field(32 * 1024 * 1024, gt=0, le=LONGEST_RESULT)
    arguments_limit: int = Field(1024 * 1024, gt=0)

    # The most that a hung Redis may cost: it is there only to save a round trip.
    redis_timeout: float = Field(0.1, gt=0)
    # How long Redis is left alone after a failure.
    redis_pause: float = Field(5.0, ge=0)
    # Connections kept per process for bodies, and as many for claims; either pool may grow to twice its size. The
    # heartbeat has its own connection.
    pool_size: int = Field(10, ge=1)

    # What messages are signed with: the first signs, each of them is accepted, so that a new one can be added everywhere
    # before it signs. From the environment, separated by commas. Without one, nothing is signed and nothing is checked.
    message_secrets: Annotated[
        tuple[SecretStr, ...], BeforeValidator(values.separated), AfterValidator(values.long_enough)
    ] = ()
    # Until then, messages without a signature are run, too: those that were in flight when signing began.
    unsigned_until: AwareDatetime | None = None
    # Until then, an effect with a `reconcile` asks the provider before its first call: after the restore of a backup.
    ask_first_until: AwareDatetime | None = None

    # Where the brokers of Kafka are: host:port, separated by commas; and what librdkafka is told beside that, as
    # security.protocol.
    kafka_servers: SecretStr | None = None
    kafka_options: dict[str, SecretStr] = {}
    # Streams wait while the slowest standby of Postgres is behind by more, or none is connected. None: they do not look.
    stream_standby_lag: float | None = Field(None, gt=0)

    # Who may operate, and approve what others ask for. A file of people that its owner keeps, or the company's OpenID Connect:
    # the issuer and audience of ID tokens, the issuer's keys (a JWKS, as an https address or a file), and the claim with a
    # person's groups. Default: the people of `operators add`.
    people_file: Path | None = None
    oidc_issuer: WebAddress | None = None
    oidc_audience: str | None = Field(None, min_length=1)
    oidc_keys: Annotated[str, AfterValidator(values.oidc_keys)] | None = None
    oidc_groups: str = Field("groups", min_length=1)
    # The claim with the tenants whose operations a person sees and changes, "*" being all. None: everyone has all.
    oidc_tenants: str | None = Field(None, min_length=1)
    # The page of `idempotency web`: the address at which people reach it, what signs their sessions, for how long one lasts, and
    # the secret of this client at the issuer, if it has one, and what it asks the issuer for. The first two make people log in.
    web_url: WebAddress | None = None
    web_secret: SecretStr | None = Field(None, min_length=values.SECRET_LENGTH)
    web_session: float = Field(HOUR, ge=60, le=DAY)
    web_client_secret: SecretStr | None = None
    web_scope: str = Field("openid", pattern=r"(^| )openid( |$)")
    # Where a provider shows a call by its key: an address with {key} in it, and perhaps {task} and {effect}.
    web_effect_link: Annotated[str, AfterValidator(values.link)] | None = None
    # A function of yours that says which of your rows belong to an operation, "yourapp.page:rows_of". Only the page imports it.
    business_rows: str | None = Field(None, pattern=r"^[\w.]+:\w+$")

    # Whether spans of OpenTelemetry are made. Default: in a process that has set up a tracer provider before it first uses the
    # library. True: also where that comes later. Or a function that sets one up, or its name, "yourapp.telemetry:set_up": it is
    # called once in each process that has something to trace, in a worker's pool after the fork. The provider that it returns is
    # used, or else the global one.
    traces: Annotated[Callable[[], Any] | bool | None, BeforeValidator(values.traces)] = None

    # This application's name on all that it stores and sends. The same in all of its processes, and in no other
    # application on the same database or broker; a queue has it in its name. Default: the Celery application's name.
    service: Annotated[str, AfterValidator(values.service)] = "celery"
    # What a deploy calls its code, as a commit or the tag of an image: on signs of life and dead letters.
    code_version: str | None = Field(None, pattern=r"^[A-Za-z0-9._+-]{1,64}$")
    # Where this runs, as alerts say it: production, staging.
    environment: str | None = Field(None, min_length=1, max_length=100)
    # The address at which you publish docs/runbooks; alerts link to a page there. Default: they have the page's name.
    runbooks_at: str | None = Field(None, min_length=1)
    # Reasons of your own that have a page there; one that ends with _ is about all that begin so.
    own_runbooks: Annotated[tuple[str, ...], BeforeValidator(values.separated)] = ()
    # Where alerts are posted as {"text": ..., "alerts": [...]}, as for Slack's incoming webhooks. Default: log and metric only.
    alert_webhook_url: Annotated[SecretStr, AfterValidator(values.web_address)] | None = None
    # One alert per service and reason in this time, with a count of the new dead letters.
    alert_interval: float = Field(60.0, gt=0)
    # A service with more open dead letters than this raises an alarm.
    alert_open_letters: int = Field(100, ge=1)
    # How often each worker, relay and beat writes its sign of life: one small row, from a separate thread.
    sign_of_life: float = Field(10.0, gt=0)
    # A file in which the process signs, too, for `idempotency alive` beside it: one file for each process.
    sign_of_life_file: Path | None = None
    # A process that is silent for longer raises an alarm. At least two signs may fail first: Postgres may be restarting.
    alarm_silence: float = Field(60.0, gt=0)
    # How long a silent process is remembered.
    retention_processes: float = Field(DAY, gt=0)
    # A queue that has work but no consumers for longer raises an alarm. Allow for a restart of all workers.
    alarm_unconsumed: float = Field(60.0, ge=0)
    # A queue in which an operation has been due for longer without being started raises an alarm.
    alarm_accepted: float = Field(300.0, gt=0)
    # How long to wait for the webhook.
    alert_timeout: float = Field(3.0, gt=0)
    # The recipient of the weekly report, and the server to send it through: smtp://[user:password@]host:port or smtps://.
    report_mail_to: str | None = None
    report_mail_from: str = "idempotency@localhost"
    report_smtp_url: SecretStr = SecretStr("smtp://127.0.0.1:25")
    # Hosts and networks that webhooks to customers may be sent to although they are not public: names, addresses, networks.
    # From the environment, separated by commas.
    webhook_allowed_hosts: Annotated[
        tuple[str, ...], BeforeValidator(values.separated), AfterValidator(check_hosts)
    ] = ()
    # Certificates of authorities that endpoints may have beside those that the system trusts, as PEM.
    webhook_ca_file: FilePath | None = None
    # For one POST, from the look-up of the name to the end of the answer.
    webhook_timeout: float = Field(15.0, gt=0, le=60)
    # An endpoint is disabled once it has accepted nothing for so long, and so many deliveries to it were given up.
    webhook_failed_deliveries: int = Field(3, ge=1)
    webhook_failing_for: float = Field(3 * DAY, ge=0)
    # How long webhooks that were delivered or given up are kept, with their attempts.
    retention_webhooks: float = Field(30 * DAY, gt=0)
    # How long a closed dead letter is kept.
    retention_dead_letters: float = Field(30 * DAY, gt=0)

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.heartbeat >= self.lease / 2:
            raise ValueError(f"heartbeat must be below half of lease: heartbeat={self.heartbeat} lease={self.lease}")
        if self.retry_base > self.retry_cap:
            raise ValueError(
                f"retry_base must not be above retry_cap: retry_base={self.retry_base} retry_cap={self.retry_cap}"
            )
        for name in ("retention_completed", "retention_failed"):
            retention = getattr(self, name)
            if retention < self.redelivery_horizon:
                raise ValueError(
                    f"{name} must not be below redelivery_horizon: {name}={retention} "
                    f"redelivery_horizon={self.redelivery_horizon}"
                )
        if self.retention_http < self.longest_run:
            raise ValueError(
                f"retention_http must not be below max_run, by default ten leases: retention_http={self.retention_http} "
                f"max_run={self.longest_run}"
            )
        if self.defer_budget >= self.provider_key_retention:
            raise ValueError(
                f"defer_budget must be below provider_key_retention: defer_budget={self.defer_budget} "
                f"provider_key_retention={self.provider_key_retention}"
            )
        if self.alarm_silence < 3 * self.sign_of_life:
            raise ValueError(
                f"alarm_silence must be at least three times sign_of_life: alarm_silence={self.alarm_silence} "
                f"sign_of_life={self.sign_of_life}"
            )
        if self.retention_processes <= self.alarm_silence:
            raise ValueError(
                f"retention_processes must be above alarm_silence: retention_processes={self.retention_processes} "
                f"alarm_silence={self.alarm_silence}"
            )
        oidc = [self.oidc_issuer, self.oidc_audience, self.oidc_keys]
        if any(oidc) and not all(oidc):
            raise ValueError("oidc_issuer, oidc_audience and oidc_keys: all of them or none")
        if self.oidc_issuer and self.people_file:
            raise ValueError("people_file and oidc_issuer: one of them, or two names may be one person")
        if bool(self.web_url) != bool(self.web_secret) or (self.web_secret and not self.oidc_issuer):
            raise ValueError("web_url and web_secret: both or neither, and with oidc_issuer, by which people log in")
        for relays in (self.large_results_at, *(cell.large_results_at for cell in self.cells.values())):
            if are_one_place(self.store_results_at, relays):
                raise ValueError(
                    "store_results_at must not be large_results_at, where a relay deletes what it does not know"
                )
        if self.longest_run < self.lease:
            raise ValueError(f"max_run must not be below lease: max_run={self.max_run} lease={self.lease}")
        check_agree(self.cells, self.cell_of, self.cell)
        return self

    @property
    def own_cell(self) -> Cell | None:
        """The cell that this process serves."""
        return None if self.cell is None else self.cells[self.cell]

    def cell_for(self, tenant: str) -> str | None:
        """The cell that a tenant is of; None where there are no cells. Raises `WrongCell` and `SettingsError`."""
        return which(self.cells, self.cell_of, tenant) if self.cells else None

    def check_cell(self, tenant: str) -> None:
        """Raise `WrongCell` for a tenant of another cell than this process serves, or of none."""
        if self.cells and (cell := self.cell_for(tenant)) != self.cell:
            raise WrongCell(f"tenant {tenant!r} is of cell {cell!r}, and this process serves {self.cell!r}")

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """Validate these values, named without the prefix.

        Raises `SettingsError` with one line per problem, which names the setting and, if two conflict, both values;
        never a URL or a password.
        """
        try:
            return cls(**given)
        except ValidationError as error:
            problems = error.errors(include_url=False, include_context=False, include_input=False)
            # what a cell gives is read as its own and as the process's
            of_cells = {each["loc"][2] for each in problems if each["loc"][:1] == ("cells",) and len(each["loc"]) > 2}
            problems = [each for each in problems if len(each["loc"]) != 1 or each["loc"][0] not in of_cells]
            raise SettingsError("\n".join(map(_describe, problems))) from None

    @property
    def database_name(self) -> str:
        """The database as its address has it, `host:port/name`, without credentials; several hosts in whatever order.

        By the address alone: processes of one application have the same name for it, whatever their environment says.
        """
        return values.database_named(self.database_url.get_secret_value())

    @property
    def owner(self) -> str:
        """Database and application, without credentials: whose a hint in Redis is.

        Databases whose addresses read the same must not share a Redis.
        """
        return f"{self.database_name} {self.service}"

    @property
    def longest_run(self) -> float:
        """How long one attempt's lease is renewed at most, in seconds."""
        return self.max_run or 10 * self.lease


def secrets() -> set[str]:
    """The names of settings that have secrets in them, such as addresses with passwords."""
    return {name for name, field in Settings.model_fields.items() if "SecretStr" in repr(field.annotation)} | {"cells"}


def _describe(problem: Any) -> str:
    field = PREFIX + ".".join(map(str, problem["loc"])) if problem["loc"] else "settings"
    text = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        near = get_close_matches(str(problem["loc"][0]), Settings.model_fields, n=1)
        text = "no such setting" + "".join(f"; did you mean {PREFIX}{name}?" for name in near)
    return f"{field}: {text}"
