"""A provider in this process: idempotency keys, a ledger, and faults by plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from idempotency import Defer, PermanentError, StoredRefusal
from tests.search.scheduler import note, stop_before, touched

# What a call may meet, in the order of a scenario's plan:
#   ok        it acts, and answers
#   lost      it acts, and its answer is lost on the way (or a proxy answers 500 in its place)
#   down      it was never reached
#   refused   turned away before the layer that knows keys (the API key was revoked): no word about earlier calls
#   declined  the layer that knows keys has stored this answer: under this key nothing happens any more
#   later     come back in a minute
FAULTS = ("ok", "lost", "down", "refused", "declined", "later")
# What a `later` asks for, in seconds.
LATER = 60.0


@dataclass(frozen=True, slots=True)
class Charge:
    """One line of the provider's ledger: it acted."""

    id: str
    key: str
    task: str
    amount: int


class Provider:
    """Acts once per key; everything it did is in `charges`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self, plan: Sequence[str] = ()) -> None:
        self.plan = list(plan)
        self.charges: list[Charge] = []
        self.struck: list[str] = []  # the faults that really met a call
        self._declined: set[str] = set()
        self._keys: list[str] = []

    def call(self, task: str, amount: int, key: str) -> dict[str, str]:
        """Act, once per key. Raises ConnectionError, `PermanentError`, `StoredRefusal` or `Defer` where the plan says so."""
        stop_before(f"provider.call({amount}, key {self._number(key)})")
        touched("w:provider")
        fault = self.plan.pop(0) if self.plan else "ok"
        if fault != "ok":
            self.struck.append(fault)
        match fault:
            case "down":
                note("down, not reached")
                raise ConnectionError("the provider cannot be reached")
            case "refused":
                note("refused: the API key was revoked")
                raise PermanentError("the API key was revoked", "key_revoked")
            case "later":
                note("later")
                raise Defer(LATER, "the provider wants this later")
        charge = self.find(key)
        if charge is None and (fault == "declined" or key in self._declined):
            self._declined.add(key)
            note("declined")
            raise StoredRefusal("declined", "declined")
        if charge is None:
            charge = Charge(f"ch_{len(self.charges) + 1}", key, task, amount)
            self.charges.append(charge)
            note(f"acted, {charge.id}")
        else:
            note(f"replayed, {charge.id}")
        if fault == "lost":
            note("the answer is lost")
            raise ConnectionError("no answer from the provider")
        return {"id": charge.id}

    def close(self, key: str) -> Charge | None:
        """What happened under the key; if nothing has, nothing will."""
        stop_before(f"provider.close(key {self._number(key)})")
        touched("w:provider")
        charge = self.find(key)
        if charge is None:
            self._declined.add(key)
        note("closed" if charge is None else f"found, {charge.id}")
        return charge

    def _number(self, key: str) -> int:
        if key not in self._keys:
            self._keys.append(key)
        return self._keys.index(key) + 1

    def find(self, key: str) -> Charge | None:
        """The truth."""
        touched("r:provider")
        return next((charge for charge in self.charges if charge.key == key), None)
