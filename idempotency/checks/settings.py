"""Checks of the settings, the library's and Celery's: their values, the content types, the schedule, the pool size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery import Celery

from ..application import settings_of
from ..errors import InvalidArguments, SettingsError, WrongCell
from ..setting_values import is_shown
from ..settings import PREFIX, Settings, secrets
from ..wire import keys
from ..worker.task import IdempotentTask
from ..worker.using import DROPPING
from .findings import Finding, ok, refusal, warning

_SETTING_RULES: tuple[tuple[str, Any, str], ...] = (
    ("task_create_missing_queues", False, "a misspelt name would create a classic queue without consumers"),
    ("worker_prefetch_multiplier", 1, "messages wait behind a long task while other processes are idle"),
    ("worker_enable_prefetch_count_reduction", False, "it does nothing on a quorum queue"),
    ("worker_deduplicate_successful_tasks", False, "it looks like protection and gives none"),
)


def read_settings(app: Celery) -> tuple[Settings | None, list[Finding]]:
    """The settings, or findings that say why they are invalid."""
    try:
        return settings_of(app), []
    except SettingsError as error:
        return None, refused(app, error)


def refused(app: Celery, error: SettingsError) -> list[Finding]:
    """What an error of reading the settings says, with what was got."""
    lines = (line.partition(": ") for line in str(error).splitlines())
    return [refusal(subject, found + _got(app, subject), "correct it") for subject, _, found in lines]


def _got(app: Celery, setting: str) -> str:
    # never a secret, nor what may be one: an address, or what is misspelt; if two settings conflict, the error has both values
    name = setting.removeprefix(PREFIX)
    value = None if name not in Settings.model_fields or name in secrets() else app.conf.get(setting)
    return f", got {value!r}" if value is not None and is_shown(value) else ""


def check_celery_settings(app: Celery) -> list[Finding]:
    return [
        warning(name, f"{app.conf[name]!r}, recommended {wanted!r}", reason)
        for name, wanted, reason in _SETTING_RULES
        if app.conf[name] != wanted
    ]


def check_content(app: Celery) -> list[Finding]:
    findings = []
    if (protocol := app.conf.task_protocol) != 2:
        findings.append(refusal("task_protocol", f"{protocol}, need 2", "every message would be a dead letter"))
    accepted = sorted(app.conf.accept_content or ())
    if other := [name for name in accepted if name not in ("json", "application/json")]:
        found = f"{', '.join(other)} beside json, need json alone"
        findings.append(refusal("accept_content", found, "only JSON is safe to read"))
    return findings or [ok("accept_content", ", ".join(accepted))]


def check_schedule(app: Celery, tasks: list[IdempotentTask]) -> list[Finding]:
    known = {task.name: task for task in tasks}
    findings = []
    for entry_name, entry in (app.conf.beat_schedule or {}).items():
        fields = entry if isinstance(entry, Mapping) else vars(entry)
        if (task := known.get(str(fields.get("task")))) is None:
            continue
        for name, value in _dropping(fields.get("options") or {}):
            found = f"{name}={value!r} for the idempotent task {task.name}, need none"
            findings.append(refusal(f"beat_schedule {entry_name}", found, "each tick would be refused"))
        try:
            keys.bind(task.signature_of_run, fields.get("args") or (), fields.get("kwargs") or {})
        except InvalidArguments as error:
            if task.typing:
                found = f"{error} of the idempotent task {task.name}"
                findings.append(refusal(f"beat_schedule {entry_name}", found, "each tick would be refused"))
    return findings


def check_routes(app: Celery, tasks: list[IdempotentTask]) -> list[Finding]:
    """Routes whose options would have the broker drop a message: Celery adds them when no one looks at it any more."""
    findings = []
    for task in tasks:
        for name, value in _dropping(_routed(app, task)):
            found = f"{name}={value!r} for the idempotent task {task.name}, need none"
            findings.append(refusal("task_routes", found, "an accepted operation is never dropped"))
    return findings


def _routed(app: Celery, task: IdempotentTask) -> Mapping[str, Any]:
    try:
        routed: dict[str, Any] = app.amqp.router.route({}, task.name, (), {}, task)
    except Exception:  # a function that wants arguments, or a queue that is missing, which is said elsewhere
        return {}
    return routed


def _dropping(options: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, options[name]) for name in DROPPING if options.get(name) is not None]


def check_cell(app: Celery, given: Settings) -> list[Finding]:
    """Whether this process has the broker of the cell that it serves: another's messages are of other tenants."""
    if given.cell is None:
        return []
    wanted = given.cells[given.cell].broker_url.get_secret_value()
    if any(address != wanted for address in (app.conf.broker_read_url, app.conf.broker_write_url)):
        found = f"is not that of the cell {given.cell!r}"
        advice = "call use_cells(app) after the configuration, and set neither CELERY_BROKER_URL nor its kin"
        return [refusal("broker_url", found, advice)]
    try:
        given.check_cell(given.tenant)
    except WrongCell as wrong:
        found = f"{wrong}: a call that names no tenant, as those of beat, is refused"
        return [warning("idempotency_cells", found, f"give {given.cell} a `tenant` of its own")]
    others = ", ".join(name for name in given.cells if name != given.cell)
    return [ok("cell", f"{given.cell}; the others: {others or 'none'}")]


def check_restored(given: Settings) -> list[Finding]:
    """Whether providers are asked first, which costs a question for each call."""
    if given.ask_first_until is None:
        return []
    found = f"{given.ask_first_until.isoformat()}: until then the provider is asked before each first call"
    return [warning("idempotency_ask_first_until", found, "meant for the days after a restore; remove it then")]


def check_webhooks(given: Settings) -> list[Finding]:
    """Exceptions from the rule that webhooks go to public addresses."""
    if not given.webhook_allowed_hosts:
        return []
    found = f"{', '.join(given.webhook_allowed_hosts)}: webhooks may go there"
    advice = "customers choose the URLs; name only what they may reach from this network"
    return [warning("idempotency_webhook_allowed_hosts", found, advice)]


def check_pool_size(pool: str, concurrency: int | None, given: Settings) -> list[Finding]:
    """Whether each attempt in a process can get a connection. A prefork process runs only one at a time."""
    most = 2 * given.pool_size  # the pool may grow to twice its size
    if not any(name in pool for name in ("thread", "gevent", "eventlet")) or (concurrency or 0) <= most:
        return []
    found = f"{given.pool_size}, enough for {most} attempts at once, and concurrency is {concurrency}"
    return [warning("idempotency_pool_size", found, "the others would wait; raise it to half of the concurrency")]
