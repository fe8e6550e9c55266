"""Checks of an application's configuration: tasks, queues, retentions. Does not connect to anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery import Celery
from celery.exceptions import QueueNotFound
from kombu import Queue

from .. import settings
from ..application import settings_of
from ..errors import SettingsError
from ..queues import DELIVERY_LIMIT
from ..settings import Settings
from ..worker.task import IdempotentTask, idempotent_tasks
from .findings import Finding, Level, ok, refusal, warning

# Required of each idempotent task, by its own option or Celery's setting, and what goes wrong otherwise.
_TASK_RULES: tuple[tuple[str, Any, str], ...] = (
    ("acks_late", True, "a worker that dies loses its messages"),
    ("reject_on_worker_lost", True, "a killed pool process would acknowledge its message"),
    ("retry_on_worker_lost", False, "a message whose workers keep dying would be acknowledged without a dead letter"),
    ("acks_on_timeout", False, "a hard time-out before the claim would acknowledge the message"),
    ("serializer", "json", "only JSON messages are accepted"),
    ("expires", None, "an expired message is acknowledged and lost"),
)

_SETTING_RULES: tuple[tuple[str, Any, str], ...] = (
    ("task_create_missing_queues", False, "a misspelt name would create a classic queue without consumers"),
    ("worker_prefetch_multiplier", 1, "messages wait behind a long task while other processes are idle"),
    ("worker_enable_prefetch_count_reduction", False, "it does nothing on a quorum queue"),
    ("worker_deduplicate_successful_tasks", False, "it looks like protection and gives none"),
)

_QUEUE_RULES: tuple[tuple[str, str, str], ...] = (
    ("x-queue-type", "quorum", "other types have no delivery limit"),
    ("x-dead-letter-strategy", "at-least-once", "a message could be lost on its way to the dead-letter queue"),
    ("x-overflow", "reject-publish", "a full queue would drop its oldest messages"),
)


def speaks_amqp(app: Celery) -> bool:
    """Whether the broker speaks AMQP. Does not connect; raises `ValueError` for an invalid address."""
    return bool(app.connection_for_write().transport.driver_type == "amqp")


def require_broker_address(app: Celery) -> None:
    """Raise `SettingsError` for an invalid broker address: kombu's own error would show parts of it."""
    try:
        speaks_amqp(app)
    except ValueError:
        raise SettingsError(f"broker_url: {settings.NOT_AN_ADDRESS}") from None


def read_settings(app: Celery) -> tuple[Settings | None, list[Finding]]:
    """The settings, or findings that say why they are invalid."""
    try:
        return settings_of(app), []
    except SettingsError as error:
        lines = (line.partition(": ") for line in str(error).splitlines())
        return None, [refusal(subject, found + _got(app, subject), "correct it") for subject, _, found in lines]


def _got(app: Celery, setting: str) -> str:
    # never an address, which has a password; if two settings conflict, the error already has both values
    value = None if setting.endswith("_url") else app.conf.get(setting)
    return "" if value is None else f", got {value!r}"


def check(app: Celery, given: Settings | None) -> list[Finding]:
    """Check tasks, queues, content types, schedule and retentions. `given`: the settings, if they are valid."""
    tasks = idempotent_tasks(app)
    findings = [*_tasks(tasks), *_content(app), *_schedule(app, tasks), *_celery_settings(app)]
    if given is not None:
        findings += [*_retentions(tasks, given), *_providers(tasks, given), *_longest_runs(app, tasks, given)]
        findings += connections(str(app.conf.worker_pool), app.conf.worker_concurrency, given)
    try:
        amqp = speaks_amqp(app)
    except ValueError:
        return [*findings, refusal("broker_url", settings.NOT_AN_ADDRESS, "correct it")]
    if amqp:
        findings += _queues(app, tasks, given)
    else:
        findings.append(
            warning(
                "broker",
                "not RabbitMQ: no delivery limit, no dead-letter queue and no confirms",
                "good enough for trying things out; a killed worker's messages come back only after the visibility time-out",
            )
        )
    return findings


# ---------------------------------------------------------------- tasks and Celery's settings


def _tasks(tasks: list[IdempotentTask]) -> list[Finding]:
    findings = []
    for task in tasks:
        for name, needed, reason in _TASK_RULES:
            value = getattr(task, name, None)
            value = bool(value) if isinstance(needed, bool) else value
            if value != needed:
                findings.append(refusal(f"task {task.name}", f"{name}={value!r}, need {needed!r}", reason))
        if not task.acks_on_failure:
            reason = "a failed operation is redelivered until the delivery limit"
            findings.append(warning(f"task {task.name}", "acks_on_failure=False, need True", reason))
    if not any(finding.level is Level.REFUSAL for finding in findings):
        findings.insert(0, ok("tasks", f"{len(tasks)} idempotent, acknowledged late"))
    return findings


def _content(app: Celery) -> list[Finding]:
    accepted = sorted(app.conf.accept_content or ())
    if other := [name for name in accepted if name not in ("json", "application/json")]:
        return [
            refusal("accept_content", f"{', '.join(other)} beside json, need json alone", "only JSON is safe to read")
        ]
    return [ok("accept_content", ", ".join(accepted))]


def _schedule(app: Celery, tasks: list[IdempotentTask]) -> list[Finding]:
    names = {task.name for task in tasks}
    findings = []
    for entry_name, entry in (app.conf.beat_schedule or {}).items():
        fields = entry if isinstance(entry, Mapping) else vars(entry)
        expires = (fields.get("options") or {}).get("expires")
        if fields.get("task") in names and expires is not None:
            found = f"expires={expires!r} for the idempotent task {fields['task']}, need none"
            findings.append(refusal(f"beat_schedule {entry_name}", found, "each tick would be refused"))
    return findings


def _celery_settings(app: Celery) -> list[Finding]:
    return [
        warning(name, f"{app.conf[name]!r}, recommended {wanted!r}", reason)
        for name, wanted, reason in _SETTING_RULES
        if app.conf[name] != wanted
    ]


def _retentions(tasks: list[IdempotentTask], given: Settings) -> list[Finding]:
    """A record must be kept while its messages may still arrive: without it, they would run again."""
    horizon = given.redelivery_horizon
    findings = [
        refusal(
            f"task {task.name}",
            f"{name}={value} below redelivery_horizon={horizon}",
            "a message that arrives after its record was purged would run again",
        )
        for task in tasks
        for name in ("retention_completed", "retention_failed")
        if (value := getattr(task, name)) is not None and value < horizon
    ]
    kept = f"completed {given.retention_completed:.0f} s, failed {given.retention_failed:.0f} s"
    return findings or [
        ok("retention", f"{kept}, redelivery_horizon {horizon:.0f} s; records with an open dead letter are kept")
    ]


def _longest_runs(app: Celery, tasks: list[IdempotentTask], given: Settings) -> list[Finding]:
    return [
        warning(
            f"task {task.name}",
            f"time_limit={limit:g} above max_run={given.longest_run:g}",
            "a body may go on after its lease has run out, in parallel with the next attempt; raise idempotency_max_run",
        )
        for task in tasks
        if (limit := task.time_limit or app.conf.task_time_limit) and limit > given.longest_run
    ]


def connections(pool: str, concurrency: int | None, given: Settings) -> list[Finding]:
    """Whether each attempt in a process can get a connection. A prefork process runs only one at a time."""
    most = 2 * given.pool_size  # the pool may grow to twice its size
    if not any(name in pool for name in ("thread", "gevent", "eventlet")) or (concurrency or 0) <= most:
        return []
    found = f"{given.pool_size}, enough for {most} attempts at once, and concurrency is {concurrency}"
    return [warning("idempotency_pool_size", found, "the others would wait; raise it to half of the concurrency")]


# ---------------------------------------------------------------- declared queues


def _queues(app: Celery, tasks: list[IdempotentTask], given: Settings | None) -> list[Finding]:
    findings = []
    if not (app.conf.broker_transport_options or {}).get("confirm_publish"):
        findings.append(
            refusal(
                "broker_transport_options",
                "confirm_publish off, need True",
                "a message that the broker does not accept would be lost silently",
            )
        )
    used: dict[str, list[IdempotentTask]] = {}
    for task in tasks:
        try:
            used.setdefault(_queue_of(app, task), []).append(task)
        except QueueNotFound:
            findings.append(
                refusal(f"task {task.name}", "routed to a queue that is not in task_queues", "declare it there")
            )
        except Exception as error:  # the application's own router, which may need the arguments
            findings.append(
                warning(
                    f"task {task.name}", f"its route cannot be determined: {type(error).__name__}", "check its queue"
                )
            )
    for name, queue in sorted(app.amqp.queues.items()):
        wrong = list(_queue(queue))
        if name not in used:  # plain tasks may accept less
            wrong = [warning(f.subject, f.found, f"no idempotent task is routed here; {f.advice}") for f in wrong]
        findings += wrong
        if name in used and not wrong:
            findings.append(_outage(queue, used[name], given))
    return findings


def _providers(tasks: list[IdempotentTask], given: Settings) -> list[Finding]:
    """Whether calls are repeated only while the provider still has their key; after that a person has to decide."""
    findings = []
    for task in tasks:
        if (contract := task.provider) is None:
            continue
        subject, kept = f"task {task.name}", contract.keeps_keys_for
        attempts = task.max_attempts or given.max_attempts
        horizons = {
            "defer_budget": given.defer_budget,
            f"{attempts} attempts x retry_cap": attempts * given.retry_cap,
        }
        for name, seconds in horizons.items():
            if seconds >= kept:
                found = f"{name}={seconds:g} s, and {contract.name} keeps a key for {kept:g} s"
                findings.append(warning(subject, found, "a call repeated later than that ends as effect_unknown"))
        retention = task.retention_failed or given.retention_failed
        if retention > kept:
            found = (
                f"{contract.name} keeps a key for {kept / 3600:g} h; failed operations are kept {retention / 3600:g} h"
            )
            advice = "give its effects a reconcile: a later replay can only ask about an unknown call, not repeat it"
            findings.append(ok(subject, f"{found}; {advice}"))
    return findings


def _queue_of(app: Celery, task: IdempotentTask) -> str:
    given = getattr(task, "queue", None)
    queue = app.amqp.router.route({} if given is None else {"queue": given}, task.name)["queue"]
    return str(queue.name if isinstance(queue, Queue) else queue)


def _queue(queue: Queue) -> list[Finding]:
    subject, arguments = f"queue {queue.name}", queue.queue_arguments or {}
    findings = [
        refusal(subject, f"{name} is {arguments.get(name, 'not set')}, need {needed}", reason)
        for name, needed, reason in _QUEUE_RULES
        if arguments.get(name) != needed
    ]
    limit = arguments.get("x-delivery-limit")
    if limit is None or limit < DELIVERY_LIMIT:
        found = f"x-delivery-limit is {'not set' if limit is None else limit}, need at least {DELIVERY_LIMIT}"
        advice = "attempts are counted on the record; the broker counts lost connections too"
        findings.append(refusal(subject, found, advice))
    exchange, key = arguments.get("x-dead-letter-exchange"), arguments.get("x-dead-letter-routing-key")
    if exchange is None or (exchange == "" and key in (None, "", queue.name)):
        found = f"dead letters go to exchange {exchange!r} with routing key {key!r}, need a separate queue"
        findings.append(refusal(subject, found, "use idempotency.queues.quorum_queue"))
    if not queue.durable or queue.auto_delete or queue.no_ack:
        found = f"durable={queue.durable} auto_delete={queue.auto_delete} no_ack={queue.no_ack}, need True False False"
        findings.append(refusal(subject, found, "use idempotency.queues.quorum_queue"))
    for name, attribute in (("x-expires", "expires"), ("x-message-ttl", "message_ttl")):
        if (value := arguments.get(name, getattr(queue, attribute))) is not None:
            findings.append(refusal(subject, f"{name} is {value}, need none", "accepted messages must not expire"))
    if queue.exchange is not None and queue.exchange.type != "topic":
        found = f"exchange type {queue.exchange.type}, recommended topic"
        findings.append(warning(subject, found, "a countdown in apply_async goes through a worker to the outbox"))
    return findings


def _outage(queue: Queue, tasks: list[IdempotentTask], given: Settings | None) -> Finding:
    """How late a message may come back. Waiting for Postgres uses up no deliveries; an attempt killed at its limit does."""
    subject, limit = f"queue {queue.name}", (queue.queue_arguments or {})["x-delivery-limit"]
    latest = limit * max((task.time_limit or 0 for task in tasks), default=0)
    if given is not None and latest > given.redelivery_horizon:
        found = f"{limit} deliveries x {latest / limit:g} s = {latest:g} s above redelivery_horizon={given.redelivery_horizon}"
        return warning(subject, found, "a message may still arrive after its record was purged")
    return ok(subject, f"quorum, {limit} deliveries; waiting for Postgres uses up none")
