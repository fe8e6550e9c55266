"""The search itself: schedules are carried out as written, faults strike, and what is known to be wrong is found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

import services
from tests.search import application, footprints
from tests.search.exploration import (
    KILL,
    LOSE,
    SCENARIOS,
    Choice,
    Run,
    exhaustive,
    parse_case,
    parse_schedule,
    run,
    under_seed,
)
from tests.search.findings import FINDINGS, Finding
from tests.search.safeguards import SAFEGUARDS, without
from tests.search.tally import Tally
from tests.search.world import Violation, World, opened


@pytest.fixture(scope="module")
def world(servers: services.Services) -> Iterator[World]:
    name = f"search_{uuid4().hex[:8]}"
    address = servers.create_database(name)
    if "postgres" in servers.servers:
        # a deadlock is to be resolved at once; only a superuser may say so
        admin = create_engine(servers.postgres.superuser_url(), isolation_level="AUTOCOMMIT", poolclass=NullPool)
        with admin.connect() as connection:
            connection.exec_driver_sql(f"ALTER DATABASE {name} SET deadlock_timeout = '20ms'")
    with opened(address) as world:
        yield world
    servers.drop_database(name)


def carried_out(world: World, text: str) -> Run:
    case, _, schedule = text.partition("@")
    return run(world, parse_case(case), parse_schedule(schedule))


def actions(done: Run, letter: str) -> list[str]:
    return [event.action for event in done.trace if event.actor.startswith(letter)]


# ---------------------------------------------------------------- schedules are carried out as written


@pytest.mark.few(1)
@pytest.mark.parametrize("text", ["plain/attempt+takeover@5b", "lost/attempt+recover@6b,9a", "plain/relay+attempt@"])
def test_a_schedule_runs_again_exactly_as_it_was(world: World, text: str) -> None:
    first, again = carried_out(world, text), carried_out(world, text)

    assert list(map(str, first.trace)) == list(map(str, again.trace))
    assert first.name == again.name == text
    assert first.void == ""


def test_a_seed_runs_again_exactly_as_it_was_and_its_schedule_does_too(world: World) -> None:
    first, again = (under_seed(world, ["plain"], 7, 3) for _ in range(2))
    replayed = run(world, first.case, first.schedule)

    assert list(map(str, first.trace)) == list(map(str, again.trace)) == list(map(str, replayed.trace))


@pytest.mark.long
def test_every_schedule_is_explored_once_those_with_fewer_choices_first(world: World) -> None:
    runs = [done.schedule for done in exhaustive(world, parse_case("plain/relay+release"), preemptions=1)]

    assert len(set(runs)) == len(runs) > 10
    assert [len(schedule) for schedule in runs] == sorted(len(schedule) for schedule in runs)


@pytest.mark.long
def test_what_is_left_out_leads_to_nothing_that_is_not_explored(world: World) -> None:
    case = parse_case("open/relay+cancel")
    every, reduced = (
        {done.state: done.name for done in exhaustive(world, case, preemptions=1, reduced=each)}
        for each in (False, True)
    )

    assert set(every) == set(reduced)
    assert len(every) > 2


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"l:records"}, {"r:records"}, True),
        ({"w:records"}, {"r:records"}, False),
        ({"l:records"}, {"l:records"}, False),
        ({"w:records", "r:outbox"}, {"w:business", "r:outbox"}, True),
        (set(), {"*"}, True),
        ({"r:records"}, {"*"}, False),
    ],
)
def test_two_actions_are_independent_unless_one_changes_what_is_shared(one: Any, other: Any, expected: bool) -> None:
    assert footprints.independent(one, other) is footprints.independent(other, one) is expected


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("SET LOCAL lock_timeout = '3s'", set()),
        ("SELECT 1 FROM idempotency.records r JOIN idempotency.outbox o USING (key)", {"r:records", "r:outbox"}),
        ("SELECT 1 FROM payments FOR UPDATE", {"l:business"}),
        ("DELETE FROM idempotency.a_new_table", {"*"}),
        ("SELECT pg_notify('a', 'b')", {"*"}),
    ],
)
def test_a_statement_that_is_not_understood_depends_on_everything(statement: str, expected: Any) -> None:
    assert footprints.of_statement(statement) == expected


def test_a_choice_is_read_as_it_is_written() -> None:
    schedule = (Choice(0, 1), Choice(17, 0, KILL), Choice(20, 1, LOSE))
    assert parse_schedule(",".join(map(str, schedule))) == schedule


# ---------------------------------------------------------------- faults strike


def test_a_killed_process_leaves_nothing_of_its_open_transaction(world: World) -> None:
    done = carried_out(world, "plain/attempt+takeover@5!a")  # its step is written and not committed

    assert actions(done, "a")[-1] == "KILLED before: COMMIT"
    assert any("reserved" in action for action in actions(done, "b"))  # the step is done again
    assert not done.violations
    assert not done.void


@pytest.mark.parametrize(
    ("text", "duplicates"),
    [
        ("plain/attempt+attempt@2b,4!b", 0),  # before it counts itself
        ("plain/attempt+attempt@2b,4a,7b,8!b", 1),  # while its count waits for the first one's step
    ],
)
def test_a_process_killed_while_it_waits_leaves_its_statement_behind(world: World, text: str, duplicates: int) -> None:
    done = carried_out(world, text)

    assert done.trace[8].action.startswith("KILLED while it waits for a lock") is bool(duplicates)
    record = world.record()
    assert record is not None
    assert record.duplicates == duplicates
    assert not done.violations
    assert not done.void


def test_a_process_that_waits_for_a_lock_may_be_killed_meanwhile(world: World) -> None:
    done = carried_out(world, "plain/attempt+attempt@5b")

    assert done.trace[6].outcome.startswith("waits for a lock")
    assert done.moments[7].faults == {0: KILL, 1: KILL}


def test_a_commit_whose_answer_is_lost_is_carried_out_and_claimed_again(world: World) -> None:
    done = carried_out(world, "plain/attempt+discard@5?a")  # of its step

    assert actions(done, "a")[5:8] == ["COMMIT", "claims.claim", "effects.begin_effect"]
    assert not done.violations
    assert not done.void


def test_an_actor_waiting_for_a_lock_is_seen_and_goes_on_once_it_is_free(world: World) -> None:
    done = carried_out(world, "plain/attempt+release@5b")  # the attempt has written its record, not committed

    outcomes = [(event.action, event.outcome) for event in done.trace]
    assert ("operations.read_locked", "waits for a lock, 1 row") in outcomes
    assert actions(done, "b")[-1] == "COMMIT"
    assert not done.violations


def test_time_that_passes_ends_a_finishing_transaction_that_idles(world: World) -> None:
    done = carried_out(world, "plain/attempt+takeover@5b")

    # nothing waited for the frozen holder, and its COMMIT failed: it claimed again
    assert not any("waits for a lock" in event.outcome for event in done.trace)
    after = actions(done, "a")[actions(done, "a").index("COMMIT") + 1 :]
    assert after[0] == "claims.claim"
    assert not done.violations


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("plain/attempt+cancel@300b", "a choice of the schedule was never met"),
        ("plain/attempt+cancel@2!a", ""),
        ("declined/cancel+discard@", "1 of the provider's faults met no call"),
    ],
)
def test_a_run_whose_faults_have_not_struck_is_void(world: World, text: str, why: str) -> None:
    assert carried_out(world, text).void == why


@pytest.mark.long
def test_a_run_that_left_the_state_of_a_void_one_is_void_too(world: World) -> None:
    runs = list(exhaustive(world, parse_case("declined/cancel+discard"), preemptions=1, most=8))

    void = [done.state for done in runs if done.void == "1 of the provider's faults met no call"]
    assert len(set(void)) < len(void)
    assert not any(done.state in void for done in runs if not done.void)


# ---------------------------------------------------------------- what is found


# Where most was found. All pairs, and all schedules: `make search`.
@pytest.mark.few(1)
@pytest.mark.parametrize("case", ["lost/attempt+takeover", "open/attempt+dead_letter"])
def test_no_schedule_of_the_most_telling_pairs_breaks_a_rule(world: World, case: str) -> None:
    runs = list(exhaustive(world, parse_case(case), preemptions=1, most=25))
    assert len(runs) > 10
    for done in runs:
        assert not done.violations, done.name
        assert not done.void, done.name


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(5))
def test_no_crowd_breaks_a_rule(world: World, seed: int) -> None:
    done = under_seed(world, list(SCENARIOS), seed, 4)

    assert not done.violations, done.name


@pytest.mark.long
def test_a_log_holds_all_that_was_counted(world: World) -> None:
    tally = Tally()
    for done in exhaustive(world, parse_case("plain/relay+release"), preemptions=1):
        done.violations = [Violation("I0", "made up")]
        tally.add(done)

    assert Tally.of(json.loads(json.dumps(tally.as_dict()))) == tally
    assert tally.kills > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: finding.name)
def test_what_is_wrong_without_its_safeguard_is_found(world: World, finding: Finding) -> None:
    case = parse_case(finding.case)
    with without(world, *finding.safeguards):
        runs = exhaustive(world, case, preemptions=finding.preemptions)
        found = next((done for done in runs if finding.is_in(done)), None)
    assert found is not None
    assert not run(world, case, found.schedule).violations


def test_every_safeguard_has_its_finding() -> None:
    assert set(SAFEGUARDS) == {safeguard for finding in FINDINGS for safeguard in finding.safeguards}


def test_the_provider_acts_once_per_key_and_replays_its_answer(world: World) -> None:
    application.provider.reset(["lost"])
    with pytest.raises(ConnectionError):
        application.provider.call("r1", 5, "key")
    assert application.provider.call("r1", 5, "key") == {"id": "ch_1"}
    assert len(application.provider.charges) == 1
