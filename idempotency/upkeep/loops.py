"""The loops of a relay's process: publishing with recovery and resend, dead letters, alerts and alarms, the purge, large results."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from celery import Celery
from sqlalchemy.exc import OperationalError

from ..application import runtime_of
from ..letters.consumer import DeadLetterConsumer
from ..observe.logs import log
from ..observe.outages import Pauses
from ..observe.unreachable import reason
from ..relay.relay import Relay
from ..relay.resend import resend_lost
from ..store import purge
from ..store.statements import is_news
from . import alarms, alerts, maintenance, objects
from .presence import SignOfLife

# Seconds until a turn of upkeep that has left something to do is followed by another one.
UPKEEP_PAUSE = 1.0
# How often the relay checks for dead holders: a killed worker's operations go on within 5 s on the same host.
DEATH_WATCH = 2.0
# How often it checks for something to alert about; each service and reason also keeps to alert_interval.
ALERT_WATCH = 5.0
# How often it purges, and how many rows and seconds of each kind at a time, so that no kind waits for another one; while there
# are more, it goes on.
PURGE_WATCH = 60.0
PURGE_LIMIT = 5_000
PURGE_TIME = 4.0
# The longest pause between two looks through the large results for those that nothing refers to.
OBJECT_WATCH = 12 * 3600.0


def run_relay(celery: Celery, stop: threading.Event) -> None:
    """Run the relay's loops until `stop` is set: publishing, dead letters, alerts, the purge, large results.

    Publishing runs in the calling thread, each of the others in its own, so that a slow alert receiver, a waiting `on_failed`
    or a long purge delays neither messages nor each other. If one of the first four hangs, the relay gives no more signs of
    life, which other relays notice. The sweep of large results is not watched: it may take hours.
    """
    sweep = runtime_of(celery).settings.sweep
    running, life = Relay(celery), SignOfLife(celery, "relay")
    due = {"recover": time.monotonic(), "resend": time.monotonic() + sweep}

    def between_passes() -> None:
        life.progressed(loop="publishing")
        now = time.monotonic()
        if now >= due["recover"]:
            due["recover"] = now + DEATH_WATCH
            if recovered := maintenance.recover(celery):
                log.info("recovered", operations=recovered)
        if now >= due["resend"]:
            due["resend"] = now + sweep
            resend_lost(celery, publisher=running.publisher)

    letters, progressed = DeadLetterConsumer(celery), partial(life.progressed, loop="letters")
    threads = [
        threading.Thread(target=letters.run, args=(stop, progressed), daemon=True),
        threading.Thread(target=_alert, args=(celery, stop, partial(life.progressed, loop="alerts")), daemon=True),
        threading.Thread(target=_purge, args=(celery, stop, partial(life.progressed, loop="purge")), daemon=True),
        threading.Thread(target=_sweep_objects, args=(celery, stop), daemon=True),
    ]
    for thread in threads:
        thread.start()
    life.start()
    running.run(stop, between_passes)
    patience = time.monotonic() + 10
    for thread in threads:
        thread.join(max(patience - time.monotonic(), 0))
    life.end()


def _sweep_objects(celery: Celery, stop: threading.Event) -> None:
    """Delete large results that nothing refers to, now and then until `stop` is set.

    In a thread of its own: the place is listed whole, and may be slow. Relays, which may start together or again and again,
    do not begin at once, nor at the same time.
    """
    if runtime_of(celery).settings.large_results_at is None:
        return
    while not stop.wait(random.uniform(0.0, OBJECT_WATCH)):
        try:
            objects.sweep(celery)
        except Exception as error:  # its text may have an address in it
            log.error("objects_not_swept", error=type(error).__name__)


def _alert(celery: Celery, stop: threading.Event, progressed: Callable[..., object]) -> None:
    """Send alerts and raise alarms until `stop` is set."""

    def turn() -> bool:
        alerts.run_once(celery)
        alarms.run_once(celery)
        return False

    _repeat(turn, ALERT_WATCH, stop, progressed)


def _purge(celery: Celery, stop: threading.Event, progressed: Callable[..., object]) -> None:
    """Purge until `stop` is set."""
    pace = replace(purge.RESTING, progressed=progressed, within=PURGE_TIME)
    _repeat(lambda: maintenance.purge_once(celery, limit=PURGE_LIMIT, pace=pace).more, PURGE_WATCH, stop, progressed)


def _repeat(turn: Callable[[], bool], every: float, stop: threading.Event, progressed: Callable[..., object]) -> None:
    """Take a turn every so many seconds, or again at once if it says that there is more to do. An error ends no loop."""
    pauses = Pauses()
    while not stop.is_set():
        progressed()
        pause = every
        try:
            if turn():
                pause = UPKEEP_PAUSE
            pauses.end()
        except OperationalError as error:
            pause = pauses.next()
            if is_news(error):
                log.warning("postgres_unavailable", error=reason(error))
        except Exception:
            log.exception("upkeep_failed")
        progressed(pause)
        stop.wait(pause)
