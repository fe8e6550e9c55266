"""Which schedules there are, and running them: exhaustively with a bound on preemptions, or under seeds.

A schedule is where it departs from the plain one, in which each actor runs to its end before the next begins:

    5b,17!a,20?b     before step 5 actor b takes over; before step 17 actor a's process is killed; in step 20 b's
                     statement is carried out, and its answer is lost with the connection

Switching where the running actor ended or waits is free; taking over from one that could go on, and faults, count.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from sqlalchemy.exc import OperationalError

from idempotency.operate.replay import replay
from tests.search import application
from tests.search.actors import KINDS, RUNNERS
from tests.search.checker import check
from tests.search.footprints import committed, independent, is_lasting
from tests.search.scheduler import Actor, Event, Scheduler
from tests.search.world import PERSON, Scenario, Violation, World

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("plain"),
        Scenario("direct", sent="direct"),
        Scenario("lost", plan=("lost",)),
        Scenario("lost_asked", task="asked", plan=("lost",)),
        Scenario("lost_refused", plan=("lost", "refused")),
        Scenario("always_lost", plan=("lost", "lost", "lost")),
        Scenario("declined", plan=("declined",)),
        # and its replay, too
        Scenario("declined_twice", plan=("declined", "declined")),
        Scenario("later", sent="direct", plan=("later",)),
        Scenario("down_closed", task="closed", plan=("down",)),
        Scenario("lost_closed", task="closed", plan=("lost",)),
        # the application's own part of an end raises
        Scenario("undo_breaks", plan=("declined",), broken=("undo",)),
        Scenario("on_failed_breaks", plan=("declined",), broken=("on_failed",)),
        # begun, open, and released: the next delivery is in the outbox
        Scenario("open", plan=("lost",), before=("attempt",)),
        # failed, nothing happened, a dead letter is open
        Scenario("refused", plan=("declined",), before=("attempt",)),
        # failed as unknown, a dead letter is open
        Scenario("unknown", plan=("lost",), before=("attempt", "a_day", "attempt")),
    )
}

# More steps than any two actors have; one that goes on is going round in circles.
MOST_STEPS = 400
LETTERS = "abcdef"
KILL, LOSE = "!", "?"


@dataclass(frozen=True, order=True)
class Choice:
    """A departure from the plain schedule."""

    step: int
    actor: int
    fault: str = ""  # KILL or LOSE

    def __str__(self) -> str:
        return f"{self.step}{self.fault}{LETTERS[self.actor]}"

    @classmethod
    def parsed(cls, text: str) -> Choice:
        digits = text.rstrip("!?" + LETTERS)
        return cls(int(digits), LETTERS.index(text[-1]), text[len(digits) : -1])


Schedule = tuple[Choice, ...]


def parse_schedule(text: str) -> Schedule:
    return tuple(Choice.parsed(part) for part in text.split(",") if part)


@dataclass(frozen=True)
class Case:
    """What is explored: a scenario, and who acts in it."""

    scenario: Scenario
    kinds: Sequence[str]

    def __str__(self) -> str:
        return f"{self.scenario.name}/{'+'.join(self.kinds)}"


def parse_case(text: str) -> Case:
    """Raises KeyError for a scenario or a kind that is unknown."""
    scenario, _, kinds = text.partition("/")
    return Case(SCENARIOS[scenario], [KINDS[kind].name for kind in kinds.split("+")])


@dataclass
class Moment:
    """What could have been chosen before a step."""

    current: int | None  # who could go on
    enabled: list[int]
    faults: dict[int, str]  # what could strike whom


@dataclass
class Run:
    """One schedule, carried out."""

    case: Case
    schedule: Schedule
    trace: list[Event] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    void: str = ""  # why it has proved nothing
    state: str = ""  # when the actors had ended

    @property
    def name(self) -> str:
        return f"{self.case}@{','.join(map(str, self.schedule))}"


def run(
    world: World,
    case: Case,
    schedule: Schedule,
    pick: Callable[[int, Moment], Choice | None] | None = None,
    rested: dict[str, Run] | None = None,
) -> Run:
    """Carry out one schedule, let everything come to rest, and check the books. `pick` makes it up as it goes.

    What comes after the actors depends on the state they leave and on nothing else: a state in `rested` is not brought
    to rest again.
    """
    done = Run(case, schedule)
    kinds = [KINDS[name] for name in case.kinds]
    world.reset(case.scenario, sum(kind.copies for kind in kinds), sum(kind.dead_copies for kind in kinds))
    planned = {choice.step: choice for choice in schedule}
    actors = []
    for n, kind in enumerate(kinds):
        process = world.take_process()
        actors.append(Actor(f"{LETTERS[n]} {kind.name}", lambda kind=kind: kind.act(world), process))
    world.scheduler = scheduler = Scheduler(world.admin, actors)
    taken: list[Choice] = []
    current: int | None = None
    try:
        while True:
            enabled = scheduler.enabled()
            if not enabled:
                if all(actor.ended for actor in actors):
                    break
                scheduler.wait_for_deadlock()
                continue
            step = len(done.moments)
            if step > MOST_STEPS:
                done.violations.append(Violation("I2", f"no end after {MOST_STEPS} steps"))
                break
            running = current if current in enabled else None
            asks = running is not None and actors[running].pid is not None
            # who was preempted dies there only where another choice is free: earlier it is the same, or its turn
            mortal = [n for n in enabled if actors[n].has_begun] if running is None else [running]
            moment = Moment(running, enabled, dict.fromkeys([*mortal, *scheduler.blocked()], KILL))
            if running is not None and asks:
                moment.faults[running] += LOSE
            done.moments.append(moment)
            choice = planned.get(step) if pick is None else pick(step, moment)
            if choice is not None and (choice.actor in enabled or choice.fault in moment.faults.get(choice.actor, "")):
                taken.append(choice)
                if choice.fault == KILL:
                    world.dead.add(actors[choice.actor].process.holder)
                    scheduler.kill(choice.actor)
                    continue
                actors[choice.actor].loses_answer = choice.fault == LOSE
                current = choice.actor
            elif moment.current is None:
                current = enabled[0]
            assert current is not None
            scheduler.step(current)
    finally:
        for n, actor in enumerate(actors):
            if not actor.ended:
                scheduler.kill(n)
            world.return_process(actor.process)
        world.scheduler = None
    done.trace = scheduler.trace
    done.schedule = tuple(taken)
    for actor in actors:
        # a session that the server has ended is met with another pass, or another try of a person's
        if actor.error is not None and not isinstance(actor.error, OperationalError):
            done.violations.append(
                Violation("error", f"{actor.name} broke: {type(actor.error).__name__}: {actor.error}")
            )
    runners = [actor.process for actor, name in zip(actors, case.kinds, strict=True) if name in RUNNERS]
    done.violations += world.trespasses(runners)
    done.state = world.state()
    if rested is not None and not world.seen and (alike := rested.get(done.state)) is not None:
        done.violations += alike.violations
        done.void = alike.void
    else:
        rest = Run(case, schedule, trace=done.trace)
        _rest(world, rest)
        if not rest.violations and (missed := len(case.scenario.plan) - len(application.provider.struck)):
            rest.void = f"{missed} of the provider's faults met no call"
        done.violations += rest.violations
        done.void = rest.void
        if rested is not None and not world.seen:
            rested[done.state] = rest
    if pick is None and len(taken) < len(schedule):
        done.void = "a choice of the schedule was never met"
    return done


def _rest(world: World, done: Run) -> None:
    """Drain and check; then a person resolves what is open, and it is checked again."""
    world.drain()
    done.violations += [*world.seen, *check(world)]
    if done.violations or not (letters := world.letters()):
        return
    application.broken.clear()  # mended
    try:
        world.resolve(world.shown(), PERSON)
        replay(application.app, letters[0], PERSON)
    except Exception as error:
        done.trace.append(Event("a person", "resolves and replays", f"refused: {error}"))
        record = world.record()
        if record is not None and record.status == "failed" and len(letters) == 1:
            done.violations.append(Violation("I27", f"it cannot be resolved: {error}"))
        return
    done.trace.append(Event("a person", "resolves what is open by the provider's books, and replays"))
    world.drain()
    done.violations += [Violation(each.rule, f"after a replay: {each.what}") for each in [*world.seen, *check(world)]]


# ---------------------------------------------------------------- which schedules


@dataclass(frozen=True)
class Segment:
    """What an actor did that took over, until the preempted one went on."""

    footprint: frozenset[str]
    lasting: Sequence[int]  # which of its steps last and may lose their answer


@dataclass
class Parent:
    """A schedule that was carried out, and what its continuations have shown so far."""

    done: Run
    segments: dict[tuple[int, int], Segment] = field(default_factory=dict)  # by step and actor


def exhaustive(
    world: World,
    case: Case,
    *,
    preemptions: int,
    faults: int = 1,
    most: int | None = None,
    reduced: bool = True,
) -> Iterator[Run]:
    """Every schedule with so many preemptions and faults at most, of them so many faults; those with fewer first.

    Of schedules that cannot differ in what they lead to, `reduced` explores one (y is what the current actor does next):
    - to take over after y is the same as before y, if y is independent of all that is done until the actor goes on. Only
      where an answer is lost meanwhile something else may be done, and so that is explored with both;
    - to be killed after y is the same as before y, if nothing of y lasts: what is not committed dies with its process;
    - a state that the actors have left once is not brought to rest again.
    And one more bound: the lost answer to what does not last, a broken connection, comes alone.
    """
    # a heartbeat shares memory with the attempt, of which footprints know nothing
    reduced = reduced and "renew" not in case.kinds
    waiting: deque[tuple[Parent | None, Schedule, int]] = deque([(None, (), 0)])
    rested: dict[str, Run] | None = {} if reduced else None
    count = 0
    while waiting and (most is None or count < most):
        parent, schedule, cost = waiting.popleft()
        last = schedule[-1] if schedule else None
        struck = sum(bool(choice.fault) for choice in schedule)
        if reduced and parent is not None and last is not None and (same := _same(parent, last)) is not None:
            if cost < preemptions and struck < faults:
                losses = (Choice(last.step + n, last.actor, LOSE) for n in same.lasting)
                waiting.extend((None, (*schedule, loss), cost + 1) for loss in losses)
            continue
        done = run(world, case, schedule, rested=rested)
        count += 1
        yield done
        if parent is not None and last is not None and not last.fault:
            parent.segments[last.step, last.actor] = _segment(parent, done, last)
        if (
            reduced
            and parent is not None
            and last is not None
            and last.fault == LOSE
            and not is_lasting(parent.done.trace[last.step].footprint)
        ):
            continue
        this = Parent(done)
        first = last.step + 1 if last is not None else 0
        for step, moment in enumerate(done.moments[first:], start=first):
            chosen = moment.current if moment.current is not None else moment.enabled[0]
            price = cost + (moment.current is not None)
            if price <= preemptions:
                waiting.extend((this, (*schedule, Choice(step, n)), price) for n in moment.enabled if n != chosen)
            if cost < preemptions and struck < faults:
                waiting.extend(
                    (this, (*schedule, Choice(step, n, fault)), cost + 1)
                    for n, those in moment.faults.items()
                    for fault in those
                    if not (reduced and _is_needless(done, step, n, fault, cost))
                )


def _same(parent: Parent, last: Choice) -> Segment | None:
    """What was done after taking over one step earlier, if that has led, or would have led, to the same."""
    step, preempted = last.step - 1, parent.done.moments[last.step].current
    if last.fault or preempted is None or (earlier := parent.segments.get((step, last.actor))) is None:
        return None
    y = parent.done.trace[step]
    if parent.done.moments[step].current != preempted or "waits" in y.outcome:
        return None
    # who took over may be killed or preempted on the way: what it holds is let go of
    if not independent(y.footprint, earlier.footprint | committed(earlier.footprint)):
        return None
    parent.segments[last.step, last.actor] = earlier
    return earlier


def _segment(parent: Parent, done: Run, last: Choice) -> Segment:
    preempted = parent.done.moments[last.step].current
    footprint: set[str] = set()
    lasting = []
    for n, event in enumerate(done.trace[last.step : len(done.moments)]):
        if preempted is not None and event.actor.startswith(LETTERS[preempted]):
            break
        footprint |= event.footprint
        if LOSE in done.moments[last.step + n].faults.get(last.actor, ""):
            lasting += [n] * is_lasting(event.footprint)
    return Segment(frozenset(footprint), lasting)


def _is_needless(done: Run, step: int, actor: int, fault: str, cost: int) -> bool:
    """Whether a fault is the same as one that is explored, or beyond the bound."""
    moment = done.moments[step]
    if moment.current != actor:
        return False
    if fault == LOSE:
        return cost > 0 and not is_lasting(done.trace[step].footprint)
    before = done.moments[step - 1] if step else None
    y = done.trace[step - 1]
    return before is not None and before.current == actor and "waits" not in y.outcome and not is_lasting(y.footprint)


def under_seed(world: World, scenarios: Sequence[str], seed: int, crowd: int) -> Run:
    """One schedule of a seed: two attempts and others of a crowd, in one of the scenarios."""
    chance = random.Random(seed)
    others = chance.choices([name for name in KINDS if name != "attempt"], k=chance.randint(1, crowd - 1))
    case = Case(SCENARIOS[chance.choice(list(scenarios))], ["attempt", *others])
    # some seeds switch often, some hardly ever: both find what the other does not
    switch, fault = chance.choice([0.05, 0.15, 0.4]), chance.choice([0.0, 0.03])

    def pick(step: int, moment: Moment) -> Choice | None:
        if moment.current is None:
            return Choice(step, chance.choice(moment.enabled))
        if chance.random() < fault:
            struck = chance.choice(list(moment.faults))
            return Choice(step, struck, chance.choice(moment.faults[struck]))
        others = [n for n in moment.enabled if n != moment.current]
        if others and chance.random() < switch:
            return Choice(step, chance.choice(others))
        return None

    return run(world, case, (), pick)
