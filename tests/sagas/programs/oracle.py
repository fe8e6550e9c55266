"""What must be there once a program has ended. It interprets the program itself, and knows nothing of the library.

From what was found it takes only what is free: values, who has won a race of event and time-out, and where a cancel has met
a saga. A saga that was cancelled must have recorded the beginning of its path, and nothing after the cancel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.sagas.programs.facts import Ended, Facts, names_of
from tests.sagas.programs.program import (
    Call,
    Caught,
    Effect,
    Gather,
    Nested,
    Node,
    Raise,
    Sleep,
    Step,
    Undo,
    Value,
    Wait,
    nodes_of,
)

# The names of the saga, of its calls and of its events.
SAGA, CALL, EVENT = "programs.saga", "programs.call{}", "programs.event"


class _Refused(Exception):
    def __init__(self, code: str, *, is_caught: bool = True) -> None:
        super().__init__(code)
        self.code, self.is_caught = code, is_caught


@dataclass(slots=True)
class Item:
    """A row that a saga records on its path."""

    kind: str
    name: str
    state: str
    thing: str
    undo: Undo | None = None
    result: Any = None
    position: int = 0
    saga: Path | None = None
    code: str | None = None  # of a failed call


@dataclass(slots=True)
class Path:
    """The path of one saga, up to its end."""

    saga: Nested
    facts: Facts
    is_above_cut: bool
    items: list[Item] = field(default_factory=list)
    status: str = ""
    code: str | None = None
    result: Any = None
    asked: Counter[str] = field(default_factory=Counter)
    events: dict[int, list[str]] = field(default_factory=dict)  # published and not used, by channel

    def __post_init__(self) -> None:
        for node in nodes_of(self.saga.body):
            if isinstance(node, Wait) and node.comes == "before":
                self.events.setdefault(node.channel, []).append(f"{node.thing}/0")
        try:
            self.result = self._follow(self.saga.body)
            self.status = "COMPLETED"
        except _Refused as refused:
            self.status, self.code = "FAILED", refused.code
        if self.is_cut and self.found is not None:
            self.status, self.code, self.result = "FAILED", "cancelled", None
            self.items = self.items[: len(self.found.forward)]

    @property
    def found(self) -> Ended | None:
        return self.facts.sagas.get(self.saga.thing)

    @property
    def is_cut(self) -> bool:
        """Whether it was cancelled: by a person, or by a saga that was itself cancelled and had called it."""
        if self.saga.thing in self.facts.cancelled:
            return True
        return self.is_above_cut and self.found is not None and self.found.error == "cancelled"

    # ------------------------------------------------------------ the program's meaning

    def _follow(self, body: Sequence[Node]) -> list[Any]:
        results: list[Any] = []
        for node in body:
            match node:
                case Caught():
                    try:
                        results.append(self._follow(node.body))
                    except _Refused as refused:
                        if not refused.is_caught:
                            raise
                        results.append(f"caught {refused.code}")
                case Gather():
                    results.append(self._gather(node.calls))
                case Call() | Nested():
                    results.append(self._gather([node])[0])
                case Wait():
                    number = self._wait(node)
                    results.append(self._follow(node.otherwise) if number is None else number)
                case Raise(how="for good"):
                    raise _Refused("gives_up")
                case Raise(how="always"):
                    raise _Refused("attempts_exhausted", is_caught=False)
                case Raise():
                    results.append(None)
                case Step() | Effect():
                    results.append(self._act(node))
                case Sleep():
                    self._add("timer", "sleep", "done", node)
                    results.append(None)
                case Value():
                    results.append(self._value(node))
        return results

    def _act(self, node: Step | Effect) -> Any:
        name = self._name(node.name)
        if isinstance(node, Step):
            if node.refused:
                self.items.append(Item("step", name, "failed", node.thing))
                raise _Refused("step_refused")
            self.items.append(Item("step", name, "done", node.thing, node.undo, f"did {node.thing}"))
        elif node.how in ("refused", "dead"):
            self.items.append(Item("effect", name, "not_happened", node.thing, node.undo))
            if node.how == "dead":
                raise _Refused("attempts_exhausted", is_caught=False)
            raise _Refused("effect_refused")
        else:
            self.items.append(Item("effect", name, "done", node.thing, node.undo, f"charged {node.thing}"))
        return self.items[-1].result

    def _gather(self, calls: Sequence[Call | Nested]) -> list[Any]:
        begun = []
        for node in calls:
            if isinstance(node, Nested):
                path = Path(node, self.facts, self.is_cut)
                item = Item("call", self._name(SAGA), "done", node.thing, node.undo, path.result, saga=path)
                item.code = path.code
            else:
                name, code = self._name(CALL.format(node.task)), "call_refused" if node.refused else None
                item = Item("call", name, "done", node.thing, node.undo, f"called {node.thing}", code=code)
            if item.code is not None:
                item.state, item.result = "failed", None
            begun.append(item)
        self.items += begun
        for item in begun:
            if item.code is not None:
                raise _Refused(item.code)
        return [item.result for item in begun]

    def _wait(self, node: Wait) -> str | None:
        name, ready = self._name(EVENT), self.events.setdefault(node.channel, [])
        own = [f"{node.thing}/0", f"{node.thing}/1"]
        if not ready and node.comes == "after":
            ready += own[:1]
        elif not ready and node.comes == "twice":
            ready += own
        elif not ready and node.comes == "raced":
            row = None if self.found is None else self.found.row(name)
            if row is not None and row.state == "done":
                ready += own[:1]
            else:
                self.items.append(Item("wait", name, "timed_out", node.thing))
                ready += own[:1]
                return None
        if ready:
            self.items.append(Item("wait", name, "done", node.thing, result=ready.pop(0)))
            return str(self.items[-1].result)
        if node.comes == "late":
            ready += own[:1]
        self.items.append(Item("wait", name, "timed_out", node.thing))
        return None

    def _value(self, node: Value) -> Any:
        if node.kind == "version":
            self.items.append(Item("version", node.thing, "done", node.thing))
            return True
        item = self._add("value", node.kind, "done", node)
        row = None if self.found is None else self.found.row(item.name)
        item.result = None if row is None else row.result
        return item.result

    def _add(self, kind: str, name: str, state: str, node: Sleep | Value) -> Item:
        self.items.append(Item(kind, self._name(name), state, node.thing))
        return self.items[-1]

    def _name(self, given: str) -> str:
        self.asked[given] += 1
        return given if self.asked[given] == 1 else f"{given}#{self.asked[given]}"


# ---------------------------------------------------------------- what is found is compared


class _Comparison:
    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.wrong: list[str] = []
        self.entries: Counter[str] = Counter()
        self.acts: Counter[str] = Counter()
        self.letters: Counter[tuple[str, str]] = Counter()
        self.sagas: set[str] = set()

    def expect(self, what: str, expected: Any, found: Any) -> None:
        if expected != found:
            self.wrong.append(f"{what}: expected {expected}, found {found}")

    def saga(self, path: Path) -> None:
        thing, found = path.saga.thing, path.found
        self.sagas.add(thing)
        if found is None:
            self.wrong.append(f"{thing}: there is no saga")
            return
        self.expect(f"{thing}: status", path.status, found.status)
        self.expect(f"{thing}: record", "completed" if path.status == "COMPLETED" else "failed", found.record)
        self.expect(f"{thing}: code", path.code, found.record_error)
        if path.status == "COMPLETED":
            self.expect(f"{thing}: result", path.result, found.result)
        else:
            self.letters[SAGA, path.code or ""] += 1
        self._rows(path, found)
        undone = [item for item in reversed(path.items) if item.undo is not None and item.state == "done"]
        self._undos(path, found, undone if path.status == "FAILED" else [])
        for item in path.items:
            self._acted(item)
            if item.saga is not None:
                self.saga(item.saga)

    def _rows(self, path: Path, found: Ended) -> None:
        thing, rows = path.saga.thing, found.forward
        self.expect(f"{thing}: path", [f"{i.kind} {i.name}" for i in path.items], [f"{r.kind} {r.name}" for r in rows])
        if (then := self.facts.cancelled.get(thing)) is not None:
            self.expect(f"{thing}: forward rows since its cancel", then, names_of(rows))
        for number, (item, row) in enumerate(zip(path.items, rows, strict=False), start=1):
            item.position = row.position
            if path.is_cut and number == len(rows) and row.state in _CUT.get(item.kind, ()):
                item.state = row.state
                item.result = item.result if row.state == "done" else None
            what = f"{thing}: {item.kind} {item.name} ({item.thing})"
            self.expect(f"{what}: state", item.state, row.state)
            result = row.result["data"]["number"] if row.kind == "wait" and row.result is not None else row.result
            if row.state in ("done", "timed_out"):
                self.expect(f"{what}: result", item.result, result)
            if item.result is not None and item.kind != "wait":
                self.expect(f"{what}: in the context", item.result, found.context.get(item.name))

    def _undos(self, path: Path, found: Ended, undone: Sequence[Item]) -> None:
        thing = path.saga.thing
        expected = [(f"undo {item.name}", "done", item.position) for item in undone]
        self.expect(f"{thing}: undos", expected, [(row.name, row.state, row.undoes) for row in found.undos])
        if found.undos and found.forward:
            last, first = found.forward[-1].position, found.undos[0].position
            self.expect(f"{thing}: whether something forward was recorded after an undo", False, last > first)
        order = []
        for item in undone:
            told = item.result if isinstance(item.result, str) else "a saga"
            order.append(f"undo:{item.thing} {told}")
            self.entries[order[-1]] += 1
        self.expect(f"{thing}: order of undos", order, [entry for entry in self.facts.entries if entry in set(order)])

    def _acted(self, item: Item) -> None:
        if item.kind == "effect":
            self.acts[item.thing] += item.state == "done"
        elif item.saga is None and item.kind in ("step", "call"):
            self.entries[f"{item.kind}:{item.thing}"] += item.state == "done"
        if item.code is not None and item.saga is None:
            self.letters[CALL.format(item.name.partition("#")[0].removeprefix("programs.call")), item.code] += 1


# In what states a cancel may leave what a saga was about: a wait goes on no more, and a call outside is known by its outcome.
_CUT = {"wait": ("not_happened",), "timer": ("not_happened",), "effect": ("done", "not_happened")}


def compare(root: Nested, facts: Facts) -> list[str]:
    """All that is not as it must be."""
    comparison = _Comparison(facts)
    path = Path(root, facts, False)
    comparison.saga(path)
    expect = comparison.expect
    expect("sagas", sorted(comparison.sagas), sorted(facts.sagas))
    expect("entries", sorted((+comparison.entries).elements()), sorted(facts.entries))
    expect("acts outside", sorted((+comparison.acts).elements()), sorted(thing for thing, _ in facts.acts))
    # those of what a saga has called are closed when it ends
    ends = {(SAGA, path.code or "")} if path.status == "FAILED" else set()
    for status, expected in (("open", Counter(ends)), ("discarded", comparison.letters - Counter(ends))):
        letters = Counter((task, reason) for task, reason, found in facts.letters if found == status)
        expect(f"{status} letters", sorted(expected.items()), sorted(letters.items()))
    expect("operations that have not ended", [], facts.open)
    expect("deliveries left", [], facts.pending)
    return [*facts.seen, *comparison.wrong]
