"""What every change by a person shares: who changes what, that it is still what they were shown, and the audit row.

A change is one transaction with its audit row. An operation is changed only while its record has the status and the
fence that the person was shown; a dead letter is replayed only while it is open and its operation failed in that
generation. Of two operators, or an operator and a worker, one makes the change and the other is refused. A refusal
changes nothing and leaves no row; only a refused token does (`people.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from psycopg.errors import CheckViolation
from sqlalchemy import Connection, Row
from sqlalchemy.exc import IntegrityError

from ..attempt.runtime import Runtime
from ..errors import ChangeRefused, OperationNotFound
from ..observe.logs import log
from ..store import audit as audits
from ..store import dead_letters, erasure, operations
from ..store.statements import driver_error
from ..wire.keys import OperationId

# What to do about a dead letter that a constraint forbids to change.
MOVED = "if its tenant is being moved to another cell, enqueue the work there"
# Enough for a sentence and a ticket number.
REASON_LIMIT = 500


@dataclass(frozen=True, slots=True)
class Shown:
    """An operation as a person was shown it. It is changed only while it is still this."""

    id: OperationId
    status: str  # "accepted": in the outbox, without a record yet
    fence: int | None


# Raises if a person may not make this change any more: given its connection and the operation that it is about.
CheckPerson = Callable[[Connection, OperationId | None], None]


@dataclass(frozen=True, slots=True)
class Change:
    """Who changes something, and why. A change repeated under the same `request_id` is made once.

    `is_verified`: a token has proved who it is, which what moves money needs (`money.py`). `check_person` raises if it does no
    longer.
    """

    actor: str
    reason: str
    request_id: str | None = None
    is_verified: bool = False
    check_person: CheckPerson | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.request_id is not None and not 0 < len(self.request_id) <= 255:
            raise ChangeRefused(f"--request-id: 1 to 255 characters, got {len(self.request_id)}")
        if not 0 < len(self.actor.strip()) <= 255:
            raise ChangeRefused("--as: 1 to 255 characters")
        if not 0 < (length := len(self.reason.strip())) <= REASON_LIMIT:
            raise ChangeRefused(f"--reason: 1 to {REASON_LIMIT} characters, got {length}")
        if "\0" in self.reason + self.actor + (self.request_id or ""):
            raise ChangeRefused(
                "--reason, --as and --request-id: without NUL characters, which Postgres stores in no text"
            )


# ---------------------------------------------------------------- what a person is shown


def find(
    connection: Connection, key: str, service: str, *, task: str | None = None, tenant: str | None = None
) -> OperationId:
    """Find the one operation of `service` that has this key. `task` is the task's name, or its end after a dot.

    Raises `OperationNotFound`, and `ChangeRefused` with the choices if there are several.
    """
    every = operations.find(connection, key, task=task, tenant=tenant, service=service)
    found = [id for id, services in every if not services or service in services]
    if every and not found:
        others = ", ".join(sorted({name for _, services in every for name in services}))
        raise OperationNotFound(f"key {key!r}: no operation of {service!r} has it; this application has: {others}")
    found = [id for id in found if id.task == task] or found  # an exact name wins over the end of a longer one
    if not found:
        if task is not None:
            _check_task(connection, key, service, task, tenant)
        raise OperationNotFound(f"key {key!r}: no operation has it")
    if len(found) > 1:
        choices = "; ".join(f"--task {id.task} --tenant {id.tenant}" for id in found)
        raise ChangeRefused(f"key {key!r}: {len(found)} operations have it, choose one: {choices}")
    return found[0]


def _check_task(connection: Connection, key: str, service: str, task: str, tenant: str | None) -> None:
    """Raise `OperationNotFound` with the tasks of this application that do have the key."""
    every = operations.find(connection, key, task=None, tenant=tenant, service=service)
    if others := sorted({id.task for id, services in every if not services or service in services}):
        raise OperationNotFound(f"key {key!r}: no operation of {task!r} has it, but one of {', '.join(others)} does")


def read(connection: Connection, id: OperationId, service: str) -> Shown:
    """Read what a change will depend on. Raises `OperationNotFound`, and `ChangeRefused` for another application's."""
    row = operations.status_and_fence(connection, id)
    if row is not None and row.service not in (None, service):
        raise ChangeRefused(f"{called(id)}: is an operation of the application {row.service!r}, not of {service!r}")
    if row is not None:
        return Shown(id, row.status, row.fence)
    if operations.accepted(connection, id, service) is None:
        raise OperationNotFound(f"{called(id)}: has neither a record nor a message that waits")
    return Shown(id, "accepted", None)


def check_service(runtime: Runtime, letters: Sequence[int], named: str | None = None) -> None:
    """Raise `ChangeRefused` for a dead letter of an application that is neither this one nor the one named."""
    service = named or runtime.settings.service
    with runtime.autocommit() as connection:
        found = dead_letters.services_of(connection, letters)
    for letter, its in sorted(found.items()):
        if its not in (None, service):
            raise ChangeRefused(f"dead letter {letter}: is of the application {its!r}; name it with --service")


@contextmanager
def refused_by_constraint(what: str, advice: str) -> Iterator[None]:
    """Raise `ChangeRefused` for what a constraint forbids, such as that of a tenant that is moved to another cell (docs/cells.md)."""
    try:
        yield
    except IntegrityError as error:
        if not isinstance(violation := driver_error(error), CheckViolation):
            raise
        named, table = violation.diag.constraint_name, violation.diag.table_name
        raise ChangeRefused(
            f"{what}: the constraint {named} forbids changes of rows in {table}; {advice}, as docs/cells.md says"
        ) from None


def called(id: OperationId) -> str:
    """What messages to people call an operation."""
    return f"{id.task} {id.key}"


# ---------------------------------------------------------------- what a change is made of


def repeated(
    connection: Connection,
    change: Change,
    action: str,
    id: OperationId | None,
    *,
    said: Mapping[str, Any] = MappingProxyType({}),
) -> Row[Any] | None:
    """The audit row of this request, if it has been carried out before.

    Raises `ChangeRefused` if its id was used for something else.
    """
    if change.request_id is None:
        return None
    row = audits.of_request(connection, change.request_id)
    if row is None:
        return None
    same = id is None or (id.tenant, id.task, id.key) == (row.tenant, row.task, row.key)
    if row.action != action or not same or any(row.details.get(name) != value for name, value in said.items()):
        raise ChangeRefused(f"--request-id: was used before, to {row.action} {row.task} {row.key}, and not for this")
    if (row.actor, row.reason) != (change.actor, change.reason):
        raise ChangeRefused("--request-id: was used before, by another person or for another reason")
    return row


def locked(
    connection: Connection,
    shown: Shown,
    verb: str,
    wanted: str,
    *,
    status: str | None = None,
    fence: int | None = None,
) -> Any:
    """The record, locked. Raises `ChangeRefused` unless it is still what was shown, has the status `wanted` and is not erased."""
    id, status = shown.id, status or shown.status
    if status != wanted:
        what = "has not begun or waits for its next attempt" if wanted == "released" else f"is {wanted}"
        raise ChangeRefused(f"{called(id)}: is {status}; can only {verb} what {what}")
    row = operations.read_locked(connection, id)
    if row is None:
        raise ChangeRefused(f"{called(id)}: was {status} and has since been purged")
    expected = shown.fence if fence is None else fence
    if row.status != status or (expected is not None and row.fence != expected):
        raise ChangeRefused(f"{called(id)}: was {shown.status} when shown and is {row.status} now; look again")
    if (at := erasure.erased_at(connection, id)) is not None:
        raise ChangeRefused(f"{called(id)}: its data was erased at {at:%F %T%z}; it stays as it is")
    return row


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
    """Record who did what, and why, in the transaction of the change. `fence` is the new one if the change moved it.

    Raises `NotAuthenticated` for a person who was removed since they proved who they are: many letters take a while. Raises
    `NotAllowed` for one who has other tenants.
    """
    if change.check_person is not None:
        change.check_person(connection, id)
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
