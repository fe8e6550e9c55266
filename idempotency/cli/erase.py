"""`idempotency erase`: a person's data leaves an operation, and its key stays spent.

Exit status 0: done. 1: refused or not found, with one line on stderr. 2: the command line is wrong.
"""

from __future__ import annotations

from dataclasses import asdict

import typer

from ..application import runtime_of
from ..operate import erase as operate
from ..operate.change import Change, find
from .options import (
    ActorOption,
    AppOption,
    JsonOption,
    KeyArgument,
    ReasonOption,
    RequestOption,
    TaskOption,
    TenantOption,
)
from .proof import proven
from .terminal import application, print_json, print_line

commands = typer.Typer()


@commands.command("erase")
def erase_operation(
    key: KeyArgument,
    reason: ReasonOption,
    actor: ActorOption,
    app: AppOption = "",
    task: TaskOption = None,
    tenant: TenantOption = None,
    request_id: RequestOption = None,
    as_json: JsonOption = False,
) -> None:
    """Erase the data of an operation that has ended, for good. Its key stays spent."""
    celery = application(app)
    runtime = runtime_of(celery)
    with runtime.autocommit() as connection:
        id = find(connection, key, runtime.settings.service, task=task, tenant=tenant)
    change = proven(celery, id, Change(actor, reason, request_id), action="erase")
    erased = operate.erase(celery, id, change)
    if as_json:
        operations = [asdict(each) for each in erased.operations]
        print_json({"change": "erased", "operations": operations, "not_found": erased.not_found})
        return
    for each in erased.operations:
        print_line(f"erased: {each.task} {each.key}")
    for name in erased.not_found:
        print_line(
            f"not found in idempotency_large_results_at; if that was changed, delete it in the place before: {name}"
        )
