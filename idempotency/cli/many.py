"""A change of one dead letter, or of many that filters match: each in its own transaction, so that a refusal stops no other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer
from celery import Celery
from rich.progress import track
from sqlalchemy.exc import DBAPIError

from ..application import runtime_of
from ..errors import IdempotencyError
from ..operate.change import check_service
from ..operate.replay import ToConfirm
from ..store import dead_letters
from ..store.dead_letters import BULK_LIMIT, Selection
from ..store.statements import describe
from ..store.sweeps import is_row_error
from ..wire.keys import OperationId
from .proof import counted
from .terminal import check_known, console, errors, plain, print_json, print_line

IdsArgument = Annotated[list[int] | None, typer.Argument(help="Dead letters by number.", metavar="[ID]...")]
TaskOption = Annotated[str | None, typer.Option(help="Only this task, by its name or the end of it after a dot.")]
ErrorOption = Annotated[str | None, typer.Option(help="Only this reason, as `list` shows it.")]
TenantOption = Annotated[str | None, typer.Option(help="Only this tenant.")]
LimitOption = Annotated[int, typer.Option(min=1, max=BULK_LIMIT, help="Refuse if the filters match more than this.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Print which ones, and change nothing.")]


def choose(app: Celery, ids: list[int] | None, selection: Selection, limit: int) -> list[int]:
    if ids:
        if len(ids) > limit:
            raise IdempotencyError(f"{len(ids)} dead letters named, --limit is {limit}")
        check_service(runtime_of(app), ids, selection.service)
        return ids
    if selection in (Selection("open"), Selection("open", archived=True)):
        raise typer.BadParameter("name dead letters, or choose by --task, --error, --service or --tenant")
    runtime = runtime_of(app)
    with runtime.autocommit() as connection:
        own = replace(selection, service=selection.service or runtime.settings.service)
        chosen = dead_letters.select_ids(connection, own, limit=limit)
    if not chosen:
        check_known(app, selection.task, "open dead letter")
    return chosen


def single_of(ids: list[int] | None) -> int | None:
    return ids[0] if ids is not None and len(ids) == 1 else None


def document_of(letter: int, done: str, id: OperationId | None) -> dict[str, Any]:
    return {done: letter} | ({} if id is None else {"task": id.task, "key": id.key})


def each_of(
    chosen: list[int],
    work: Callable[[int], dict[str, Any]],
    done: str,
    *,
    single: int | None,
    dry_run: bool,
    as_json: bool,
    unconfirmed: Sequence[ToConfirm] = (),
    left: Sequence[ToConfirm] = (),
) -> None:
    """Do the work for each, in its own transaction; a refusal does not stop the others. `left`: what the work will refuse."""
    if dry_run:
        chosen = [letter for letter in chosen if letter not in {each.letter for each in left}]
        if as_json:
            found = [*unconfirmed, *left]
            kinds = {one.was: [each.letter for each in found if each.was == one.was] for one in found}
            print_json({"dry_run": True, done: chosen} | kinds)
        else:
            named = f" (dead letters {', '.join(map(str, chosen))})" if chosen else ""
            some = f"; of these, {counted(unconfirmed)}" if unconfirmed else ""
            out = f"; left out: {counted(left)}" if left else ""
            console.print(f"would be {done}: {len(chosen)}{named}{some}{out}", soft_wrap=True)
        return
    if single is not None:
        document = work(single)
        if as_json:
            print_json(document)
        else:
            named = " ".join(str(document[name]) for name in ("task", "key") if name in document)
            print_line(f"dead letter {single} {done} {named}".rstrip())
        return
    succeeded: list[int] = []
    refused: list[dict[str, Any]] = []
    bar: Iterable[int] = chosen
    if not as_json:
        bar = track(chosen, description=done, console=errors, transient=True)
    for letter in bar:
        try:
            work(letter)
            succeeded.append(letter)
        except (IdempotencyError, DBAPIError) as error:
            if isinstance(error, DBAPIError) and not is_row_error(error):
                raise
            why = describe(error) if isinstance(error, DBAPIError) else str(error)
            refused.append({"letter": letter, "why": why})
            errors.print(
                plain(f"idempotency: dead letter {letter}: {why}" if why != str(error) else f"idempotency: {why}"),
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
    if as_json:
        print_json({done: succeeded, "refused": refused})
    else:
        console.print(f"{done}: {len(succeeded)}, refused: {len(refused)}")
    if refused:
        raise typer.Exit(1)
