"""Random programs, and those that have failed once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from celery import Celery
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.stateful import run_state_machine_as_test
from sqlalchemy import Engine

from tests.model.choices import ACME
from tests.model.people import People

# Ten seconds are left for each: a time limit that ends a program looks to Hypothesis like a failure that does not come again.
EXAMPLES = int(os.environ.get("STATE_MACHINE_EXAMPLES", "20"))
SEEDS = Path(__file__).parents[1] / "seeds"


def programs(number: int) -> settings:
    """So many random programs. The shortest one that has failed is kept, and tried first from then on."""
    return settings(
        max_examples=number,
        stateful_step_count=40,
        deadline=None,
        database=DirectoryBasedExampleDatabase(SEEDS),
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )


class Machine(People):
    """Everything that may happen, in any order."""


@pytest.fixture
def machine(bank: Celery, engine: Engine) -> Iterator[Machine]:
    with engine.connect() as connection:
        yield Machine(bank, connection)


def run(machine: Machine, *steps: Callable[[], None]) -> None:
    for step in steps:
        step()
        machine.check()


# ---------------------------------------------------------------- programs that have failed


@pytest.mark.long
def test_a_replayed_letter_does_not_swallow_the_next_failure_of_its_row(machine: Machine) -> None:
    run(
        machine,
        lambda: machine.enqueue(ACME, 1, later=False, sent=True),
        lambda: machine.give_up(ACME, 1, 0, unknown=False),
        lambda: machine.replay(0, twice=True),
        # a late copy of the first message, while the replay waits; and then the replay's own
        lambda: machine.give_up(ACME, 1, 1, unknown=False),
        lambda: machine.relay_leases(["confirmed"]),
        lambda: machine.give_up(ACME, 1, 0, unknown=False),
        lambda: machine.replay(0, twice=True),
    )


@pytest.mark.long
@pytest.mark.parametrize("later", [True, False])
def test_a_second_call_after_a_replay_hides_none_of_its_deliveries(machine: Machine, later: bool) -> None:
    run(
        machine,
        lambda: machine.give_up(ACME, 1, None, unknown=False),
        lambda: machine.replay(0, twice=False),
        lambda: machine.enqueue(ACME, 1, later=later, sent=True),
        lambda: machine.resend(empty=True, late=True),
        lambda: machine.give_up(ACME, 1, 1, unknown=False),
    )


def test_the_letter_of_an_unknown_task_becomes_that_of_its_operation(machine: Machine) -> None:
    """An old worker did not know the task; a new one knew it, and died of it."""
    run(
        machine,
        lambda: machine.enqueue(ACME, 1, later=False, sent=True),
        lambda: machine.give_up(ACME, 1, 0, unknown=True),
        lambda: machine.give_up(ACME, 1, 0, unknown=False),
        lambda: machine.replay(0, twice=True),
    )


def test_what_was_accepted_when_shown_and_replayed_since_is_not_cancelled(machine: Machine) -> None:
    run(
        machine,
        lambda: machine.enqueue(ACME, 1, later=False, sent=True),
        lambda: machine.look(ACME),
        lambda: machine.give_up(ACME, 1, 0, unknown=False),
        lambda: machine.replay(0, twice=True),
        lambda: machine.change(0, "cancel"),
    )


def test_of_two_requests_of_which_one_was_discarded_the_other_is_cancelled(machine: Machine) -> None:
    run(
        machine,
        lambda: machine.enqueue(ACME, 2, later=False, sent=True),
        lambda: machine.look(ACME),
        lambda: machine.give_up(ACME, 1, 0, unknown=True),
        lambda: machine.enqueue(ACME, 1, later=False, sent=False),
        lambda: machine.discard(0, asks=True, approves="bo"),
        lambda: machine.change(0, "cancel"),
    )


def test_a_cancelled_operation_leaves_no_letter_of_its_message(machine: Machine) -> None:
    run(
        machine,
        lambda: machine.enqueue(ACME, 2, later=False, sent=True),
        lambda: machine.look(ACME),
        lambda: machine.give_up(ACME, 1, 0, unknown=True),
        lambda: machine.enqueue(ACME, 1, later=False, sent=False),
        lambda: machine.change(0, "cancel"),
    )


def test_a_replay_that_could_not_be_published_is_replayed(machine: Machine) -> None:
    run(
        machine,
        lambda: machine.give_up(ACME, 1, None, unknown=False),
        lambda: machine.replay(0, twice=False),
        lambda: machine.relay_leases(None),
        lambda: machine.the_outbox_ages(failed_before=True),
        lambda: machine.relay_leases(["own fault"]),
        lambda: machine.replay(0, twice=True),
        lambda: machine.relay_leases(["confirmed"]),
    )
    assert [letter.status for letter in machine.letters.values()] == ["replayed", "replayed"]


def test_what_a_request_was_before_an_edit_is_forgotten_with_its_operation(machine: Machine) -> None:
    """Its first message comes once more, after the purge and another request: it is of other arguments then, and people are told."""
    run(
        machine,
        lambda: machine.give_up(ACME, 2, None, unknown=False),
        lambda: machine.edit(0),
        lambda: machine.replay(0, twice=False),
        lambda: machine.live(ACME, [1], sent=True, purged=True),
        lambda: machine.claim(ACME, 1, dies=False),
        lambda: machine.give_up(ACME, 2, None, unknown=False),
    )
    assert [letter.reason for letter in machine.letters.values() if letter.status == "open"] == ["fingerprint_mismatch"]


def test_a_request_to_discard_is_of_what_the_letter_was(machine: Machine) -> None:
    """It died as a task that is not known, someone asks to discard it, and a later copy of its message is refused as a whole."""
    run(
        machine,
        lambda: machine.enqueue(ACME, 1, later=False, sent=True),
        lambda: machine.give_up(ACME, 1, 0, unknown=True),
        lambda: machine.discard(0, asks=True, approves=None),
        lambda: machine.give_up(ACME, 1, 0, unknown=False),
        lambda: machine.edit(0),
        lambda: machine.discard(0, asks=True, approves="bo"),
    )
    assert [letter.status for letter in machine.letters.values()] == ["discarded"]


# ---------------------------------------------------------------- all the others


@pytest.mark.long
@pytest.mark.quick
@pytest.mark.timeout(max(600, 10 * EXAMPLES))
def test_record_outbox_and_dead_letters_stay_what_the_model_says(bank: Celery, engine: Engine) -> None:
    with engine.connect() as connection:
        run_state_machine_as_test(
            lambda: Machine(bank, connection),  # type: ignore[arg-type]  # it calls what it is given
            settings=programs(EXAMPLES),
        )
