"""Two who act on one saga at once: in every order one wins, that is recorded, and nothing is done twice or lost.

Each race is run again without what decides it: then some order has to show it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from idempotency import IdempotentTask, OperationId, PermanentError, publish
from idempotency.application import runtime_of
from idempotency.errors import CallFailed
from idempotency.operate import saga as operate
from idempotency.operate.replay import replay
from idempotency.sagas import call, saga
from idempotency.store import dead_letters, letters, saga_steps, sagas
from idempotency.store.record import RUNS, is_open
from tests.controls.safeguards import Removal, fence
from tests.sagas.application import enter
from tests.sagas.conftest import Stage
from tests.sagas.racing import Begin, Played, Ring, ring
from tests.sagas.test_people import id_of, letter_of
from tests.support.operators import ANN

HOUR = timedelta(hours=1)
BOB = replace(ANN, actor="bob")


@pytest.fixture
def arena(stage: Stage, database: str) -> Iterator[Ring]:
    with ring(stage, database) as made:
        yield made


@dataclass(frozen=True)
class Race:
    """`ends`: what may come of it, and all of that has to. `wrong`: what an order must not lead to, beyond the books."""

    begin: Begin
    ends: set[str]
    wrong: Callable[[Played, Any], list[str]] = lambda played, end: []


def make(session: Any, thing: str) -> str:
    return enter(session, f"make:{thing}")


class Things:
    """A task that makes a thing and one that undoes that; each refuses the things that are named in its `refuses`."""

    def __init__(self, stage: Stage) -> None:
        self.refuses: set[str] = set()
        self.make, self.void = self._task(stage, "make"), self._task(stage, "void")

    def _task(self, stage: Stage, name: str) -> Any:
        things = self

        @stage.app.task(base=IdempotentTask, bind=True, name=name, shared=False)
        def task(self: IdempotentTask, thing: str) -> str:
            if f"{name}:{thing}" in things.refuses:
                raise PermanentError("refused", f"no_{name}")
            return enter(self.session, f"{name}:{thing}")

        return task


def is_accepted(answer: str) -> bool:
    return not answer.startswith("refused")


# ---------------------------------------------------------------- the races


def event_or_time(stage: Stage, arena: Ring) -> Race:
    """The time of a wait is over, and its event comes; a second wait gets what the first did not."""

    @saga("late", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def late(saga: Any, id: str) -> Any:
        return [each and each["data"]["n"] for each in (saga.wait_for("picked", match=id, timeout=HOUR) for _ in "12")]

    def begin(key: str) -> tuple[Any, Any]:
        stage.enqueue(late, key)
        stage.run()
        stage.pass_time(3601.0)
        return arena.delivery(late, key), lambda: stage.publish("picked", {"id": key, "n": 1})

    return Race(begin, {"[1, null]", "[null, 1]"})


def signal_or_time(stage: Stage, arena: Ring) -> Race:
    """The time of a wait is over, and a person gives the event: refused, or it ends the wait."""

    @saga("late", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def late(saga: Any, id: str) -> Any:
        return saga.wait_for("picked", match=id, timeout=HOUR) and "picked"

    def begin(key: str) -> tuple[Any, Any]:
        stage.enqueue(late, key)
        stage.run()
        stage.pass_time(3601.0)
        return arena.delivery(late, key), lambda: operate.signal_saga(stage.app, id_of(late, key), "picked", None, ANN)

    def wrong(played: Played, end: Any) -> list[str]:
        return ["a signal was accepted and lost"] * (is_accepted(played.answers[1]) and end.what == "null")

    return Race(begin, {'"picked"', "null"}, wrong)


def signal_and_event(stage: Stage, arena: Ring) -> Race:
    @saga("twice", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def twice(saga: Any, id: str) -> Any:
        return [each and each["data"]["n"] for each in (saga.wait_for("picked", match=id, timeout=HOUR) for _ in "12")]

    def begin(key: str) -> tuple[Any, Any]:
        stage.enqueue(twice, key)
        stage.run()
        return (
            lambda: operate.signal_saga(stage.app, id_of(twice, key), "picked", {"n": 2}, ANN),
            lambda: stage.publish("picked", {"id": key, "n": 1}),
        )

    return Race(begin, {"[1, 2]", "[2, 1]"})


def two_publishers(stage: Stage, arena: Ring) -> Race:
    """Each publishes an event for two sagas, in opposite order."""

    @saga("twice", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def twice(saga: Any, id: str) -> Any:
        return [each and each["data"]["n"] for each in (saga.wait_for("picked", match=id, timeout=HOUR) for _ in "12")]

    def publishing(n: int, keys: list[str]) -> Any:
        def act() -> None:
            with Session(runtime_of(stage.app).engine) as session:
                for key in keys:
                    publish(session, "picked", {"id": key, "n": n}, app=stage.app)
                session.commit()

        return act

    def begin(key: str) -> tuple[Any, Any]:
        both = [key, f"other {key}"]
        for each in both:
            stage.enqueue(twice, each)
        stage.run()
        return publishing(1, both), publishing(2, both[::-1])

    def wrong(played: Played, end: Any) -> list[str]:
        other = arena.end(f"other {played.key}").what
        return [] if other in ("[1, 2]", "[2, 1]") else [f"the other one has got {other}"]

    return Race(begin, {"[1, 2]", "[2, 1]"}, wrong)


def cancel_or_finish(stage: Stage, arena: Ring) -> Race:
    things = Things(stage)

    @saga("short", key="{id}", app=stage.app)
    def short(saga: Any, id: str) -> Any:
        saga.step("first", make, f"{id}:a", undo=things.void)
        saga.step("second", make, f"{id}:b", undo=things.void)

    def begin(key: str) -> tuple[Any, Any]:
        stage.enqueue(short, key)
        return arena.delivery(short, key), lambda: operate.cancel_saga(stage.app, id_of(short, key), ANN)

    return Race(begin, {"null", "cancelled"})


def cancel_and_wait(stage: Stage, arena: Ring) -> Race:
    """A cancel as the saga begins to wait: it is undone now, and not when its time is over."""
    things = Things(stage)

    @saga("waiting", key="{id}", events={"picked": "{id}"}, app=stage.app)
    def waiting(saga: Any, id: str) -> Any:
        saga.step("first", make, f"{id}:a", undo=things.void)
        saga.wait_for("picked", match=id, timeout=HOUR)

    def begin(key: str) -> tuple[Any, Any]:
        stage.enqueue(waiting, key)
        return arena.delivery(waiting, key), lambda: operate.cancel_saga(stage.app, id_of(waiting, key), ANN)

    return Race(begin, {"cancelled"}, ended_at_once)


def cancel_or_failure(stage: Stage, arena: Ring) -> Race:
    """A saga that fails by itself is cancelled: one of the two is why it is undone."""
    things = Things(stage)

    @saga("failing", key="{id}", app=stage.app)
    def failing(saga: Any, id: str) -> Any:
        saga.step("first", make, f"{id}:a", undo=things.void)
        raise PermanentError("refused", "refused")

    def begin(key: str) -> tuple[Any, Any]:
        stage.enqueue(failing, key)
        return arena.delivery(failing, key), lambda: operate.cancel_saga(stage.app, id_of(failing, key), ANN)

    return Race(begin, {"refused", "cancelled"})


def cancel_and_undo(stage: Stage, arena: Ring) -> Race:
    """A saga that is being undone is cancelled: refused."""
    things = Things(stage)

    @saga("failing", key="{id}", app=stage.app)
    def failing(saga: Any, id: str) -> Any:
        for name in "ab":
            saga.step(name, make, f"{id}:{name}", undo=things.void)
        raise PermanentError("refused", "refused")

    def begin(key: str) -> tuple[Any, Any]:
        stage.enqueue(failing, key)
        stage.deliver()
        return arena.delivery(failing, key), lambda: operate.cancel_saga(stage.app, id_of(failing, key), ANN)

    return Race(begin, {"refused"})


def late_call_and_undo(stage: Stage, arena: Ring) -> Race:
    """A saga was cancelled while what it has called still runs: what that has done is undone, too, as soon as it ends."""
    things = Things(stage)

    @saga("calling", key="{id}", app=stage.app)
    def calling(saga: Any, id: str) -> Any:
        saga.step("first", make, f"{id}:a", undo=things.void)
        saga.call(things.make, thing=f"{id}:b", undo=things.void)

    def begin(key: str) -> tuple[Any, Any]:
        stage.enqueue(calling, key)
        stage.deliver()
        operate.cancel_saga(stage.app, id_of(calling, key), ANN)
        return arena.delivery(calling, key), arena.delivery(things.make, key)

    return Race(begin, {"cancelled"}, ended_at_once)


def two_calls(stage: Stage, arena: Ring) -> Race:
    """The two calls of a `gather` end at once: the later one lets the saga go on."""
    things = Things(stage)

    @saga("gathering", key="{id}", app=stage.app)
    def gathering(saga: Any, id: str) -> Any:
        saga.gather(*(call(things.make, thing=f"{id}:{name}") for name in "ab"))

    def begin(key: str) -> tuple[Any, Any]:
        stage.enqueue(gathering, key)
        stage.deliver()
        return arena.delivery(things.make, key), arena.delivery(things.make, key)

    return Race(begin, {"null"}, ended_at_once)


def two_retries(stage: Stage, arena: Ring) -> Race:
    return _stuck(
        stage,
        arena,
        lambda id: operate.retry_saga(stage.app, id, ANN),
        lambda id: operate.retry_saga(stage.app, id, BOB),
    )


def retry_and_undone_by_hand(stage: Stage, arena: Ring) -> Race:
    """A person has the undo run again, and another one undoes it by hand, if that is accepted."""

    def by_hand(id: OperationId) -> None:
        operate.mark_undone(stage.app, id, "make", BOB)
        with runtime_of(stage.app).engine.begin() as connection:
            enter(connection, f"void:{id.key}:a")

    return _stuck(
        stage,
        arena,
        lambda id: operate.retry_saga(stage.app, id, ANN),
        by_hand,
    )


def _stuck(stage: Stage, arena: Ring, one: Any, other: Any) -> Race:
    """A saga whose undo has failed, and would not fail again."""
    things = Things(stage)

    @saga("stuck", key="{id}", app=stage.app)
    def stuck(saga: Any, id: str) -> Any:
        saga.call(things.make, thing=f"{id}:a", undo=things.void)
        raise PermanentError("refused", "refused")

    def begin(key: str) -> tuple[Any, Any]:
        things.refuses.add(f"void:{key}:a")
        stage.enqueue(stuck, key)
        stage.run()
        things.refuses.clear()
        return lambda: one(id_of(stuck, key)), lambda: other(id_of(stuck, key))

    def wrong(played: Played, end: Any) -> list[str]:
        return ended_at_once(played, end) + ["replayed twice"] * (
            sum(": OperationId" in each for each in played.answers) > 1
        )

    return Race(begin, {"refused"}, wrong)


def replay_or_cancel(stage: Stage, arena: Ring) -> Race:
    """A saga that has failed and was undone is replayed, and cancelled."""
    things = Things(stage)

    @saga("refusing", key="{id}", app=stage.app)
    def refusing(saga: Any, id: str) -> Any:
        saga.step("first", make, f"{id}:a", undo=things.void)
        if f"make:{id}:b" in things.refuses:
            raise PermanentError("refused", "refused")

    def begin(key: str) -> tuple[Any, Any]:
        things.refuses.add(f"make:{key}:b")
        stage.enqueue(refusing, key)
        stage.run()
        things.refuses.clear()
        letter = letter_of(stage, refusing, key)
        return (
            lambda: replay(stage.app, letter, ANN),
            lambda: operate.cancel_saga(stage.app, id_of(refusing, key), ANN),
        )

    return Race(begin, {"null", "cancelled"})


def ended_at_once(played: Played, end: Any) -> list[str]:
    """No time had to pass for the saga to end."""
    return ["it has slept"] * played.slept


# ---------------------------------------------------------------- a former holder


@dataclass(frozen=True)
class Stretch:
    """One attempt of a saga that does everything: what is recorded in it, and how many deliveries come before it."""

    name: str
    deliveries: int
    fails: bool = False

    def __call__(self, stage: Stage, arena: Ring) -> Race:
        things = Things(stage)

        @saga("every", key="{id}", events={"picked": "{id}"}, app=stage.app)
        def every(saga: Any, id: str) -> Any:
            saga.step("step", make, f"{id}:a", undo=things.void)
            saga.uuid()
            saga.version("newer")
            saga.effect("effect", arena.charge, f"{id}:b", undo=things.void)
            saga.call(things.make, thing=f"{id}:c", undo=things.void)
            saga.wait_for("picked", match=id, timeout=HOUR)
            if self.fails:
                raise PermanentError("refused", "refused")

        def begin(key: str) -> tuple[Any, Any]:
            stage.enqueue(every, key)
            for n in range(self.deliveries):
                stage.deliver()
                if n == 2:
                    stage.publish("picked", {"id": key})
            delivery = arena.delivery(every, key)
            return delivery, arena.takeover(delivery, key)

        return Race(begin, {"refused" if self.fails else "null"})


# The third delivery begins to wait.
STRETCHES = (
    Stretch("step, value, version, effect and call", 0),
    Stretch("wait", 2),
    Stretch("the end of a wait, and of the saga", 3),
    Stretch("compensation", 3, fails=True),
    Stretch("undo", 4, fails=True),
    Stretch("the end of the undoing", 10, fails=True),
)


@pytest.mark.long
@pytest.mark.parametrize(
    "stretch",
    [
        pytest.param(each, marks=[pytest.mark.long] * (number % 3 != 1), id=each.name)
        for number, each in enumerate(STRETCHES)
    ],
)
def test_what_a_former_holder_commits_changes_nothing(stage: Stage, arena: Ring, stretch: Stretch) -> None:
    arena.watch()
    race = stretch(stage, arena)
    for played in arena.takeovers(race.begin):
        assert not (wrong := wrong_with(arena, race, played)), f"{wrong}\n{played}"


@pytest.mark.few(1)
@pytest.mark.parametrize("stretch", STRETCHES, ids=lambda stretch: stretch.name)
def test_without_its_fence_a_former_holder_does_harm(stage: Stage, arena: Ring, stretch: Stretch) -> None:
    arena.watch()
    race = stretch(stage, arena)
    with without_fence():
        assert any(wrong_with(arena, race, played) for played in arena.takeovers(race.begin))


@contextmanager
def without_fence() -> Iterator[None]:
    removal = Removal()
    try:
        fence(removal)
        for module in (saga_steps, sagas):
            removal.edit(module, " AND fence = %(fence)s AND token = %(token)s", "")
        yield
    finally:
        removal.undo()


# ---------------------------------------------------------------- every order, with what decides and without


# Each race, and what decides it: pieces of our statements, or of a function of the database, and what there is without.
RACES: tuple[tuple[Any, Sequence[tuple[Any, str, str]]], ...] = (
    (event_or_time, [(saga_steps, saga_steps._LOCK_EVENTS, "SELECT 1")]),
    (signal_or_time, [(saga_steps, saga_steps._LOCK_EVENTS, "SELECT 1")]),
    (signal_and_event, [(saga_steps, "e.id > coalesce(", "e.id > least(")]),
    (two_publishers, [("signal_from", "ORDER BY s.saga_id", "ORDER BY random()")]),
    (cancel_or_finish, [(sagas, " AND status = %(was)s", "")]),
    (cancel_or_finish, [(saga_steps, " AND status = %(status)s FOR SHARE", " FOR SHARE")]),
    (cancel_and_wait, [(sagas, "SELECT idempotency.resume_saga(cancelled)", "SELECT 1")]),
    (cancel_or_failure, [(sagas, f" AND {RUNS} RETURNING id", " RETURNING id")]),
    (
        cancel_and_undo,
        [
            (
                sagas,
                "\n    WHERE g.observed OR g.status = 'RUNNING' OR g.generation < excluded.generation\n    RETURNING",
                "\n    RETURNING",
            )
        ],
    ),
    (late_call_and_undo, [(sagas, "CASE WHEN signals = %(signals)s THEN %(waits_for)s END", "%(waits_for)s")]),
    (two_calls, [("signal_saga", "FOR NO KEY UPDATE", ""), ("end_of_operation", "FOR NO KEY UPDATE", "")]),
    (
        two_retries,
        [
            (dead_letters, f"WHERE id = %(id)s AND {is_open()}", "WHERE id = %(id)s"),
            (dead_letters, "AND status = 'failed' AND generation = %(generation)s", ""),
        ],
    ),
    (retry_and_undone_by_hand, [(letters, "CASE status WHEN 'open' THEN 'replayed' ELSE status END", "status")]),
    # a cancel that does not see the replay is refused, and a person looks again: nothing has to decide it
    (replay_or_cancel, []),
)


@pytest.mark.few(1)
@pytest.mark.parametrize("race", dict.fromkeys(race for race, _ in RACES), ids=lambda race: race.__name__)
def test_in_every_order_one_wins_and_nothing_is_lost(stage: Stage, arena: Ring, race: Any) -> None:
    made, ends = race(stage, arena), set()
    for played in arena.orders(made.begin):
        assert not (wrong := wrong_with(arena, made, played)), f"{wrong}\n{played}"
        ends.add(arena.end(played.key).what)
    assert ends == made.ends


@pytest.mark.long
@pytest.mark.few(3)
@pytest.mark.parametrize(("race", "edits"), [(race, edits) for race, edits in RACES if edits])
def test_without_what_decides_a_race_some_order_is_wrong(stage: Stage, arena: Ring, race: Any, edits: Any) -> None:
    made, removal = race(stage, arena), Removal()
    try:
        for where, old, new in edits:
            if isinstance(where, str):
                arena.edit(where, old, new)
            else:
                removal.edit(where, old, new)
        assert any(wrong_with(arena, made, played) for played in arena.orders(made.begin))
    finally:
        removal.undo()


def wrong_with(arena: Ring, race: Race, played: Played) -> list[str]:
    found = played.broken + arena.rest(played)
    if "never ends" in found:
        return found
    end = arena.end(played.key)
    return found + [f"it has ended as {end.what}"] * (end.what not in race.ends) + race.wrong(played, end)


@pytest.mark.long
@pytest.mark.parametrize("max_attempts", [1, pytest.param(3, marks=pytest.mark.long)])
def test_a_replay_beside_the_end_of_the_saga_ends_no_attempt(stage: Stage, arena: Ring, max_attempts: int) -> None:
    """The saga has caught the failure and is about to complete. Both lock the saga before the letter."""
    things = Things(stage)

    @saga("gathering", key="{id}", app=stage.app, max_attempts=max_attempts)
    def gathering(saga: Any, id: str) -> Any:
        try:
            saga.gather(*(call(things.make, thing=f"{id}:{name}", undo=things.void) for name in "ab"))
        except CallFailed:
            return "instead"

    def begin(key: str) -> tuple[Any, Any]:
        things.refuses.add(f"make:{key}:a")
        stage.enqueue(gathering, key)
        for _ in range(3):
            stage.deliver()
        letter = open_letter_of(stage, key)
        return lambda: replay(stage.app, letter, ANN), arena.delivery(gathering, key)

    ends = set()
    for played in arena.orders(begin):
        assert "a deadlock" not in played.broken
        arena.rest(played)
        end = arena.end(played.key)
        ends.add((end.status, end.what))
    assert ends == {("COMPLETED", '"instead"')}


def open_letter_of(stage: Stage, key: str) -> int:
    query = text(
        "SELECT max(id) FROM idempotency.dead_letters WHERE task = 'make' AND status = 'open' AND strpos(key, :key) > 0"
    )
    with stage.engine.connect() as connection:
        return int(connection.execute(query, {"key": key}).scalar_one())
