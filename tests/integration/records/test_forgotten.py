"""A claim that is taken back: the record goes, unless something is recorded in it, and only by its holder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Connection, text

from idempotency.store import effects, ends
from idempotency.store.answers import Claimed
from idempotency.wire.keys import OperationId
from tests.integration.records.transitions import complete, fail, release, step
from tests.support.operations import MESSAGE, age, record, started


def altered(held: Claimed, **changes: Any) -> Claimed:
    fields = {name: getattr(held, name) for name in held.__dataclass_fields__}
    return Claimed(**fields | changes)


OTHERS: dict[str, Callable[[Claimed], dict[str, Any]]] = {
    "older fence": lambda held: {"fence": held.fence - 1},
    "newer fence": lambda held: {"fence": held.fence + 1},
    "token": lambda held: {"token": uuid4().hex},
    "tenant": lambda held: {"id": OperationId("another", held.id.task, held.id.key)},
    "task": lambda held: {"id": OperationId(held.id.tenant, "another", held.id.key)},
    "key": lambda held: {"id": OperationId(held.id.tenant, held.id.task, "another")},
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_only_the_holder_takes_its_claim_back(
    connection: Connection, other: Callable[[Claimed], dict[str, Any]]
) -> None:
    held = started(connection, message="")
    assert not ends.forget(connection, altered(held, **other(held)))
    assert record(connection, held.id) is not None
    assert ends.forget(connection, held)
    assert record(connection, held.id) is None
    assert not ends.forget(connection, held)
    again = started(connection, held.id, message="", fingerprint="v1:another")
    assert again.fence > held.fence
    assert not ends.forget(connection, held)


def taken_over(connection: Connection, held: Claimed) -> None:
    age(connection, held.id, locked_until=-1)
    started(connection, held.id, message="")


def stepped(connection: Connection, held: Claimed) -> None:
    assert step(connection, held)


def begun(connection: Connection, held: Claimed) -> None:
    assert effects.begin_effect(connection, held, "charge", {"state": "begun"}) is not None


def given_a_message(connection: Connection, held: Claimed) -> None:
    connection.execute(
        text("UPDATE idempotency.records SET message = :m WHERE key = :k"), {"m": MESSAGE, "k": held.id.key}
    )


def replayed(connection: Connection, held: Claimed) -> None:
    """A person has opened it again: its dead letter is of an earlier generation."""
    connection.execute(text("UPDATE idempotency.records SET generation = 2 WHERE key = :k"), {"k": held.id.key})


@pytest.mark.parametrize(
    "meanwhile",
    [complete, release, taken_over, stepped, begun, given_a_message, replayed, lambda c, h: begun(c, h) or fail(c, h)],
)
def test_what_is_recorded_is_not_forgotten(
    connection: Connection, meanwhile: Callable[[Connection, Claimed], object]
) -> None:
    held = started(connection, message="")
    meanwhile(connection, held)
    before = record(connection, held.id)
    assert not ends.forget(connection, held)
    assert record(connection, held.id) == before
