"""What a person may change about an operation: release, cancel, and say what became of an effect.

Every change is one transaction with its row in the audit table. It is made only while the record has the status and
the fence that the person was shown; a replay, while its letter is open and the operation failed in that generation. Two
operators at once, or an operator and a worker, make one change; the other is refused. A refusal changes nothing and
leaves no row.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from celery import Celery
from pydantic import TypeAdapter, ValidationError
from sqlalchemy import Connection, Row

from ..application import runtime_of
from ..attempt import conclusions
from ..attempt.conclusions import Concluded, Entry
from ..attempt.effects import DidNotHappen, Happened
from ..attempt.policy import Policy
from ..attempt.runtime import Runtime
from ..errors import (
    ChangeRefused,
    EffectUnknown,
    InvalidResult,
    OperationNotFound,
    PermanentError,
    TransactionEnded,
    Unfinished,
    permanent_error,
)
from ..observe import metrics
from ..observe.logs import log
from ..store import audit as audits
from ..store import claims, dead_letters, ends, letters, operations
from ..store.answers import Claimed
from ..store.ends import FailedEnd
from ..store.statements import describe
from ..wire import encoding, keys, results
from ..wire.delivery import Delivery
from ..wire.keys import OperationId
from ..wire.message import Message

# Enough for a sentence and a ticket number.
REASON_LIMIT = 500


@dataclass(frozen=True, slots=True)
class Shown:
    """An operation as a person was shown it: what they change must still be this."""

    id: OperationId
    status: str  # "accepted": in the outbox, without a record yet
    fence: int | None


@dataclass(frozen=True, slots=True)
class Change:
    """Who changes something, and why. A change repeated under one `request_id` is made once."""

    actor: str
    reason: str
    request_id: str | None = None

    def __post_init__(self) -> None:
        if self.request_id is not None and not 0 < len(self.request_id) <= 255:
            raise ChangeRefused(f"--request-id: 1 to 255 characters, got {len(self.request_id)}")
        if not 0 < len(self.actor.strip()) <= 255:
            raise ChangeRefused("--as: 1 to 255 characters")
        if not 0 < len(self.reason.strip()) <= REASON_LIMIT:
            raise ChangeRefused(f"--reason: 1 to {REASON_LIMIT} characters, got {len(self.reason)}")


# ---------------------------------------------------------------- find


def find(connection: Connection, key: str, *, task: str | None = None, tenant: str | None = None) -> OperationId:
    """Find the one operation of a key. `operation` is the task's name, or its end after a dot.

    Raises `OperationNotFound`, and `ChangeRefused` listing the choices.
    """
    found = operations.find(connection, key, task=task, tenant=tenant)
    found = [id for id in found if id.task == task] or found  # a whole name means itself alone
    if not found:
        raise OperationNotFound(f"key {key!r}: no operation has it")
    if len(found) > 1:
        choices = "; ".join(f"--task {id.task} --tenant {id.tenant}" for id in found)
        raise ChangeRefused(f"key {key!r}: {len(found)} operations have it, choose one: {choices}")
    return found[0]


def read(connection: Connection, id: OperationId) -> Shown:
    """Read what a change will depend on. Raises `OperationNotFound`."""
    row = operations.status_and_fence(connection, id)
    if row is not None:
        return Shown(id, row.status, row.fence)
    if operations.accepted(connection, id) is None:
        raise OperationNotFound(f"{id.task} {id.key}: has neither a record nor a message that waits")
    return Shown(id, "accepted", None)


# ---------------------------------------------------------------- change


def release(app: Celery, shown: Shown, change: Change) -> None:
    """Take an operation from its holder and deliver it again now. Raises `ChangeRefused`.

    For a holder that is alive but will not end: it finds its lease lost and its writes match nothing. What it has
    called outside is found begun by the next attempt. The attempt stays used.
    """
    with runtime_of(app).engine.begin() as connection:
        if _repeated(connection, change, "release", shown.id) is not None:
            return
        row = _locked(connection, shown, "release", "started")
        released = ends.release(connection, _claimed(shown.id, row), delay=0.0, error=None)
        assert released  # the row is locked, and it is the one that was shown
        audit(connection, change, "release", shown.id, row, details={"holder": row.locked_by})


def cancel(
    app: Celery, shown: Shown, change: Change, *, may_have_happened: bool = False, without_task: bool = False
) -> PermanentError:
    """End an operation that has not begun, or waits for its next attempt, as failed with the code `cancelled`.

    The record, the dead letter, undos, the rows of the task's `on_failed` and the audit row are one commit; a delivery
    that is still on its way finds the failure. Returns the error it has ended with. Raises `ChangeRefused`, also when an
    effect has happened or may have, unless `may_have_happened`: then it ends as `effect_unknown` or `unfinished`; and
    when the application has no such task, unless `without_task`: then neither undos nor `on_failed` run.
    """
    try:
        return _cancel(app, shown, change, may_have_happened, without_task)
    except TransactionEnded as broken:
        return _cancel(app, shown, change, may_have_happened, without_task, skip=str(broken))


def _cancel(
    app: Celery, shown: Shown, change: Change, may_have_happened: bool, without_task: bool, *, skip: str | None = None
) -> PermanentError:
    runtime = runtime_of(app)
    error = PermanentError(change.reason, "cancelled")
    with runtime.engine.begin() as connection:
        if (done := _repeated(connection, change, "cancel", shown.id)) is not None:
            return PermanentError(change.reason, done.details["ended_as"])
        if shown.status == "accepted":
            _open_unclaimed(connection, runtime, shown.id)
            status, before = "released", None
        else:
            status, before = shown.status, shown.fence
        row = _locked(connection, shown, "cancel", "released", status=status, fence=before)
        acted = sorted(name for name, entry in row.effects.items() if conclusions.has_acted({name: entry}))
        if acted and not may_have_happened:
            raise ChangeRefused(
                f"{_called(shown.id)}: effect {', '.join(acted)} has happened or may have; let it finish, "
                "or cancel it with --may-have-happened"
            )
        policy, arguments, broken = _task_of(app, runtime, row, without_task=without_task)
        concluded = _conclude(connection, shown.id, row, error, policy, arguments, skip or broken)
        letters.store_failure(
            connection,
            shown.id,
            _delivery(shown.id, row, arguments),
            _claimed(shown.id, row),
            reason=concluded.reason,
            last_error=concluded.end.error,
            service=runtime.settings.service,
        )
        fence = ends.cancel(connection, shown.id, concluded.end, fence=row.fence, retention=policy.retention_failed)
        details = {"was": shown.status, "ended_as": concluded.error.code}
        details |= {} if concluded.broken is None else {"on_failed_error": concluded.broken}
        audit(connection, change, "cancel", shown.id, row, fence=fence, details=details)
    metrics.count_failed(shown.id.task, concluded.error.code)
    return concluded.error


def resolve_effect(
    app: Celery,
    shown: Shown,
    name: str,
    outcome: Happened | DidNotHappen,
    change: Change,
    *,
    end: bool = False,
    without_task: bool = False,
) -> str:
    """Record what a person found out about an effect whose outcome was not known. Replay its dead letter to go on.

    Happened: the next attempt gets the result and calls nothing. DidNotHappen: it calls, under the effect's next key.
    With `end` the operation is not to go on: what its end had to leave undone is undone, and `on_failed` is told the
    cause (`cancelled` where nothing but the unknown effect had ended it). A person's word can be corrected for as long
    as the operation is failed. The result is checked against the task's `effect_types`; an application without the
    task is refused, unless `without_task`. Returns the code that the operation has ended with now. Raises
    `ChangeRefused`, and `InvalidResult`.
    """
    try:
        return _resolve(app, shown, name, outcome, change, end, without_task)
    except TransactionEnded as broken:
        return _resolve(app, shown, name, outcome, change, end, without_task, skip=str(broken))


def _resolve(
    app: Celery,
    shown: Shown,
    name: str,
    outcome: Happened | DidNotHappen,
    change: Change,
    end: bool,
    without_task: bool,
    *,
    skip: str | None = None,
) -> str:
    runtime = runtime_of(app)
    said = {"effect": name, "outcome": _digest(outcome), "end": end}
    with runtime.engine.begin() as connection:
        if (done := _repeated(connection, change, "resolve", shown.id, said=said)) is not None:
            return str(done.details["ended_as"])
        row = _locked(connection, shown, "resolve an effect of", "failed")
        entry = row.effects.get(name)
        if entry is None or entry["kind"] != "effect":
            known = ", ".join(sorted(n for n, e in row.effects.items() if e["kind"] == "effect")) or "none"
            raise ChangeRefused(f"{_called(shown.id)}: has no effect {name!r}; it has: {known}")
        # what an undo has answered for stays so: another word would leave its refund without a payment, or with two
        if entry["state"] == "compensated" or (entry["state"] != "begun" and not entry.get("resolved")):
            raise ChangeRefused(f"{_called(shown.id)}: effect {name!r} is {entry['state']}, so its outcome is known")
        word: dict[str, Any] = {"state": "not_happened", "resolved": True}
        if isinstance(outcome, Happened):
            word |= {"state": "done", "result": _checked_result(app, runtime, row, name, outcome.result, without_task)}
        resolved, details = entry | word, dict(said)
        concluded_end = FailedEnd(row.error_code, row.error, changed={name: resolved})
        if end or row.error_code not in (EffectUnknown.default_code, Unfinished.default_code):
            entries = {**row.effects, name: resolved}
            if conclusions.is_open(entries):
                raise ChangeRefused(f"{_called(shown.id)}: another effect is still open; resolve it first")
            fields = json.loads(row.error)
            cause = fields.get("cause") or fields
            policy, arguments, broken = _task_of(app, runtime, row, without_task=without_task)
            error = permanent_error(cause["message"], cause["code"])
            if error.code == EffectUnknown.default_code:  # nothing else had ended it: now this person does
                error = PermanentError(change.reason, "cancelled")
            concluded = _conclude(connection, shown.id, row, error, policy, arguments, skip or broken, entries=entries)
            concluded_end = replace(concluded.end, changed={name: resolved, **concluded.end.changed})
            letters.update_open_letter(connection, shown.id, row.generation, concluded_end, reason=concluded.reason)
            details |= {} if concluded.broken is None else {"on_failed_error": concluded.broken}
        fence = ends.conclude(connection, shown.id, concluded_end, fence=row.fence)
        details |= {"state": word["state"], "ended_as": concluded_end.code}
        audit(connection, change, "resolve", shown.id, row, fence=fence, details=details)
    return concluded_end.code


def replay(app: Celery, letter: int, change: Change) -> OperationId:
    """Send a dead letter again under the same key, with its audit row in the same transaction.

    Raises `OperationNotFound` and `ReplayRefused`.
    """
    with runtime_of(app).engine.begin() as connection:
        if (done := _repeated(connection, change, "replay", None, said={"dead_letter": letter})) is not None:
            return OperationId(done.tenant, done.task, done.key)
        id = dead_letters.replay(connection, letter, app=app)
        row = operations.read_locked(connection, id)
        audit(connection, change, "replay", id, row, details={"dead_letter": letter})
    return id


def audit(
    connection: Connection,
    change: Change,
    action: str,
    id: OperationId | None,
    row: Row[Any] | None,
    *,
    fence: int | None = None,
    details: dict[str, Any] | None = None,
) -> None:
    """Write who did what, and why, in the transaction of the change. `fence` is the new one where it moves."""
    audits.add(
        connection,
        id,
        actor=change.actor,
        action=action,
        generation=row and row.generation,
        before=row and row.fence,
        after=(row and row.fence) if fence is None else fence,
        reason=change.reason,
        details=details or {},
        request_id=change.request_id,
    )
    log.info("operator_change", action=action, actor=change.actor, task=id and id.task, key=id and id.key)


# ---------------------------------------------------------------- how


def _repeated(
    connection: Connection,
    change: Change,
    action: str,
    id: OperationId | None,
    *,
    said: Mapping[str, Any] = MappingProxyType({}),
) -> Row[Any] | None:
    """The audit row of this very request, if it has been carried out. Raises `ChangeRefused` if it was another one."""
    if change.request_id is None:
        return None
    row = audits.of_request(connection, change.request_id)
    if row is None:
        return None
    same = id is None or (id.tenant, id.task, id.key) == (row.tenant, row.task, row.key)
    if row.action != action or not same or any(row.details.get(name) != value for name, value in said.items()):
        raise ChangeRefused(f"--request-id: was used before, to {row.action} {row.task} {row.key}, and not for this")
    return row


def _digest(outcome: Happened | DidNotHappen) -> str:
    """What tells one word from another, without a result that the audit table must not show."""
    if isinstance(outcome, DidNotHappen):
        return "not happened"
    text = json.dumps(outcome.result, sort_keys=True, default=str)
    return f"happened {hashlib.sha256(text.encode(errors='replace')).hexdigest()[:16]}"


def _locked(
    connection: Connection,
    shown: Shown,
    verb: str,
    wanted: str,
    *,
    status: str | None = None,
    fence: int | None = None,
) -> Any:
    """The record, locked, if it still is what was shown and may be changed so."""
    id, status = shown.id, status or shown.status
    if status != wanted:
        raise ChangeRefused(f"{_called(id)}: is {status}; can only {verb} what is {wanted}")
    row = operations.read_locked(connection, id)
    if row is None:
        raise ChangeRefused(f"{_called(id)}: was {status} and has since been purged")
    expected = shown.fence if fence is None else fence
    if row.status != status or (expected is not None and row.fence != expected):
        raise ChangeRefused(f"{_called(id)}: was {shown.status} when shown and is {row.status} now; look again")
    return row


def _open_unclaimed(connection: Connection, runtime: Runtime, id: OperationId) -> None:
    """Give an operation that is only in the outbox its record, under the fingerprint that its deliveries have."""
    # A replay and an attempt that was given back count from 0 again: the claim alone does not tell them from new.
    if operations.read_locked(connection, id) is not None:
        raise ChangeRefused(f"{_called(id)}: was accepted when shown and has begun since; look again")
    sent = operations.accepted(connection, id)
    if sent is None:
        raise ChangeRefused(f"{_called(id)}: has since been purged")
    answer = claims.claim(
        connection,
        id,
        token=secrets.token_hex(16),
        fingerprint=sent.fingerprint,
        message=sent.message,
        holder=runtime.holder,
        lease=runtime.settings.lease,
        queue=sent.queue,
    )
    if not isinstance(answer, Claimed) or not answer.first_claim:
        raise ChangeRefused(f"{_called(id)}: was accepted when shown and has begun since; look again")
    ends.release(connection, answer, delay=0.0, error=None, give_back=True, deliver=False)


def _known_task(app: Celery, task: str, without_task: bool) -> Any:
    """The operation's task. Raises `ChangeRefused` where the application has none, and nobody has said that this is right."""
    app.loader.import_default_modules()
    task = app.tasks.get(task)
    if hasattr(task, "retention_failed"):
        return task
    if not without_task:
        raise ChangeRefused(
            f"{task}: this application has no such task; name the one that has it with -A, or give --without-task: "
            "then neither its undos nor its on_failed run"
        )
    return None


def _task_of(
    app: Celery, runtime: Runtime, row: Row[Any], *, without_task: bool
) -> tuple[Policy, dict[str, Any], str | None]:
    """How the operation's task wants to end, its arguments by name, and why they could not be read."""
    task = _known_task(app, row.task, without_task)
    if task is None:
        settings = runtime.settings
        unknown = Policy(
            settings.max_attempts,
            settings.retention_completed,
            settings.retention_failed,
            settings.provider_key_retention,
        )
        return unknown, {}, "no task of this name is known to this process"
    policy = Policy.of(task, runtime.settings)
    try:
        args, kwargs, _ = encoding.loads(Message.from_text(row.message).body)
        return policy, keys.bind(task.signature_of_run, args, kwargs), None
    except Exception as error:  # another version's message
        return policy, {}, describe(error)


def _conclude(
    connection: Connection,
    id: OperationId,
    row: Any,
    error: PermanentError,
    policy: Policy,
    arguments: dict[str, Any],
    broken: str | None,
    *,
    entries: Mapping[str, Entry] | None = None,
) -> Concluded:
    """End the operation as a failing attempt does. `broken`: why its arguments could not be read, so that nothing runs."""
    concluded = conclusions.conclude(
        connection,
        id,
        error,
        entries=row.effects if entries is None else entries,
        arguments=arguments,
        attempts=row.attempts,
        on_failed=policy.on_failed,
        skip=broken,
    )
    return concluded if broken is None else replace(concluded, reason="on_failed_error", broken=broken)


def _checked_result(app: Celery, runtime: Runtime, row: Row[Any], name: str, result: Any, without_task: bool) -> str:
    """A person's result as text, if it is what the task says that this effect returns. Raises `InvalidResult`."""
    text = results.to_text(result, limit=runtime.settings.result_limit, what=f"result of {name!r}")
    types = getattr(_known_task(app, row.task, without_task), "effect_types", {})
    if name in types:
        try:
            TypeAdapter(types[name]).validate_python(result)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(map(str, problem["loc"])) or "result"
            raise InvalidResult(f"result of {name!r}: {where}: {problem['msg']}") from None
    return text


def _delivery(id: OperationId, row: Row[Any], arguments: dict[str, Any]) -> Delivery:
    headers = letters.headers_of(row.message)
    return Delivery(id, row.fingerprint, arguments, str(headers.get("id", "")), row.message, headers, row.queue)


def _claimed(id: OperationId, row: Row[Any]) -> Claimed:
    return Claimed(id, row.fence, row.token or "", row.attempts, row.generation, 0.0, row.effects, False)


def _called(id: OperationId) -> str:
    return f"{id.task} {id.key}"
