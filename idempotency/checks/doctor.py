"""`idempotency doctor`: finds what in the set-up would lose work, do it twice or expose it.

Checks the configuration, then each server. Not checked: RabbitMQ policies, which can lower a queue's limits below its
arguments, and the settings of an application's own database sessions.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from celery import Celery
from sqlalchemy.exc import DBAPIError

from ..application import close_runtime, serve_cell, serves_no_cell
from ..cells import cells_given
from ..errors import SettingsError
from ..settings import PREFIX, Settings
from ..store.connections import login
from ..streams.declaring import declared_streams
from ..worker.deduplicated import deduplicated_tasks
from ..worker.task import idempotent_tasks
from .broker import check_broker, check_broker_settings, check_remote_control, check_signatures
from .findings import Finding, Level, refusal, warning
from .objects import check_objects
from .people import check_operators, check_people
from .postgres import check_database, identity
from .processes import check_processes
from .queues import check_declared_queues
from .redis import check_redis
from .sagas import check_sagas
from .settings import (
    check_celery_settings,
    check_cell,
    check_content,
    check_pool_size,
    check_restored,
    check_routes,
    check_schedule,
    check_webhooks,
    read_settings,
    refused,
)
from .shared_brokers import SharedBrokers
from .standbys import check_hosts, check_target
from .stores import check_stores
from .streams import check_streams
from .tasks import check_longest_runs, check_names, check_options, check_providers, check_retentions
from .tls import check_tls, is_refused
from .unreachable import check_server

# The settings with addresses of brokers.
BROKERS = ("broker_url", "broker_read_url", "broker_write_url")


def doctor(app: Celery) -> list[Finding]:
    """Check the application and its servers; returns findings, the worst first. Changes nothing that stays; may take seconds.

    An unreachable server is a finding, not an exception. One whose address is refused is not asked. A process that serves no
    cell checks each, and their findings begin with its name.
    """
    app.loader.import_default_modules()  # registers the tasks
    if not serves_no_cell(app):
        return _worst_first(_doctor(app))
    before = dict(app.conf.changes)
    try:
        with SharedBrokers() as brokers:
            return _worst_first(_of_each_cell(app, brokers))
    finally:
        close_runtime(app)
        app.conf.changes.clear()
        app.conf.changes.update(before)


def _of_each_cell(app: Celery, brokers: SharedBrokers) -> list[Finding]:
    findings: list[Finding] = []
    databases: dict[str, str] = {}  # what each says that it is, and the first cell that has it
    try:
        cells = cells_given(app.conf[f"{PREFIX}cells"])
    except SettingsError as error:
        return refused(app, error)
    for cell in cells:
        try:
            serve_cell(app, cell)
            found = _doctor(app)
        except SettingsError as error:
            settings, of_all = read_settings(app)
            if settings is None:  # the cells are read together
                return findings + of_all
            found = refused(app, error)
        else:
            if (database := _identity(app, found)) is not None and (
                other := databases.setdefault(database, cell)
            ) != cell:
                advice = "each cell has its own; correct one of the two addresses"
                found.append(refusal("database", f"is that of {other}, too, by another address", advice))
            if not any(each.level is Level.REFUSAL and each.subject.startswith("broker") for each in found):
                found += brokers.check(app, cell)
        findings += [replace(each, subject=f"{cell}: {each.subject}") for each in found]
    return findings


def _identity(app: Celery, found: list[Finding]) -> str | None:
    """What the database of the cell that is served says that it is; None where it was not to be asked, or is refused."""
    settings, _ = read_settings(app)
    if settings is None or is_refused(found, "idempotency_database_url"):
        return None
    if any(each.level is Level.REFUSAL and each.subject.startswith("database") for each in found):
        return None
    with suppress(DBAPIError):
        return identity(settings)
    return None


def _doctor(app: Celery) -> list[Finding]:
    if deduplicated_tasks(app) and not idempotent_tasks(app):
        findings = [*check_stores(app), *check_tls(app, None)]
    else:
        findings = [*_check_with_postgres(app), *check_stores(app)]
    if not is_refused(findings, *BROKERS):
        findings += check_server("broker", "broker_url", lambda: check_broker(app))
    return findings


def _worst_first(findings: list[Finding]) -> list[Finding]:
    order = list(reversed(Level))
    return sorted(findings, key=lambda finding: order.index(finding.level))


def _check_with_postgres(app: Celery) -> list[Finding]:
    settings, findings = read_settings(app)
    findings += check_configuration(app, settings)
    if settings is not None:
        is_exposed = is_refused(findings, "idempotency_database_url")
        if not is_exposed:
            findings += check_server("database", "idempotency_database_url", lambda: check_database(settings))
            findings += check_hosts(settings)
        if settings.redis_url is None:
            findings.append(warning("redis", "not set", "every claim and duplicate goes to Postgres"))
        elif not is_refused(findings, "idempotency_redis_url"):
            url = settings.redis_url
            # only a warning: without Redis, everything still works, with more round trips
            findings += check_server("redis", "idempotency_redis_url", lambda: check_redis(url), Level.WARNING)
        if not is_exposed and not any(f.level is Level.REFUSAL and f.subject.startswith("database") for f in findings):
            findings += check_server(
                "database", "idempotency_database_url", lambda: check_processes(app, settings), Level.WARNING
            )
            findings += check_server(
                "database", "idempotency_database_url", lambda: check_sagas(app, settings), Level.WARNING
            )
            findings += check_server(
                "database", "idempotency_database_url", lambda: check_operators(app, settings), Level.WARNING
            )
        findings += check_people(settings)
        if not is_refused(findings, "broker_url", "broker_read_url"):
            findings += check_streams(app, settings)
        if settings.large_results_at is not None:
            findings += check_objects(settings.large_results_at)
    return findings


def check_configuration(app: Celery, given: Settings | None) -> list[Finding]:
    """Check what needs no connection. `given`: the settings, if they are valid."""
    tasks = idempotent_tasks(app)
    findings = [
        *check_names(app, tasks),
        *check_options(tasks),
        *check_content(app),
        *check_schedule(app, tasks),
        *check_routes(app, tasks),
    ]
    # what handles streams alone has no worker
    has_worker = bool(tasks) or not declared_streams()
    if has_worker:
        findings += check_celery_settings(app)
    if given is not None:
        findings += [*check_retentions(tasks, given), *check_providers(tasks, given), *check_signatures(app, given)]
        findings += [*check_remote_control(app, given), *check_longest_runs(app, tasks, given)]
        findings += [*check_webhooks(given), *check_restored(given), *check_cell(app, given)]
        findings += check_pool_size(str(app.conf.worker_pool), app.conf.worker_concurrency, given)
        findings += check_target(login(given))
    findings += check_tls(app, given)
    is_rabbitmq, found = check_broker_settings(app)
    findings += found
    if is_rabbitmq and has_worker:
        findings += check_declared_queues(app, tasks, given)
    return findings
