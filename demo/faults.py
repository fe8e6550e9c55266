"""Faults during the run: a worker is killed, and the broker and Redis lose everything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from redis import Redis

from demo.processes import Processes

KILL_AT, WIPE_AT = 0.4, 0.6

# Rates of the provider's faults per idempotency key, of `declined` per purchase; times in milliseconds.
PROVIDER_FAULTS = {
    "rate_limited": 0.02,
    "declined": 0.01,
    "error_500_before": 0.02,
    "error_500_after": 0.02,
    "timeout_after": 0.01,
    "latency_ms": 15,
}
# The carrier's, of `label_refused` per return.
CARRIER_FAULTS = {
    "rate_limited": 0.02,
    "label_refused": 0.1,
    "error_500_before": 0.02,
    "error_500_after": 0.02,
    "timeout_after": 0.01,
    "latency_ms": 15,
}
# Mails that are accepted while the answer is lost. None are rejected: those come back after 30 s, too late for a short run.
MAIL_FAULTS = {"drop_after_data": 0.02}


def faults_option(faults: dict[str, float]) -> str:
    """Format faults for the sandbox's command line."""
    return ",".join(f"{name}={value:g}" for name, value in faults.items())


@dataclass
class Step:
    """A fault, due when a share of the operations has ended."""

    name: str
    share: float
    act: Callable[[], str]
    event: str | None = None


class Faults:
    """The faults in order, each injected once."""

    def __init__(self, processes: Processes, victim: str, hints_url: str, wipe_broker: Callable[[], int]) -> None:
        def kill_worker() -> str:
            pid = processes.pid(victim)
            processes.kill(victim)
            return f"killed {victim} (pid {pid}) with SIGKILL; {processes.start_worker()} replaces it"

        def wipe() -> str:
            messages = wipe_broker()
            with Redis.from_url(hints_url) as client:
                hints = client.dbsize()
                client.flushall()
            return f"wiped broker and Redis ({messages} waiting messages, {hints} hints)"

        self._steps = [Step("kill a worker", KILL_AT, kill_worker), Step("wipe broker and Redis", WIPE_AT, wipe)]

    def take(self, ended: int, total: int) -> list[str]:
        """Inject the faults that are due; returns what happened."""
        events = []
        for step in self._steps:
            if step.event is None and ended >= step.share * total > 0:
                step.event = step.act()
                events.append(f"{step.event}, after {ended} of {total} operations")
        return events

    @property
    def events(self) -> list[str]:
        """The faults so far."""
        return [step.event for step in self._steps if step.event is not None]

    @property
    def missing(self) -> list[str]:
        """The faults that did not take place."""
        return [step.name for step in self._steps if step.event is None]
