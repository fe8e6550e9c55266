"""What goes wrong on purpose while the work is under way: a worker is killed, and the broker and Redis lose everything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from redis import Redis

from demo.processes import Processes

KILL_AT, WIPE_AT = 0.4, 0.6

# Rates of the provider's faults by idempotency key, `declined` by purchase; times in milliseconds.
PROVIDER_FAULTS = {
    "rate_limited": 0.02,
    "declined": 0.01,
    "error_500_before": 0.02,
    "error_500_after": 0.02,
    "timeout_after": 0.01,
    "latency_ms": 15,
}
# A mail that is accepted while the answer is lost. A refused one comes back after 30 s, longer than a short run lasts.
MAIL_FAULTS = {"drop_after_data": 0.02}


def spelled(faults: dict[str, float]) -> str:
    """The faults as the sandbox's command line takes them."""
    return ",".join(f"{name}={value:g}" for name, value in faults.items())


@dataclass
class Step:
    """One thing that goes wrong once a share of the operations has ended."""

    name: str
    share: float
    act: Callable[[], str]
    event: str | None = None


class Faults:
    """The steps in their order, each taken once."""

    def __init__(self, processes: Processes, victim: str, hints_url: str, wipe_broker: Callable[[], int]) -> None:
        def kill_worker() -> str:
            pid = processes.pid(victim)
            processes.kill(victim)
            return f"killed {victim} (pid {pid}) with SIGKILL; {processes.start_worker()} takes its place"

        def wipe() -> str:
            messages = wipe_broker()
            with Redis.from_url(hints_url) as client:
                hints = client.dbsize()
                client.flushall()
            return f"wiped broker and Redis ({messages} waiting messages, {hints} hints)"

        self._steps = [Step("kill a worker", KILL_AT, kill_worker), Step("wipe broker and Redis", WIPE_AT, wipe)]

    def take(self, ended: int, total: int) -> list[str]:
        """Take the steps that are due; returns what happened."""
        events = []
        for step in self._steps:
            if step.event is None and ended >= step.share * total > 0:
                step.event = step.act()
                events.append(f"{step.event}, after {ended} of {total} operations")
        return events

    @property
    def events(self) -> list[str]:
        """What has happened so far."""
        return [step.event for step in self._steps if step.event is not None]

    @property
    def missing(self) -> list[str]:
        """The steps that have not taken place."""
        return [step.name for step in self._steps if step.event is None]
