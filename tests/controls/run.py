"""One control, run with its safeguard and without it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import services
from tests.chaos.checker import Violation
from tests.controls.scenarios import Control
from tests.controls.stage import stage

# Without its safeguard a control has to turn red within so many seconds, the start of its workers included.
PATIENCE = 60.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a control's two runs have reported."""

    control: Control
    with_it: Sequence[Violation]
    without_it: Sequence[Violation]
    seconds_with: float
    seconds_without: float

    @property
    def told(self) -> list[Violation]:
        """What the control's own oracle says of the run without the safeguard."""
        return [violation for violation in self.without_it if violation.invariant == self.control.invariant]

    @property
    def problems(self) -> list[str]:
        """Why this control proves nothing; empty when it does."""
        found = [f"red with its safeguard in place: {violation}" for violation in self.with_it]
        if not self.told:
            others = "; ".join(map(str, self.without_it)) or "nothing"
            found.append(f"green without its safeguard: {self.control.invariant} is not reported ({others} is)")
        if self.seconds_without > PATIENCE:
            found.append(f"took {self.seconds_without:.0f} s to tell, allowed are {PATIENCE:.0f}")
        return found


def run(servers: services.Services, control: Control) -> Outcome:
    """Run the scenario on two fresh stages. AssertionError when one of them does not get to its end."""
    with_it, seconds_with = _once(servers, control)
    without_it, seconds_without = _once(servers, control, control.name)
    return Outcome(control, with_it, without_it, seconds_with, seconds_without)


def _once(servers: services.Services, control: Control, *removed: str) -> tuple[Sequence[Violation], float]:
    started = time.monotonic()
    with stage(servers, *removed, **control.environment) as ready:
        return control.run(ready), time.monotonic() - started
