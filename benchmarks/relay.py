"""The relay compared with a loop of `apply_async`, both with publisher confirms, in turns."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rich.progress import track
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from idempotency.relay.relay import Relay

from . import jobs

_numbers = itertools.count(10_000_000)


@dataclass(frozen=True)
class Rates:
    """Messages per second, by round."""

    direct: list[float]
    relay: list[float]

    @property
    def ratio(self) -> float:
        """The relay's median over that of the loop."""
        return statistics.median(self.relay) / statistics.median(self.direct)


def measure(database: Engine, *, rounds: int, messages: int) -> Rates:
    """Publish `messages` each way; they are not consumed."""
    rates = Rates([], [])
    relay = Relay(jobs.app)
    sides: list[tuple[list[float], Callable[[int], float]]]
    sides = [(rates.direct, _direct), (rates.relay, partial(_relayed, database, relay))]
    for round_ in track(range(rounds + 1), description="relay: a loop of apply_async and the relay in turns"):
        for of_side, publish in sides if round_ % 2 else sides[::-1]:
            took = publish(messages)
            if round_:
                of_side.append(messages / took)
        with jobs.app.connection_for_write() as connection:
            connection.default_channel.queue_purge("unique")
    relay.close()
    return rates


def _direct(messages: int) -> float:
    with jobs.app.producer_pool.acquire(block=True) as producer:
        began = time.perf_counter()
        for number in itertools.islice(_numbers, messages):
            jobs.unique.apply_async((number,), producer=producer)
        return time.perf_counter() - began


def _relayed(database: Engine, relay: Relay, messages: int) -> float:
    with Session(database.execution_options(isolation_level="READ COMMITTED")) as session, session.begin():
        for number in itertools.islice(_numbers, messages):
            jobs.unique.enqueue(session, number)
    began = time.perf_counter()
    published = 0
    while published < messages:
        published += relay.run_once().published
    took = time.perf_counter() - began
    with database.connect() as connection:
        left = connection.execute(
            text("SELECT count(*) FROM idempotency.outbox WHERE status <> 'published'")
        ).scalar_one()
    if left:
        raise RuntimeError(f"{left} rows were not published")
    return took
