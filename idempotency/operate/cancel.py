"""Cancel: end an operation that is not running."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from celery import Celery
from sqlalchemy import Connection, Row

from ..application import runtime_of
from ..attempt import conclusions
from ..attempt.conclusions import NotDeclined
from ..attempt.opening import open_record
from ..attempt.runtime import Runtime
from ..errors import ChangeRefused, PermanentError
from ..framework import framework
from ..observe import metrics
from ..reasons import CANCELLED, UNPUBLISHABLE
from ..store import dead_letters, discards, edits, ends, letters, operations, saga_changes, stream_letters, unpublished
from ..store.answers import claim_of
from ..store.statements import repeatable
from ..streams.declaring import TASK_PREFIX
from ..wire.delivery import Delivery
from ..wire.keys import OperationId
from .change import Change, Shown, audit, called, locked, repeated
from .ending import conclude, skipping_what_breaks, task_of
from .money import check_verified
from .saga import is_saga


def cancel(
    app: Celery, shown: Shown, change: Change, *, may_have_happened: bool = False, without_task: bool = False
) -> PermanentError:
    """End an operation that has not begun or waits for its next attempt: it fails with the code `cancelled`.

    The record, the dead letter, undos, the rows of the task's `on_failed` and the audit row are one commit; a delivery
    that is still on its way, or was to come later and goes now, finds the failure. Returns the error it has ended with.

    Raises `ChangeRefused`, also if an effect has happened or may have, unless `may_have_happened`: then it ends as
    `effect_unknown` or `unfinished`; and if the application has no such task, unless `without_task`: then neither undos nor
    `on_failed` run.
    """
    runtime = runtime_of(app)

    @repeatable
    def end(skip: str | None) -> PermanentError:
        with runtime.engine.begin() as connection:
            if (done := repeated(connection, change, "cancel", shown.id)) is not None:
                return PermanentError(change.reason, done.details["ended_as"])
            check_verified(app, connection, shown.id, change)
            is_unpublishable = operations.is_unpublishable(connection, shown.id)
            if is_saga(app, connection, shown.id) and not (
                (is_unpublishable or _has_died(connection, shown))
                and saga_changes.end_with_nothing_to_undo(connection, shown.id)
            ):
                raise ChangeRefused(
                    f"{called(shown.id)}: is a saga, which has to be undone first: {framework().command} saga cancel"
                )
            row = _locked(connection, runtime, shown)
            _check_no_effect(shown.id, row, may_have_happened=may_have_happened)
            policy, arguments, broken = task_of(app, runtime, connection, row, without_task=without_task)
            error = NotDeclined(change.reason, CANCELLED)
            concluded = conclude(connection, shown.id, row, error, policy, arguments, skip or broken)
            has_not_begun = shown.status == "accepted" or edits.is_waiting_for_person(connection, shown.id)
            discards.supersede(connection, shown.id, None if has_not_begun else UNPUBLISHABLE)
            letters.store_failure(
                connection,
                _delivery_of(connection, shown.id, row, arguments),
                claim_of(shown.id, row),
                reason=concluded.reason,
                last_error=concluded.end.error,
                service=runtime.settings.service,
            )
            fence = ends.cancel(connection, shown.id, concluded.end, fence=row.fence, retention=policy.retention_failed)
            unpublished.hasten(connection, shown.id, row.fingerprint, service=runtime.settings.service)
            details = {"was": shown.status, "ended_as": concluded.error.code}
            details |= {} if concluded.broken is None else {"on_failed_error": concluded.broken}
            audit(connection, change, "cancel", shown.id, row, fence=fence, details=details)
        metrics.count_failed(shown.id.task, concluded.error.code)
        return concluded.error

    return skipping_what_breaks(end)


def _delivery_of(connection: Connection, id: OperationId, row: Row[Any], arguments: Mapping[str, Any]) -> Delivery:
    """What the letter keeps of the operation's message. Of a stream's, what an earlier letter has: else the stream adds it later."""
    delivery = letters.kept_delivery(id, row, arguments)
    if not id.task.startswith(TASK_PREFIX) or (kept := stream_letters.kept_message(connection, id)) is None:
        return delivery
    return replace(delivery, headers=json.loads(kept))


def _locked(connection: Connection, runtime: Runtime, shown: Shown) -> Any:
    """The record, locked; one that has not begun gets its record first."""
    if shown.status != "accepted":
        return locked(connection, shown, "cancel", "released", status=shown.status, fence=shown.fence)
    _open_record(connection, runtime, shown.id)
    return locked(connection, shown, "cancel", "released", status="released")


def _has_died(connection: Connection, shown: Shown) -> bool:
    """Whether the message of an operation that has not begun is a dead letter."""
    return shown.status == "accepted" and dead_letters.open_letter(connection, shown.id) is not None


def _open_record(connection: Connection, runtime: Runtime, id: OperationId) -> None:
    """Give an operation that is only in the outbox its record, under the fingerprint of its deliveries."""
    # Replayed operations and attempts given back count from 0 again, so the claim alone cannot tell them from new ones.
    if operations.read_locked(connection, id) is not None:
        raise ChangeRefused(f"{called(id)}: was accepted when shown and has begun since; look again")
    sent = operations.accepted(connection, id, runtime.settings.service)
    if sent is None:
        raise ChangeRefused(f"{called(id)}: has since been purged")
    if not open_record(
        connection, runtime, id, service=None, fingerprint=sent.fingerprint, message=sent.message, queue=sent.queue
    ):
        raise ChangeRefused(f"{called(id)}: was accepted when shown and has begun since; look again")


def _check_no_effect(id: OperationId, row: Row[Any], *, may_have_happened: bool) -> None:
    acted = sorted(name for name, entry in row.effects.items() if conclusions.has_acted({name: entry}))
    if acted and not may_have_happened:
        raise ChangeRefused(
            f"{called(id)}: effect {', '.join(acted)} has happened or may have; let it finish, "
            "or cancel it with --may-have-happened"
        )
