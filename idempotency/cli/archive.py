"""`idempotency dead-letters archive` and `restore`: what nobody means to decide now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from celery import Celery

from ..operate.archive import archive, restore
from ..operate.change import Change
from ..operate.money import letters_move_money
from ..store.dead_letters import Selection
from .many import (
    DryRunOption,
    ErrorOption,
    IdsArgument,
    LimitOption,
    TaskOption,
    TenantOption,
    choose,
    document_of,
    each_of,
    single_of,
)
from .options import ActorOption, AppOption, JsonOption, ReasonOption, RequestOption, ServiceOption
from .proof import proven_if
from .terminal import application, task_named


def archive_letters(
    actor: ActorOption,
    reason: ReasonOption,
    ids: IdsArgument = None,
    task: TaskOption = None,
    error: ErrorOption = None,
    service: ServiceOption = None,
    tenant: TenantOption = None,
    limit: LimitOption = 1000,
    dry_run: DryRunOption = False,
    request_id: RequestOption = None,
    app: AppOption = "",
    as_json: JsonOption = False,
) -> None:
    """Take open dead letters off lists, counts and alarms until they are restored. They stay open, and block what they block.

    Where money is moved: your token, IDEMPOTENCY_TOKEN.
    """
    celery = application(app)
    selection = Selection("open", task_named(celery, task), error, service, tenant)
    letters = choose(celery, ids, selection, limit)
    _change(celery, archive, letters, actor, reason, request_id, "archived", single_of(ids), dry_run, as_json)


def restore_letters(
    actor: ActorOption,
    reason: ReasonOption,
    ids: IdsArgument = None,
    task: TaskOption = None,
    error: ErrorOption = None,
    service: ServiceOption = None,
    tenant: TenantOption = None,
    limit: LimitOption = 1000,
    dry_run: DryRunOption = False,
    request_id: RequestOption = None,
    app: AppOption = "",
    as_json: JsonOption = False,
) -> None:
    """Bring archived dead letters back, to be replayed or discarded. Where money is moved: your token, IDEMPOTENCY_TOKEN."""
    celery = application(app)
    selection = Selection("open", task_named(celery, task), error, service, tenant, archived=True)
    letters = choose(celery, ids, selection, limit)
    _change(celery, restore, letters, actor, reason, request_id, "restored", single_of(ids), dry_run, as_json)


def _change(
    celery: Celery,
    work: Callable[[Celery, int, Change], None],
    letters: list[int],
    actor: str,
    reason: str,
    request_id: str | None,
    done: str,
    single: int | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    by = Change(actor, reason)
    if not dry_run:
        what = "one of these dead letters" if single is None else f"dead letter {single}"
        by = proven_if(
            celery, by, lambda own: letters_move_money(celery, own, letters), action=work.__name__, what=what
        )

    def change_one(letter: int) -> dict[str, Any]:
        id = None if request_id is None else f"{request_id}:{letter}"
        work(celery, letter, replace(by, request_id=id))
        return document_of(letter, done, None)

    each_of(letters, change_one, done, single=single, dry_run=dry_run, as_json=as_json)
