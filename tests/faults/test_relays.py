"""F2–F4, F16 and F21 in the relay: killed, frozen, told to end, eight at once, and of an older release."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from idempotency.relay.relay import Relay
from tests.faults.conftest import SeenCell
from tests.faults.marks import each
from tests.faults.scene import PATIENCE, POINTS, Scene
from tests.support import crashing
from tests.support.operations import at_once
from tests.support.processes import eventually

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def held_relay(scene: Scene) -> Iterator[Start]:
    """Starts a relay in a separate process, and returns when it is held in a phase of the scene's operation."""
    started: list[subprocess.Popen[bytes]] = []

    def start(phase: str, app: str = "tests.support.bank") -> subprocess.Popen[bytes]:
        crashing.plan(scene.directory, POINTS[phase], crashing.HOLD)
        command = [sys.executable, "-m", "idempotency.cli", "relay", "-A", app]
        relay = subprocess.Popen(
            command,
            env=scene.environment,
            stderr=subprocess.DEVNULL,
            # a shell's background job, and all that it starts, ignores SIGQUIT
            preexec_fn=lambda: signal.signal(signal.SIGQUIT, signal.SIG_DFL),
        )
        started.append(relay)
        scene.accept()
        assert scene.held(phase) == relay.pid
        assert scene.outbox()[0].status == "pending"
        if phase == "P7":
            assert (scene.messages(), scene.logged(" received")) == (0, 0)
        else:
            eventually(lambda: scene.messages() or scene.logged(" received"), what="the broker has the message")
        return relay

    yield start
    for relay in started:
        relay.kill()
        relay.wait(PATIENCE)


def lease_is_over(scene: Scene) -> None:
    """The relay's reservation of its rows is over; the lease of an attempt that may be running is not."""
    scene.execute("UPDATE idempotency.outbox SET relayed_until = clock_timestamp() WHERE relayed_until IS NOT NULL")


def consumed(scene: Scene, copies: int) -> str:
    """Wait until the workers have handled so many copies. K: published again, and run once; W: published once, later."""
    scene.completed()
    handled = (" succeeded", " ignored")
    eventually(lambda: sum(map(scene.logged, handled)) >= copies, timeout=PATIENCE, what=f"{copies} copies handled")
    eventually(lambda: scene.outbox()[0].status == "published", timeout=PATIENCE, what="marked")
    assert scene.outcome() in ("–", "D")
    assert scene.messages() == 0
    received, runs = scene.logged(" received"), len(scene.trace("body.entered"))
    return {(1, 1): "W", (2, 1): "K"}.get((received, runs), f"received {received} times, run {runs} times")


@pytest.mark.parametrize("phase", each("F2", "P7", "P8", "P9"))
def test_the_relay_is_killed(phase: str, scene: Scene, held_relay: Start, cell: SeenCell) -> None:
    scene.worker()
    relay = held_relay(phase)
    relay.kill()
    relay.wait(PATIENCE)
    assert scene.outbox()[0].status == "pending"
    lease_is_over(scene)
    scene.relay()
    cell.saw(consumed(scene, 1 if phase == "P7" else 2))


@pytest.mark.parametrize("phase", each("F3", "P7", "P8", "P9"))
def test_the_relay_is_frozen_past_its_lease_and_goes_on_later(
    phase: str, scene: Scene, held_relay: Start, cell: SeenCell
) -> None:
    scene.worker()
    relay = held_relay(phase)
    relay.send_signal(signal.SIGSTOP)
    lease_is_over(scene)
    scene.relay()
    eventually(lambda: scene.outbox()[0].status == "published", timeout=PATIENCE, what="published by another relay")
    scene.let_go(phase)
    relay.send_signal(signal.SIGCONT)
    letter = consumed(scene, 2)
    relay.terminate()
    assert relay.wait(PATIENCE) == 0
    cell.saw(letter)


@pytest.mark.parametrize("phase", each("F4", "P7", "P8", "P9"))
def test_a_relay_asked_to_stop_finishes_its_batch(phase: str, scene: Scene, held_relay: Start, cell: SeenCell) -> None:
    scene.worker()
    relay = held_relay(phase)
    relay.terminate()
    scene.let_go(phase)
    assert relay.wait(PATIENCE) == 0
    assert scene.outbox()[0].status == "published"
    # no other relay was there
    assert consumed(scene, 1) == "W"
    cell.saw("finish")


@pytest.mark.parametrize("phase", each("F4", "P8", "P9"))
def test_a_relay_asked_to_stop_at_once(phase: str, scene: Scene, held_relay: Start, cell: SeenCell) -> None:
    scene.worker()
    relay = held_relay(phase)
    relay.terminate()
    relay.send_signal(signal.SIGQUIT)
    assert relay.wait(PATIENCE) == -signal.SIGQUIT
    lease_is_over(scene)
    scene.relay()
    cell.saw(consumed(scene, 2))


@pytest.mark.cell("F16", "P7")
def test_of_eight_relays_at_once_one_publishes_the_row(scene: Scene, cell: SeenCell) -> None:
    scene.accept()
    assert eight_at_once(scene) == [0] * 7 + [1]
    assert scene.messages() == 1
    scene.worker()
    assert consumed(scene, 1) == "W"
    cell.saw("1 relay")


@pytest.mark.cell("F16", "P9")
def test_of_eight_relays_one_publishes_again_what_was_not_marked(
    scene: Scene, held_relay: Start, cell: SeenCell
) -> None:
    scene.worker()
    relay = held_relay("P9")
    lease_is_over(scene)
    assert eight_at_once(scene) == [0] * 7 + [1]
    scene.let_go("P9")
    letter = consumed(scene, 2)
    relay.terminate()
    assert relay.wait(PATIENCE) == 0
    cell.saw(letter)


def eight_at_once(scene: Scene) -> list[int]:
    """Eight relays take one pass each, released together; how many rows each has published, the fewest first."""
    relays = [Relay(scene.app) for _ in range(8)]
    try:
        return sorted(at_once(8, lambda number: relays[number].run_once().published))
    finally:
        for relay in relays:
            relay.close()


@pytest.mark.parametrize("phase", each("F21", "P7", "P8", "P9"))
def test_a_relay_of_an_older_release_shares_its_rows_with_a_new_one(
    phase: str, scene: Scene, held_relay: Start, cell: SeenCell
) -> None:
    # the old release does not know the task whose message it carries
    scene.worker()
    relay = held_relay(phase, app="tests.faults.older_code")
    lease_is_over(scene)
    scene.relay()
    eventually(lambda: scene.outbox()[0].status == "published", timeout=PATIENCE, what="published by the new relay")
    scene.let_go(phase)
    letter = consumed(scene, 2)
    relay.terminate()
    assert relay.wait(PATIENCE) == 0
    cell.saw(letter)
