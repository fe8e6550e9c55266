"""Some programs, and what the oracle says about runs that are wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from idempotency.sagas.journal import Journal
from idempotency.store import saga_steps
from tests.sagas.programs import faults, oracle
from tests.sagas.programs.facts import Facts, Row
from tests.sagas.programs.faults import ACTIONS, STATEMENT, Fault
from tests.sagas.programs.program import Call, Effect, Gather, Nested, Raise, Sleep, Step, Undo, Value, Wait, draw
from tests.sagas.programs.run import Stage, opened, run
from tests.search.server import databases

PROGRAMS = 15  # `make saga-programs` runs 2,000
UNDO = Undo()
PROGRAM = Nested(
    "d",
    (
        Step("d.1", "pack", UNDO),
        Effect("d.2", "book", UNDO),
        Gather((Call("d.3", 0, UNDO), Call("d.4", 0, None))),
        Wait("d.5", 0, "after", 600.0),
        Nested("d.6", (Step("d.7", "sign", UNDO), Sleep("d.8", 600.0)), UNDO),
        Value("d.9", "uuid"),
    ),
    None,
)
FAILING = Nested("d", (*PROGRAM.body, Raise("d.10", "for good")), None)


@pytest.fixture(scope="module")
def world() -> Iterator[Any]:
    with databases() as (url,), opened(url) as world:
        yield world


def carried_out(world: Any, program: Nested, *planned: Fault) -> tuple[Facts, list[Fault]]:
    stage = Stage(world, program, 1, list(planned))
    return stage.run(), stage.striking.struck


def test_random_programs_end_as_they_must(world: Any) -> None:
    done = [run(world, seed) for seed in range(1, PROGRAMS + 1)]
    assert [(each.seed, each.wrong) for each in done if each.wrong] == []
    assert sum(not each.is_void for each in done) > 0.8 * PROGRAMS


def test_a_seed_draws_the_same_program_and_the_same_faults() -> None:
    assert (draw(7), faults.draw(7)) == (draw(7), faults.draw(7))
    assert len({draw(seed).body for seed in range(1, 50)}) == 49


@pytest.mark.few(2)
@pytest.mark.parametrize("action", [*ACTIONS, "cancel"])
def test_each_fault_strikes_and_a_program_survives_it(world: Any, action: str) -> None:
    planned = Fault(action, STATEMENT, 14)
    found, struck = carried_out(world, PROGRAM, planned)
    assert struck == [planned]
    assert oracle.compare(PROGRAM, found) == []
    assert list(found.cancelled) == (["d"] if action == "cancel" else [])


@pytest.mark.long
def test_a_program_is_killed_at_its_crash_points(world: Any) -> None:
    struck = set()
    for point in faults.POINTS:
        found, hit = carried_out(world, FAILING, Fault("kill", point, 1))
        assert oracle.compare(FAILING, found) == []
        struck |= {fault.at for fault in hit}
    assert struck == {*faults.POINTS} - {"released"}  # nothing fails for a while


def test_a_program_without_faults_is_void(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "draw", lambda seed: [])
    done = run(world, 3)
    assert (done.is_void, done.wrong) == (True, [])


@pytest.mark.long
def test_a_person_sees_to_what_has_stopped(world: Any) -> None:
    broken = Nested("d", (Step("d.1", "pack", Undo(broken=True)), Raise("d.2", "for good")), None)
    found, _ = carried_out(world, broken)
    assert oracle.compare(broken, found) == []
    assert ("programs.saga", "compensation_failed", "replayed") in found.letters
    for asks in (True, False):
        program = Nested("d", (Effect("d.1", "book", UNDO, asks=asks), Raise("d.2", "for good")), None)
        for point, acts in ("effect.begun", 0), ("effect.called", 1):
            found, _ = carried_out(world, program, Fault("kill", point, 1), Fault("cancel", "hint.left", 2))
            assert oracle.compare(program, found) == []
            assert (("programs.saga", "effect_unknown", "replayed") in found.letters) is not asks
            assert len(found.acts) == found.entries.count("undo:d.1 charged d.1") == acts


# ---------------------------------------------------------------- what the oracle must see


def of(facts: Facts, thing: str = "d") -> Any:
    return facts.sagas[thing]


def exchange(sequence: list[Any], first: str, second: str) -> None:
    a, b = (next(n for n, each in enumerate(sequence) if each.startswith(name)) for name in (first, second))
    sequence[a], sequence[b] = sequence[b], sequence[a]


def later(facts: Facts) -> None:
    """A forward row was recorded after the first undo."""
    rows = of(facts).rows
    last = of(facts).forward[-1]
    last.position = 100
    rows.append(rows.pop(rows.index(last)))


DOCTORED: dict[str, Callable[[Facts], object]] = {
    "a step acted twice": lambda facts: facts.entries.append("step:d.1"),
    "a step did not act": lambda facts: facts.entries.remove("step:d.1"),
    "a call acted twice": lambda facts: facts.entries.append("call:d.3"),
    "a nested saga's step acted twice": lambda facts: facts.entries.append("step:d.7"),
    "the provider acted twice": lambda facts: facts.acts.append(("d.2", "another key")),
    "the provider did not act": lambda facts: facts.acts.clear(),
    "an undo acted twice": lambda facts: facts.entries.append("undo:d.1 did d.1"),
    "an undo did not act": lambda facts: facts.entries.remove("undo:d.1 did d.1"),
    "an undo was told something else": lambda facts: facts.entries.__setitem__(-1, "undo:d.1 charged d.2"),
    "undos acted in another order": lambda facts: exchange(facts.entries, "undo:d.1", "undo:d.2"),
    "something was undone that has no undo": lambda facts: facts.entries.append("undo:d.4 called d.4"),
    "an undo was not recorded": lambda facts: of(facts).rows.pop(),
    "an undo is still begun": lambda facts: setattr(of(facts).undos[-1], "state", "begun"),
    "a row is missing": lambda facts: of(facts).rows.pop(1),
    "a row too many": lambda facts: of(facts).rows.insert(7, Row(90, "step", "other", "done", "did other")),
    "a row has another name": lambda facts: setattr(of(facts).rows[0], "name", "unpack"),
    "a call is still begun": lambda facts: setattr(of(facts).rows[2], "state", "begun"),
    "another event has ended the wait": lambda facts: of(facts).rows[4].result["data"].update(number="d.5/1"),
    "the wait was over by its time": lambda facts: setattr(of(facts).rows[4], "state", "timed_out"),
    "a forward row after the undoing began": later,
    "the saga is still being undone": lambda facts: setattr(of(facts), "status", "COMPENSATING"),
    "the saga says it is completed": lambda facts: setattr(of(facts), "status", "COMPLETED"),
    "the record disagrees": lambda facts: setattr(of(facts), "record", "completed"),
    "the record has another code": lambda facts: setattr(of(facts), "record_error", "cancelled"),
    "the context lacks a result": lambda facts: of(facts).context.pop("pack"),
    "the nested saga was undone, too": lambda facts: setattr(of(facts, "d.6"), "status", "FAILED"),
    "the nested saga's result": lambda facts: setattr(of(facts, "d.6"), "result", []),
    "a saga too many": lambda facts: facts.sagas.update({"d.99": of(facts)}),
    "no dead letter": lambda facts: facts.letters.clear(),
    "a dead letter too many": lambda facts: facts.letters.append(("programs.saga", "saga_mismatch", "open")),
    "a delivery is left": lambda facts: facts.pending.append(("programs.saga", "d", "retry")),
    "an operation has not ended": lambda facts: facts.open.append(("programs.saga", "d", "released")),
    "something was seen meanwhile": lambda facts: facts.seen.append("stuck"),
    "it went on after a cancel": lambda facts: facts.cancelled.update(d=["1 step pack"]),
}


@pytest.fixture(scope="module")
def facts(world: Any) -> Facts:
    found, _ = carried_out(world, FAILING, Fault("kill", "step.committed", 1))
    assert oracle.compare(FAILING, found) == []
    return found


@pytest.mark.long
@pytest.mark.parametrize("what", DOCTORED)
def test_the_oracle_sees(facts: Facts, what: str) -> None:
    doctored = copy.deepcopy(facts)
    DOCTORED[what](doctored)
    assert oracle.compare(FAILING, doctored)


@pytest.mark.long
def test_undoing_in_the_order_of_doing_is_seen(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Journal, "__reversed__", lambda journal: iter(journal.rows))
    found, _ = carried_out(world, FAILING)
    assert any("order of undos" in wrong for wrong in oracle.compare(FAILING, found))


def test_a_write_without_its_fence_is_seen(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose attempt was overtaken commits, too: without a row of its own."""
    monkeypatch.setattr(saga_steps, "_RECORD_WITH", "SELECT %(saga)s::text, %(position)s::int")
    found, _ = carried_out(world, PROGRAM)
    assert oracle.compare(PROGRAM, found)
