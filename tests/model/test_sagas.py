"""Random programs of sagas; and short ones that tell when a safeguard is gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from celery import Celery
from hypothesis.stateful import run_state_machine_as_test
from sqlalchemy import Engine

from idempotency.store import saga_steps, sagas
from idempotency.store.record import RUNS
from tests.controls.safeguards import Removal
from tests.model.sagas import SAGAS, Sagas
from tests.model.test_state_machine import EXAMPLES, programs

# A program of sagas takes more statements than one of operations.
PROGRAMS = max(1, EXAMPLES * 2 // 5)
S = SAGAS[0]
Program = Sequence[Callable[[Sagas], object]]


@pytest.fixture
def machine(bank: Celery, engine: Engine) -> Iterator[Sagas]:
    with engine.connect() as connection:
        yield Sagas(bank, connection)


def run(machine: Sagas, program: Program) -> None:
    for step in program:
        step(machine)
        machine.check()
        machine.nothing_is_used_or_undone_twice()


def attempt(machine: Sagas) -> None:
    machine.attempt(S)


def overtaken(machine: Sagas) -> None:
    """Its lease is over, and another attempt holds it."""
    machine._age(S)
    machine.attempt(S)


def cancelled(machine: Sagas) -> None:
    machine.cancel(S)


FENCE = " AND fence = %(fence)s AND token = %(token)s"
# What a safeguard is for, the program that shows it, and the piece of a statement that it is.
SAFEGUARDS: dict[str, tuple[Program, Any, str, str]] = {
    "nothing forward once it is undone": (
        [attempt, cancelled, lambda m: m.step(0, "step", False)],
        saga_steps,
        " AND status = %(status)s FOR SHARE",
        " FOR SHARE",
    ),
    "no row of a former holder": (
        [attempt, overtaken, lambda m: m.step(1, "step", False)],
        saga_steps,
        FENCE,
        "",
    ),
    "no wait of a former holder": ([attempt, overtaken, lambda m: m.give_up(1)], sagas, FENCE, ""),
    "a signal between reading and waiting": (
        [
            attempt,
            lambda m: m.call(0, 1, False),
            cancelled,
            attempt,
            lambda m: m.a_call_ends(0, True),
            lambda m: m.go_on(0),
        ],
        sagas,
        "CASE WHEN signals = %(signals)s THEN %(waits_for)s END",
        "%(waits_for)s",
    ),
    "one reason to undo": (
        [attempt, cancelled, lambda m: m.give_up(0)],
        sagas,
        f" AND {RUNS} RETURNING id",
        " RETURNING id",
    ),
    "no success once it is cancelled": ([attempt, cancelled, lambda m: m.go_on(0)], sagas, " AND status = %(was)s", ""),
    "an event ends one wait": (
        [attempt, lambda m: m.an_event_is_there(0, 2)],
        saga_steps,
        "e.id > coalesce(",
        "e.id > least(",
    ),
    "the record of what has ended a wait": (
        [
            attempt,
            lambda m: m.wait_for_event(0, False),
            lambda m: m.an_event_comes(None),
            attempt,
            lambda m: m.wait_for_event(0, False),
        ],
        saga_steps,
        "SET state = %(state)s, result = %(result)s, event_id = %(event_id)s",
        "SET result = %(result)s, event_id = %(event_id)s",
    ),
    "a cancel wakes": (
        [attempt, lambda m: m.wait_for_event(0, False), cancelled],
        sagas,
        "SELECT idempotency.resume_saga(cancelled)",
        "SELECT 1",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", SAFEGUARDS)
def test_a_program_of_sagas_that_needs_its_safeguard_passes_with_it(machine: Sagas, name: str) -> None:
    run(machine, SAFEGUARDS[name][0])


@pytest.mark.long
@pytest.mark.few(2)
@pytest.mark.parametrize("name", SAFEGUARDS)
def test_a_program_of_sagas_tells_when_its_safeguard_is_gone(machine: Sagas, name: str) -> None:
    program, module, old, new = SAFEGUARDS[name]
    run(machine, program[:-1])
    removal = Removal()
    removal.edit(module, old, new)
    try:
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            run(machine, program[-1:])
    finally:
        removal.undo()


@pytest.mark.long
@pytest.mark.quick
@pytest.mark.timeout(max(600, 10 * EXAMPLES))
def test_what_is_stored_of_sagas_stays_what_the_state_machine_says(bank: Celery, engine: Engine) -> None:
    with engine.connect() as connection:
        run_state_machine_as_test(
            lambda: Sagas(bank, connection),  # type: ignore[arg-type]  # it calls what it is given
            settings=programs(PROGRAMS),
        )
