"""Who makes a change: the user at the keyboard, or, where money is moved, the person whose token is in the environment."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import typer
from celery import Celery
from sqlalchemy import Connection

from ..application import runtime_of
from ..errors import IdempotencyError, NotAuthenticated
from ..operate.change import Change, called
from ..operate.money import NEEDS_TOKEN, moves_money
from ..operate.people import authenticate
from ..operate.replay import ToConfirm
from ..wire.keys import OperationId
from .terminal import errors, operators_token

# A bulk replay shows so many warnings in full.
SHOWN = 5
# What people are told of a reason to ask.
_SAID = {"declined": "refused for good", "to_be_edited": "to be edited"}


def proven(app: Celery, id: OperationId, change: Change, *, action: str) -> Change:
    """The change of an operation; of one that moves money, by the person who has proved who they are. Raises `NotAuthenticated`."""
    return proven_if(app, change, lambda connection: moves_money(app, connection, id), action=action, what=called(id))


def proven_if(
    app: Celery, change: Change, is_needed: Callable[[Connection], bool], *, action: str, what: str
) -> Change:
    """The same for several operations, which messages call `what`. Raises `NotAuthenticated`."""
    runtime = runtime_of(app)
    with runtime.autocommit() as connection:
        if not is_needed(connection):
            return change
    try:
        person = authenticate(runtime, operators_token(), role="operator", action=action)
    except NotAuthenticated as refusal:
        raise NotAuthenticated(f"{what}: {NEEDS_TOKEN}. {refusal}") from None
    return replace(change, actor=person.name, is_verified=True, check_person=person.check)


def confirm(warnings: str, chosen: int, *, yes: bool) -> None:
    """Show what a replay of `chosen` letters does, and ask. Without a terminal, only `--yes` confirms. Raises `IdempotencyError` otherwise."""
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        them = "it" if chosen == 1 else f"all {chosen}"
        raise IdempotencyError(f"{warnings}\nNothing was replayed. To replay {them}, add --yes")
    errors.print(warnings, markup=False, highlight=False, soft_wrap=True)
    if not typer.confirm("Do it?", err=True):
        raise IdempotencyError("nothing was replayed")


def warnings(found: Sequence[ToConfirm], chosen: int) -> str:
    """What a replay of `chosen` dead letters does to those that were declined or cancelled."""
    lines = [f"dead letter {each.letter}: {each.warning}" for each in found[:SHOWN]]
    if chosen > 1:
        more = "" if len(found) <= SHOWN else f", the first {SHOWN} of them"
        lines.insert(0, f"of {chosen} to be replayed, {counted(found)}{more}:")
    return "\n".join(lines)


def counted(found: Sequence[ToConfirm]) -> str:
    """How many were refused for good, by a provider or their own code, how many cancelled, and how many are to be edited."""
    kinds = Counter(_SAID.get(each.was, each.was) for each in found)
    return ", ".join(f"{kinds[was]} {'was' if kinds[was] == 1 else 'were'} {was}" for was in sorted(kinds))
