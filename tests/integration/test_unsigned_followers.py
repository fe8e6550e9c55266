"""What follows a plain task, whose message nobody has to sign."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery
from sqlalchemy import Connection, text

from tests.integration.test_signed_messages import bank, environment  # noqa: F401
from tests.support import bank as b
from tests.support.dead_messages import body_of, headers, publish
from tests.support.processes import Processes, eventually

VICTIM = {
    "task": b.deposit.name, "args": ["victim"], "kwargs": {}, "options": {"idempotency_key": "squatted", "tenant": "acme"},
    "subtask_type": None, "immutable": True,
}  # fmt: skip


# Other ways in which a worker calls what its message names.
OTHERS = ("callbacks", "errbacks", "starmap")


@pytest.mark.parametrize("way", ["chain", *(pytest.param(way, marks=pytest.mark.long) for way in OTHERS)])
def test_what_somebody_else_has_published_runs_no_operation_by_way_of_a_plain_task(
    bank: Celery,  # noqa: F811
    processes: Processes,
    entries: Callable[[str], int],
    connection: Connection,
    way: str,
) -> None:
    """Its worker would call the other task, and sign that call itself."""
    processes.worker()
    publish(bank, body_of("directly"), headers=headers())  # what is refused, as it should be
    embed: dict[str, Any] = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
    task: str = "celery.accumulate"
    args: list[Any] = []
    match way:
        case "callbacks" | "chain":
            embed[way] = [VICTIM]
        case "errbacks":
            task, args = "celery.chunks", []  # fails for lack of arguments
            embed[way] = [VICTIM]
        case "starmap":
            task, args = "celery.starmap", [{"task": b.deposit.name}, [["victim"]]]
    publish(bank, json.dumps([args, {}, embed]), headers=headers(task=task, id=str(uuid4())))
    # each goes into the queue once the one before has ended, so behind all that was called meanwhile
    for witness in ("first", "second", "third"):
        b.deposit.apply_async((witness,))
        eventually(lambda witness=witness: entries(witness) == 1, what=witness)
    assert entries("directly") == 0
    named = connection.execute(text("SELECT key FROM idempotency.records ORDER BY key")).scalars().all()
    assert (entries("victim"), named) == (0, ["first", "second", "third"])
