"""What a person may change about an operation: release, cancel, and say what became of an effect.

Every change is one transaction, made only while the record has the status and the fence that the person was shown,
and its row in the audit table is part of it. Two operators at once, or an operator and a worker, make one change;
the other is refused. A refusal changes nothing and leaves no row.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any

from celery import Celery
from kombu.utils.json import loads
from sqlalchemy import Connection, Row
from sqlalchemy.exc import OperationalError

from . import dead_letters, keys, records, results
from .attempt import RESPONSE_FAILED, AttemptSession, Policy, describe
from .delivery import Delivery, Operation
from .effects import DidNotHappen, Happened
from .errors import EffectUnknown, IdempotencyError, OperationNotFound, PermanentError
from .keys import OperationId
from .logs import log
from .message import Message
from .records import Claimed
from .runtime import Runtime

# Enough for a sentence and a ticket number.
REASON_LIMIT = 500

_AUDIT = """
INSERT INTO idempotency.audit
    (actor, action, tenant, operation, key, generation, fence_before, fence_after, reason, details)
VALUES (%(actor)s, %(action)s, %(tenant)s, %(operation)s, %(key)s, %(generation)s, %(before)s, %(after)s, %(reason)s,
        %(details)s::jsonb)
"""

# Everywhere that an accepted operation can be known from.
_FIND = """
SELECT DISTINCT tenant, operation, key FROM (
    SELECT tenant, operation, key FROM idempotency.records
    UNION ALL SELECT tenant, operation, key FROM idempotency.outbox
    UNION ALL SELECT tenant, operation, key FROM idempotency.dead_letters
    UNION ALL SELECT tenant, operation, key FROM idempotency.audit
) known
WHERE key = %(key)s AND (%(operation)s::text IS NULL OR operation = %(operation)s)
  AND (%(tenant)s::text IS NULL OR tenant = %(tenant)s)
ORDER BY tenant, operation LIMIT 20
"""

_READ = """
SELECT status, fence FROM idempotency.records
WHERE tenant = %(tenant)s AND operation = %(operation)s AND key = %(key)s
"""

_ACCEPTED = """
SELECT fingerprint, message, queue FROM idempotency.outbox
WHERE tenant = %(tenant)s AND operation = %(operation)s AND key = %(key)s
ORDER BY id LIMIT 1
"""


class ChangeRefused(IdempotencyError):
    """The change cannot be made; the message says why. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class Shown:
    """An operation as a person was shown it: what they change must still be this."""

    id: OperationId
    status: str  # "accepted": in the outbox, without a record yet
    fence: int | None


@dataclass(frozen=True, slots=True)
class Change:
    """Who changes something, and why."""

    actor: str
    reason: str

    def __post_init__(self) -> None:
        if not 0 < len(self.actor.strip()) <= 255:
            raise ChangeRefused("--as: 1 to 255 characters")
        if not 0 < len(self.reason.strip()) <= REASON_LIMIT:
            raise ChangeRefused(f"--reason: 1 to {REASON_LIMIT} characters, got {len(self.reason)}")


# ---------------------------------------------------------------- find


def find(connection: Connection, key: str, *, operation: str | None = None, tenant: str | None = None) -> OperationId:
    """Find the one operation of a key. Raises `OperationNotFound`, and `ChangeRefused` listing the choices."""
    rows = connection.exec_driver_sql(_FIND, {"key": key, "operation": operation, "tenant": tenant})
    found = records.keys_of(rows.all())
    if not found:
        raise OperationNotFound(f"key {key!r}: no operation has it")
    if len(found) > 1:
        choices = "; ".join(f"--operation {id.operation} --tenant {id.tenant}" for id in found)
        raise ChangeRefused(f"key {key!r}: {len(found)} operations have it, choose one: {choices}")
    return found[0]


def read(connection: Connection, id: OperationId) -> Shown:
    """Read what a change will be guarded by. Raises `OperationNotFound`."""
    row = connection.exec_driver_sql(_READ, _names(id)).one_or_none()
    if row is not None:
        return Shown(id, row.status, row.fence)
    if connection.exec_driver_sql(_ACCEPTED, _names(id)).one_or_none() is None:
        raise OperationNotFound(f"{id.operation} {id.key}: has no record any more")
    return Shown(id, "accepted", None)


# ---------------------------------------------------------------- change


def release(app: Celery, shown: Shown, change: Change) -> None:
    """Take an operation from its holder and deliver it again now. Raises `ChangeRefused`.

    For a holder that is alive but will not end: it finds its lease lost and its writes match nothing. What it has
    called outside is found begun by the next attempt. The attempt stays used.
    """
    with Runtime.of(app).engine.begin() as connection:
        row = _locked(connection, shown, "release", "started")
        released = records.release(connection, _claimed(shown.id, row), delay=0.0, error=None)
        assert released  # the row is locked, and it is the one that was shown
        audit(connection, change, "release", shown.id, row, details={"holder": row.locked_by})


def cancel(app: Celery, shown: Shown, change: Change) -> None:
    """End an operation that has not begun, or waits for its next attempt, as failed with the code `cancelled`.

    The record, the dead letter, the rows of the task's `on_failed` and the audit row are one commit; a delivery that
    is still on its way finds the failure. Raises `ChangeRefused`.
    """
    runtime = Runtime.of(app)
    with runtime.engine.begin() as connection:
        if shown.status == "accepted":
            _open_unclaimed(connection, runtime, shown.id)
            status, before = "released", None
        else:
            status, before = shown.status, shown.fence
        row = _locked(connection, shown, "cancel", "released", status=status, fence=before)
        error = PermanentError(change.reason, "cancelled")
        policy, arguments, broken = _task_of(app, runtime, row)
        if broken is None:
            broken = _on_failed(connection, policy, shown.id, arguments, row.attempts, error)
        if broken is not None:
            log.error("on_failed_error", error=broken, operation=shown.id.operation, key=shown.id.key)
        described = records.error_text(error.code, change.reason)
        dead_letters.store_failure(
            connection,
            shown.id,
            _delivery(shown.id, row, arguments),
            _claimed(shown.id, row),
            reason=error.code if broken is None else "on_failed_error",
            last_error=described,
            service=runtime.settings.service,
        )
        fence = records.cancel(
            connection,
            shown.id,
            fence=row.fence,
            error=described,
            response_code=RESPONSE_FAILED,
            retention=policy.retention_failed,
        )
        details = {"was": shown.status} | ({} if broken is None else {"on_failed_error": broken})
        audit(connection, change, "cancel", shown.id, row, fence=fence, details=details)


def resolve_effect(app: Celery, shown: Shown, name: str, outcome: Happened | DidNotHappen, change: Change) -> None:
    """Record what a person found out about an effect whose outcome nobody knew. Replay its dead letter to go on.

    Happened: the next attempt gets the result and calls nothing. DidNotHappen: it calls, under the effect's next key.
    Only for an operation that has failed as `effect_unknown`. Raises `ChangeRefused`, and `InvalidResult`.
    """
    runtime = Runtime.of(app)
    word: dict[str, Any] = {"state": "not_happened"}
    if isinstance(outcome, Happened):
        limit = runtime.settings.result_limit
        word = {"state": "done", "result": results.to_text(outcome.result, limit=limit, what=f"result of {name!r}")}
    with runtime.engine.begin() as connection:
        row = _locked(connection, shown, "resolve an effect of", "failed")
        code = records.error_fields(row.error)["code"]
        if code != EffectUnknown.default_code:
            raise ChangeRefused(
                f"{_called(shown.id)}: failed as {code}; only {EffectUnknown.default_code} is resolved by hand"
            )
        state = row.effects.get(name, {}).get("state")
        if state is None:
            known = ", ".join(sorted(row.effects)) or "none"
            raise ChangeRefused(f"{_called(shown.id)}: has no effect {name!r}; it has: {known}")
        if state != "begun":
            raise ChangeRefused(f"{_called(shown.id)}: effect {name!r} is {state}, so its outcome is known")
        records.resolve_effect(connection, shown.id, fence=row.fence, name=name, change=word)
        audit(connection, change, "resolve", shown.id, row, details={"effect": name, "state": word["state"]})


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
    connection.exec_driver_sql(
        _AUDIT,
        (_names(id) if id is not None else {"tenant": None, "operation": None, "key": None})
        | {
            "actor": change.actor,
            "action": action,
            "generation": row and row.generation,
            "before": row and row.fence,
            "after": (row and row.fence) if fence is None else fence,
            "reason": change.reason,
            "details": json.dumps({name: _storable(value) for name, value in (details or {}).items()}),
        },
    )
    log.info("operator_change", action=action, actor=change.actor, operation=id and id.operation, key=id and id.key)


def _storable(value: Any) -> Any:
    """What a jsonb column takes: NUL and half a surrogate pair are JSON, and no text to Postgres."""
    return value.replace("\0", "\ufffd").encode("utf-8", "replace").decode() if isinstance(value, str) else value


# ---------------------------------------------------------------- how


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
    row = records.read_locked(connection, id)
    if row is None:
        raise ChangeRefused(f"{_called(id)}: was {status} and has been purged meanwhile")
    expected = shown.fence if fence is None else fence
    if row.status != status or (expected is not None and row.fence != expected):
        raise ChangeRefused(f"{_called(id)}: was {shown.status} when shown and is {row.status} now; look again")
    return row


def _open_unclaimed(connection: Connection, runtime: Runtime, id: OperationId) -> None:
    """Give an operation that is only in the outbox its record, under the fingerprint that its deliveries have."""
    # A replay and an attempt that was given back count from 0 again: the claim alone does not tell them from new.
    if records.read_locked(connection, id) is not None:
        raise ChangeRefused(f"{_called(id)}: was accepted when shown and has begun meanwhile; look again")
    sent = connection.exec_driver_sql(_ACCEPTED, _names(id)).one_or_none()
    if sent is None:
        raise ChangeRefused(f"{_called(id)}: has been purged meanwhile")
    answer = records.claim(
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
        raise ChangeRefused(f"{_called(id)}: was accepted when shown and has begun meanwhile; look again")
    records.release(connection, answer, delay=0.0, error=None, give_back=True, deliver=False)


def _task_of(app: Celery, runtime: Runtime, row: Row[Any]) -> tuple[Policy, dict[str, Any], str | None]:
    """How the operation's task wants to end, its arguments by name, and why they could not be read."""
    app.loader.import_default_modules()
    task = app.tasks.get(row.operation)
    if task is None or not hasattr(task, "retention_failed"):
        settings = runtime.settings
        unknown = Policy(settings.max_attempts, settings.retention_completed, settings.retention_failed)
        return unknown, {}, None
    policy = Policy.of(task, runtime.settings)
    try:
        args, kwargs, _ = loads(Message.from_text(row.message).body)
        return policy, keys.bind(task._signature, args, kwargs), None
    except Exception as error:  # another version's message
        return policy, {}, describe(error)


def _on_failed(
    connection: Connection,
    policy: Policy,
    id: OperationId,
    arguments: dict[str, Any],
    attempts: int,
    error: PermanentError,
) -> str | None:
    """Run the task's `on_failed` as a failing attempt does. Returns what was wrong with it."""
    if policy.on_failed is None:
        return None
    operation = Operation(id.tenant, id.operation, id.key, arguments, attempts)
    with AttemptSession(connection, expire_on_commit=False, join_transaction_mode="rollback_only") as session:
        try:
            with session.begin_nested():
                policy.on_failed(session, operation, error)
        except OperationalError:
            raise  # the database is to blame: nothing is changed
        except Exception as broken:
            return describe(broken)
    return None


def _delivery(id: OperationId, row: Row[Any], arguments: dict[str, Any]) -> Delivery:
    headers = Message.from_text(row.message).headers
    return Delivery(id, row.fingerprint, arguments, str(headers.get("id", "")), row.message, headers, row.queue)


def _claimed(id: OperationId, row: Row[Any]) -> Claimed:
    return Claimed(id, row.fence, row.token or "", row.attempts, row.generation, 0.0, row.effects, False)


def _called(id: OperationId) -> str:
    return f"{id.operation} {id.key}"


def _names(id: OperationId) -> dict[str, str]:
    return {"tenant": id.tenant, "operation": id.operation, "key": id.key}
