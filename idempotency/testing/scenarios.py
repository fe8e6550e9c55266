"""The scenarios: what is done to a call, each time on a fresh state."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from .call import CallUnderTest
from .processes import Action, Interruption

# A crash point, and how often it had been reached by then.
Reached = tuple[str, int]

POINTS = {
    "hint.left": "before the claim",
    "claimed": "after the claim",
    "body.entered": "as the body began",
    "step.recorded": "in a step, before its COMMIT",
    "step.committed": "after the COMMIT of a step",
    "effect.begun": "before the call of an effect",
    "effect.called": "after the call of an effect, before its result was recorded",
    "effect.recorded": "after the result of an effect was recorded",
    "finish.written": "after the body, before the finishing COMMIT",
    "finish.committed": "after the finishing COMMIT, before the message was acknowledged",
    "released": "after the attempt was let go",
}
# Where a process is stopped while another one takes over: in the body, with no transaction of the attempt open.
OVERTAKEN = ("body.entered", "step.committed", "effect.begun", "effect.called", "effect.recorded")
# Interrupted here, an effect has no recorded outcome, and is called again under the same key.
IN_DOUBT = ("effect.begun", "effect.called")


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is done, and whether a call may be made again in it."""

    name: str
    run: Callable[[CallUnderTest], object]
    in_doubt: bool = False


def scenarios(points: Sequence[Reached]) -> Iterator[Scenario]:
    """Everything that is done to a call whose plain run has reached these points."""
    yield Scenario("called twice by the application, with the same arguments", _called_twice)
    for times in (2, 3):
        yield Scenario(f"delivered {times} times", partial(_delivered, times))
    for point, number in points:
        kill = Interruption(Action.KILL, point, number)
        name = f"killed (SIGKILL) {_where(point, number)}, then delivered again"
        yield Scenario(name, partial(_interrupted, kill), in_doubt=point in IN_DOUBT)
    if ("body.entered", 1) in points:
        yield Scenario("delivered again while it runs", _delivered_while_running)
    yield Scenario("two deliveries at the same moment", _at_once)
    for point, number in points:
        if point in OVERTAKEN:
            stop = Interruption(Action.STOP, point, number)
            name = f"stopped {_where(point, number)}, its lease lost; goes on after another attempt has finished"
            yield Scenario(name, partial(_overtaken, stop), in_doubt=point in IN_DOUBT)
    for point, number in _commits(points):
        what = "a step" if point == "step.recorded" else "the finish"
        ordinal = "" if number == 1 else f" ({number})"
        for action, how in (
            (Action.LOSE_ANSWER, "carried out, and its answer lost"),
            (Action.LOSE_COMMIT, "lost with its connection"),
        ):
            lose = Interruption(action, point, number)
            yield Scenario(f"the COMMIT of {what}{ordinal} {how}", partial(_interrupted, lose))


def plainly(call: CallUnderTest) -> list[Reached]:
    """Deliver the call once, until it has ended. Returns the points that its first attempt has reached."""
    message = call.message()
    journal = call.deliver(message)
    call.finish(message)
    return journal.points


def _called_twice(call: CallUnderTest) -> None:
    plainly(call)
    call.deliver(call.message())


def _delivered(times: int, call: CallUnderTest) -> None:
    message = call.message()
    call.deliver(message)
    call.finish(message)
    for _ in range(times - 1):
        call.deliver(message)


def _interrupted(interruption: Interruption, call: CallUnderTest) -> None:
    message = call.message()
    call.deliver(message, interruption)
    call.deliver_later(message)
    call.finish(message)


def _delivered_while_running(call: CallUnderTest) -> None:
    message = call.message()
    first = call.start(message, Interruption(Action.STOP, "body.entered"))
    call.wait_for(first, stopped=True)
    call.deliver(message)
    first.resume()
    call.wait_for(first)
    call.finish(message)


def _at_once(call: CallUnderTest) -> None:
    message = call.message()
    barrier, opener = os.pipe()
    try:
        both = [call.start(message, barrier=barrier) for _ in range(2)]
        os.write(opener, b"go")
        for each in both:
            call.wait_for(each)
    finally:
        os.close(barrier)
        os.close(opener)
    call.finish(message)


def _overtaken(stop: Interruption, call: CallUnderTest) -> None:
    message = call.message()
    first = call.start(message, stop)
    call.wait_for(first, stopped=True)
    call.deliver_later(message)
    call.finish(message)
    first.resume()
    call.wait_for(first)
    call.finish(message)


def _where(point: str, number: int) -> str:
    return POINTS.get(point, f"at {point}") + ("" if number == 1 else f" ({number})")


def _commits(points: Sequence[Reached]) -> list[Reached]:
    """The commits of the body's session; of an attempt that opens none, its finishing statement."""
    commits = [(point, number) for point, number in points if point in ("step.recorded", "finish.written")]
    if ("finish.written", 1) not in commits and ("finish.committed", 1) in points:
        commits.append(("body.entered", 1))
    return commits
