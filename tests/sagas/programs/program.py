"""What a seed draws: the program of a saga, as data. Nothing here knows the library.

A *thing* is what a node is about: unique, so that whatever happened to it can be counted.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

# Names that several nodes of a program share, so that the same one is used again.
NAMES = ("pack", "book", "sign")
TASKS = 2
CHANNELS = 2
# Of waits for no time: what comes late on the others could come before them or after them.
NOBODYS = 9
# Each failure for a while uses an attempt, and so does each fault.
MOST_TRIES = 4


@dataclass(frozen=True, slots=True)
class Undo:
    """What undoes a thing. It fails for a while so often; a `broken` one fails for good, until a person replays it."""

    tries: int = 0
    broken: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    thing: str
    name: str
    undo: Undo | None
    tries: int = 0
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Effect:
    """`how`: `acts`; `refused`; `down` (not reached `tries` times) or `lost` (acts, and `tries` answers are lost);
    `dead` and `mute` are these two for ever. `asks`: the provider can be asked what became of a call.
    """

    thing: str
    name: str
    undo: Undo | None
    how: str = "acts"
    tries: int = 0
    asks: bool = True


@dataclass(frozen=True, slots=True)
class Call:
    thing: str
    task: int
    undo: Undo | None
    tries: int = 0
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Nested:
    """A call of another saga."""

    thing: str
    body: tuple[Node, ...]
    undo: Undo | None


@dataclass(frozen=True, slots=True)
class Gather:
    calls: tuple[Call | Nested, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """`comes`: the event is published `before` the saga begins, `after` it waits (or `twice` then), `never`, `late` (after
    the time-out) or `raced` (about when the time is over). `at_once` waits for no time. `otherwise` follows a time-out.
    """

    thing: str
    channel: int
    comes: str
    seconds: float
    otherwise: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Sleep:
    thing: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Value:
    """`now` or `uuid`; or `version`, which is true for a saga that has not come past it."""

    thing: str
    kind: str


@dataclass(frozen=True, slots=True)
class Caught:
    """Its failure is caught, and the saga goes on. `all`: so is every other error, which changes nothing."""

    body: tuple[Node, ...]
    all: bool = False


@dataclass(frozen=True, slots=True)
class Raise:
    """`for good`; `for a while` (so many `tries`); `always`, until the attempts are used up."""

    thing: str
    how: str
    tries: int = 0


Node = Step | Effect | Call | Nested | Gather | Wait | Sleep | Value | Caught | Raise


@dataclass(slots=True)
class _Draw:
    random: random.Random
    root: str
    numbers: count[int] = field(default_factory=lambda: count(1))
    tries: int = MOST_TRIES
    left: int = 9

    def thing(self) -> str:
        return f"{self.root}.{next(self.numbers)}"

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def some_tries(self, probability: float = 0.2) -> int:
        """How often something fails for a while: all that the code of one saga does shares an allowance."""
        tries = min(self.random.randint(1, 2), self.tries) if self.chance(probability) else 0
        self.tries -= tries
        return tries

    def undo(self) -> Undo | None:
        if not self.chance(0.7):
            return None
        return Undo(tries=self.random.randint(1, 2) if self.chance(0.2) else 0, broken=self.chance(0.06))

    def body(self, most: int, depth: int, caught: bool = False) -> tuple[Node, ...]:
        return tuple(self.node(depth, caught) for _ in range(self.random.randint(1, most)))

    def node(self, depth: int, caught: bool) -> Node:
        self.left -= 1
        kinds = {"step": 4, "effect": 3, "call": 4, "wait": 3, "sleep": 1, "value": 1, "raise": 1 if caught else 0.3}
        if depth < 2 and self.left > 0:
            kinds |= {"gather": 2, "caught": 2, "nested": 1.5}
        match self.random.choices(list(kinds), list(kinds.values()))[0]:
            case "step":
                name = self.random.choice(NAMES)
                return Step(self.thing(), name, self.undo(), self.some_tries(), refused=self.chance(0.12))
            case "effect":
                return self.effect()
            case "call":
                return self.call()
            case "wait":
                return self.wait(depth, caught)
            case "sleep":
                return Sleep(self.thing(), float(self.random.randint(60, 86400)))
            case "value":
                return Value(self.thing(), self.random.choice(("now", "uuid", "version")))
            case "gather":
                calls = [self.call() for _ in range(self.random.randint(2, 3))]
                nested = [self.nested(depth)] if depth == 0 and self.chance(0.25) else []
                return Gather(tuple(self.random.sample([*calls, *nested], len(calls) + len(nested))))
            case "caught":
                body = self.body(2, depth + 1, caught=True)
                # its own errors come from nothing that is recorded
                own = any(isinstance(node, Raise) and node.how != "for good" for node in nodes_of(body))
                return Caught(body, all=not own and self.chance(0.4))
            case "nested":
                return self.nested(depth)
            case _:
                how = self.random.choices(("for good", "for a while", "always"), (4, 3, 1))[0]
                return Raise(self.thing(), how, self.some_tries(1.0) if how == "for a while" else 0)

    def effect(self) -> Effect:
        how = self.random.choices(("acts", "refused", "down", "lost", "dead", "mute"), (6, 1, 1, 1, 0.3, 0.3))[0]
        tries = self.some_tries(1.0) if how in ("down", "lost") else 0
        # without an answer about what has not ended, only a person could say
        asks = how not in ("acts", "down", "lost") or self.chance(0.5)
        return Effect(self.thing(), self.random.choice(NAMES), self.undo(), how, tries, asks)

    def call(self) -> Call:
        tries = self.random.randint(1, 2) if self.chance(0.2) else 0
        return Call(self.thing(), self.random.randrange(TASKS), self.undo(), tries, refused=self.chance(0.2))

    def wait(self, depth: int, caught: bool) -> Wait:
        comes = self.random.choices(
            ("before", "after", "twice", "never", "late", "raced", "at_once"), (3, 3, 2, 2, 2, 3, 0.5)
        )[0]
        seconds = 0.0 if comes == "at_once" else float(self.random.randint(60, 5 * 86400))
        otherwise = self.body(2, depth + 1, caught) if depth < 2 and self.chance(0.4) else ()
        channel = NOBODYS if comes == "at_once" else self.random.randrange(CHANNELS)
        return Wait(self.thing(), channel, comes, seconds, otherwise)

    def nested(self, depth: int) -> Nested:
        thing, tries = self.thing(), self.tries
        self.tries = MOST_TRIES  # its record has attempts of its own
        body = self.body(3, depth + 1)
        self.tries = tries
        return Nested(thing, body, self.undo())


def draw(seed: int) -> Nested:
    """The program of a seed: the saga that is enqueued."""
    drawn = _Draw(random.Random(f"program {seed}"), f"p{seed}")
    size = drawn.random.randint(2, 7)
    body = tuple(drawn.node(0, False) for _ in range(size))
    if drawn.chance(0.45) and not any(isinstance(node, Raise) for node in body):
        body = (*body, Raise(drawn.thing(), "for good"))  # what there is to undo
    return Nested(f"p{seed}", body, None)


def nodes_of(body: Sequence[Node]) -> Iterator[Node]:
    """All nodes of a body, those of other sagas excepted."""
    for node in body:
        yield node
        match node:
            case Gather():
                yield from node.calls
            case Wait():
                yield from nodes_of(node.otherwise)
            case Caught():
                yield from nodes_of(node.body)


def sagas_of(root: Nested) -> Iterator[Nested]:
    """A saga, and all that it may call."""
    yield root
    for node in nodes_of(root.body):
        if isinstance(node, Nested):
            yield from sagas_of(node)
