"""Checks of the idempotent tasks: their options, retentions, time limits, and what their providers promise."""

from __future__ import annotations

from typing import Any

from celery import Celery, Task
from celery.utils.imports import symbol_by_name

from ..settings import Settings
from ..worker.task import IdempotentTask
from .findings import Finding, Level, ok, refusal, warning

# Required of each idempotent task, by its own option or Celery's setting, and what goes wrong otherwise.
TASK_RULES: tuple[tuple[str, Any, str], ...] = (
    ("acks_late", True, "a worker that dies loses its messages"),
    ("reject_on_worker_lost", True, "a killed pool process would acknowledge its message"),
    ("retry_on_worker_lost", False, "a message whose workers keep dying would be acknowledged without a dead letter"),
    (
        # two options since Celery 5.7
        "acks_on_timeout" if hasattr(Task, "acks_on_timeout") else "acks_on_failure_or_timeout",
        False,
        "a hard time-out before the claim would acknowledge the message",
    ),
    ("serializer", "json", "only JSON messages are accepted"),
    ("expires", None, "an expired message is acknowledged and lost"),
)


def check_options(tasks: list[IdempotentTask]) -> list[Finding]:
    findings = []
    for task in tasks:
        for name, needed, reason in TASK_RULES:
            value = getattr(task, name, None)
            value = bool(value) if isinstance(needed, bool) else value
            if value != needed:
                findings.append(refusal(f"task {task.name}", f"{name}={value!r}, need {needed!r}", reason))
        if not issubclass(symbol_by_name(task.Request), symbol_by_name(IdempotentTask.Request)):
            reason = (
                f"a revoked message would be acknowledged; derive it from {IdempotentTask.Request.partition(':')[0]}'s"
            )
            findings.append(refusal(f"task {task.name}", f"Request={task.Request!r} is not ours", reason))
        if not task.acks_on_failure:
            reason = "a failed operation is redelivered until the delivery limit"
            findings.append(warning(f"task {task.name}", "acks_on_failure=False, need True", reason))
    if not any(finding.level is Level.REFUSAL for finding in findings):
        findings.insert(0, ok("tasks", f"{len(tasks)} idempotent, acknowledged late"))
    return findings


def check_names(app: Celery, tasks: list[IdempotentTask]) -> list[Finding]:
    """Celery registers the first function of a name and only warns of a second, which would never run.

    A function inside another (an application's factory, a test) may be the same one again, made anew: Celery has noted
    only the name.
    """
    twice: set[str] = getattr(app, "_duplicate_task_names_warned", set())  # since Celery 5.7
    return [
        (warning if _is_nested(task) else refusal)(
            f"task {task.name}",
            "two functions have this name",
            "only the first one runs, whichever is called; give each its own name=",
        )
        for task in tasks
        if task.name in twice
    ]


def _is_nested(task: IdempotentTask) -> bool:
    return "<locals>" in getattr(getattr(task, "_decorated_fun", None), "__qualname__", "")


def check_retentions(tasks: list[IdempotentTask], given: Settings) -> list[Finding]:
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


def check_longest_runs(app: Celery, tasks: list[IdempotentTask], given: Settings) -> list[Finding]:
    return [
        warning(
            f"task {task.name}",
            f"time_limit={limit:g} above max_run={given.longest_run:g}",
            "a body may go on after its lease has run out, in parallel with the next attempt; raise idempotency_max_run",
        )
        for task in tasks
        if (limit := task.time_limit or app.conf.task_time_limit) and limit > given.longest_run
    ]


def check_providers(tasks: list[IdempotentTask], given: Settings) -> list[Finding]:
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
