"""What one process of a search does: it opens a world, and explores what it is given."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from tests.search.exploration import Case, exhaustive, under_seed
from tests.search.tally import Tally
from tests.search.world import World, opened

# Actors of one schedule under a seed, at most.
CROWD = 4

_open_ends = ExitStack()
_worlds: list[World] = []


def open_world(urls: Any) -> None:
    """Take a database from the queue, for as long as this process lives."""
    _worlds.append(_open_ends.enter_context(opened(urls.get())))


def explore_case(case: Case, preemptions: int, faults: int, most: int | None) -> Tally:
    tally, started = Tally(), time.monotonic()
    for done in exhaustive(_worlds[0], case, preemptions=preemptions, faults=faults, most=most):
        tally.add(done)
    tally.seconds = time.monotonic() - started
    return tally


def explore_seeds(seeds: Sequence[int], scenarios: Sequence[str]) -> Tally:
    tally, started = Tally(), time.monotonic()
    for seed in seeds:
        tally.add(under_seed(_worlds[0], scenarios, seed, CROWD))
    tally.seconds = time.monotonic() - started
    return tally
