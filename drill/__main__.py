"""Incidents in a running system, each ended by a script that only reads the alert and its runbook: `python -m drill`.

Exits with 0 only if every incident has ended within the time; 1 otherwise, 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from queue import Empty
from statistics import median
from typing import NoReturn

from drill.incidents import INCIDENTS, Incident
from drill.receiver import Receiver, receiving
from drill.responder import Responder
from drill.system import DrillError, System, running
from services import ServiceError

# Seconds: from the alert to the end of its incident; until an alert comes at all.
WITHIN, ALERTED_WITHIN = 60.0, 120.0


def drill(incident: Incident, system: System, receiver: Receiver, responder: Responder) -> float | None:
    """Bring an incident about, and let the responder end it. Returns the seconds from the alert to the end; None: it has none."""
    receiver.forget()
    responder.begin()
    began = time.monotonic()
    incident.begin(system)
    alerted: float | None = None
    while time.monotonic() < began + ALERTED_WITHIN if alerted is None else time.monotonic() < alerted + WITHIN:
        try:
            alert = receiver.alerts.get(timeout=0.3)
        except Empty:
            if alerted is not None and system.trouble() is None:
                return time.monotonic() - alerted
            continue
        if alerted is None:
            alerted = alert.at
            print(f"    alerted after {alerted - began:.1f} s")
            incident.cause_ends(system)
        elif system.trouble() is None:
            return time.monotonic() - alerted
        print(f"    alert: {alert.summary}  [{alert.runbook.rpartition('/')[2]}]", flush=True)
        responder.answer(alert)
    trouble = system.trouble()
    if alerted is not None and trouble is None and time.monotonic() - alerted <= WITHIN:
        return time.monotonic() - alerted
    print(f"    NOT ENDED: {'no alert came; ' if alerted is None else ''}{trouble or 'it took too long'}")
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the drill and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m drill", description=__doc__)
    names = [incident.name for incident in INCIDENTS]
    parser.add_argument("--only", metavar="NAME,...", default=",".join(names), help=", ".join(names))
    chosen = parser.parse_args(arguments).only.split(",")
    if unknown := set(chosen) - set(names):
        parser.error(f"--only: no such incident: {', '.join(sorted(unknown))}")
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _run([incident for incident in INCIDENTS if incident.name in chosen])
    except (DrillError, ServiceError) as error:
        print(f"drill: {error}", file=sys.stderr)
        return 1


def _run(incidents: Sequence[Incident]) -> int:
    seconds: list[float] = []
    skipped: list[str] = []
    with receiving() as receiver, running(receiver, print) as system:
        responder = Responder(
            system.environment | {"IDEMPOTENCY_TOKEN": system.add_person("ann")},
            system.add_person("ben"),
            system.directory / "responder.log",
            print,
        )
        try:
            for incident in incidents:
                print(f"{incident.name}", flush=True)
                if incident.needs_prometheus and not system.has_prometheus:
                    print("    skipped: only Prometheus sees it, and it is not installed")
                    skipped.append(incident.name)
                    continue
                took = drill(incident, system, receiver, responder)
                if took is not None:
                    seconds.append(took)
                    print(f"    ended {took:.1f} s after the alert", flush=True)
                _put_right(system, responder)
        finally:
            _end_all(responder)
    worst = max(seconds, default=0.0)
    print(
        f"RESULT drill incidents={len(incidents) - len(skipped)} ended={len(seconds)} "
        f"median_seconds={median(seconds or [0.0]):.1f} worst_seconds={worst:.1f}"
        f"{f' skipped={len(skipped)}' if skipped else ''}"
    )
    return 0 if not skipped and len(seconds) == len(incidents) and worst <= WITHIN else 1


def _put_right(system: System, responder: Responder) -> None:
    """The system as it was before, for the next incident: what the responder has started ends, and what it replaced runs again."""
    system.end_old()
    system.start()
    _end_all(responder)
    system.start()


def _end_all(responder: Responder) -> None:
    for started in responder.started:
        if started.poll() is None:
            started.terminate()
    for started in responder.started:
        try:
            started.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()
    responder.started.clear()


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
