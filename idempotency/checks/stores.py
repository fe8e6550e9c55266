"""Checks of the stores of `DeduplicatedTask`s: what would lose their records, or expose them, and what each gives up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from typing import Any

from celery import Celery

from ..application import settings_of
from ..errors import MissingExtra, SettingsError
from ..settings import PREFIX, Settings
from ..stores.addresses import open_store
from ..stores.dynamodb import EXPIRES, KEY, DynamoDBStore
from ..stores.redis import RedisStore
from ..stores.store import TIMEOUT, StoreAway
from ..worker.deduplicated import DeduplicatedTask, deduplicated_tasks
from ..worker.store_runtimes import checked_address
from ..worker.task import idempotent_tasks
from .broker import check_broker_settings
from .clock import check_clock
from .findings import Finding, Level, ok, refusal, warning
from .objects import check_objects
from .settings import check_content
from .tasks import TASK_RULES
from .tls import check_store_tls, is_refused

# `SET … PX` with scripts that read the time and are replicated by their effects
OLDEST_REDIS = 6


def check_stores(app: Celery) -> list[Finding]:
    """Check the tasks whose records are in a store, and the stores. A store that does not answer is a warning: claims wait for it."""
    tasks = deduplicated_tasks(app)
    if not tasks:
        return []
    try:
        settings = settings_of(app, needs_database=False)
    except SettingsError as error:
        lines = (line.partition(": ") for line in str(error).splitlines())
        return [refusal(subject, found, "correct it") for subject, _, found in lines]
    findings = [*_check_tasks(app, tasks, settings)]
    subjects: dict[str, str] = {}
    for task in tasks:
        try:
            address = checked_address(task.store, settings.store)
        except SettingsError as error:
            findings.append(refusal(f"task {task.name}", str(error), f"set {PREFIX}store, or the task's own"))
        else:
            subjects.setdefault(address, f"{PREFIX}store" if task.store is None else f"store of {task.name}")
    for address, subject in subjects.items():
        findings += check_store(subject, address, settings)
    if settings.store_results_at is not None:
        findings += check_objects(settings.store_results_at)
    return findings


def _check_tasks(app: Celery, tasks: list[DeduplicatedTask], settings: Settings) -> Iterator[Finding]:
    for task in tasks:
        subject = f"task {task.name}"
        for name, needed, reason in TASK_RULES:
            value = getattr(task, name, None)
            if (bool(value) if isinstance(needed, bool) else value) != needed:
                yield refusal(subject, f"{name}={value!r}, need {needed!r}", reason)
        kept = task.retention_completed or settings.retention_completed
        if kept < settings.redelivery_horizon:
            found = f"retention_completed={kept:g} below redelivery_horizon={settings.redelivery_horizon:g}"
            yield refusal(subject, found, "a message that arrives after its record is gone would run again")
    yield from (each for each in check_content(app) if each.level is Level.REFUSAL)
    if not idempotent_tasks(app):
        if settings.message_secrets:
            found = "set, and nothing signs or checks messages where no task is an IdempotentTask"
            yield refusal(f"{PREFIX}message_secrets", found, "it would protect nothing; remove it")
        _, of_broker = check_broker_settings(app)
        yield from of_broker
    yield ok("tasks", f"{len(tasks)} deduplicated: a crash between effect and record repeats the effect")


def check_store(subject: str, address: str, settings: Settings) -> list[Finding]:
    """Check one store. `subject`: the setting or task that names it."""
    try:
        findings = check_store_tls(subject, address, settings.plain_text_hosts)
        if is_refused(findings, subject):
            return findings
        store = open_store(address, service=settings.service, timeout=TIMEOUT)
        try:
            match store:
                case RedisStore():
                    return [*findings, *_check_redis(subject, store)]
                case DynamoDBStore():
                    return [*findings, *_check_dynamodb(subject, store)]
        finally:
            store.close()
    except MissingExtra as error:
        return [refusal(subject, str(error), "install it")]
    except StoreAway as error:
        if "ResourceNotFound" in str(error):
            return [*findings, refusal(subject, "its table is not there", "make it: docs/stores.md says how")]
        return [*findings, warning(subject, f"does not answer: {error}", "claims wait for it")]
    raise AssertionError(type(store))


def _check_redis(subject: str, store: RedisStore) -> Iterator[Finding]:
    servers = store.servers()
    for info, ahead in servers:
        yield from _check_server(subject if len(servers) == 1 else f"{subject} port {info['tcp_port']}", info, ahead)


def _check_server(subject: str, info: dict[str, Any], ahead: float) -> Iterator[Finding]:
    version, role, policy = info["redis_version"], info["role"], info.get("maxmemory_policy", "unknown")
    if int(version.partition(".")[0]) < OLDEST_REDIS:
        yield refusal(subject, f"Redis {version}, need at least {OLDEST_REDIS}", "its scripts need that")
    if role != "master":
        yield refusal(subject, f"role {role}, need master", "it refuses all writes; use the primary")
    if policy != "noeviction":
        advice = "a record that is evicted is forgotten, and its effect repeated; volatile-* evicts them, too: each has a time to live"
        yield refusal(f"{subject} maxmemory-policy", f"{policy}, need noeviction", advice)
    yield ok(subject, f"Redis {version}, {role}, {policy}")
    yield from _check_persistence(subject, info)
    yield check_clock(f"{subject} clock", ahead)


def _check_persistence(subject: str, info: dict[str, Any]) -> Iterator[Finding]:
    """What a crash or a failover forgets. None of it can be refused: it is what this store gives up."""
    if not info.get("aof_enabled"):
        found = "appendonly is off: a restart forgets records, and their effects are repeated for what comes again"
        yield warning(f"{subject} persistence", found, "set appendonly yes")
    else:
        yield ok(f"{subject} persistence", "appendonly; with appendfsync everysec, a crash forgets about a second")
    if info.get("connected_slaves") or info.get("cluster_enabled"):
        found = "replicated asynchronously: a failover may forget the last claims and results"
        yield warning(f"{subject} replication", found, "use IdempotentTask for what must not be repeated")


def _check_dynamodb(subject: str, store: DynamoDBStore) -> Iterator[Finding]:
    table, lives, date = store.server()
    keys = {each["AttributeName"]: each["KeyType"] for each in table.get("KeySchema", ())}
    types = {each["AttributeName"]: each["AttributeType"] for each in table.get("AttributeDefinitions", ())}
    if keys != {KEY: "HASH"} or types.get(KEY) != "S":
        yield refusal(subject, f"its table has another key than {KEY!r}, a string", "make a table of its own")
    elif table.get("TableStatus") != "ACTIVE":
        yield warning(subject, f"its table is {table.get('TableStatus')}", "claims wait for it")
    else:
        yield ok(subject, "DynamoDB, its table is there")
    if lives.get("TimeToLiveStatus") not in ("ENABLED", "ENABLING"):
        yield warning(f"{subject} time to live", "off", f"records stay forever; turn it on, for {EXPIRES!r}")
    elif lives.get("AttributeName") != EXPIRES:
        found = f"by another attribute than {EXPIRES!r}"
        yield refusal(f"{subject} time to live", found, "records stay forever, or are deleted too early")
    if date:
        # whole seconds, cut off
        yield check_clock(f"{subject} clock", parsedate_to_datetime(date).timestamp() + 0.5 - time.time())
