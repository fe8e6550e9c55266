"""What a soak calls a rise: beyond its error, and beyond what is a small part of the whole."""

from __future__ import annotations

import random

import pytest

from benchmarks.slopes import Series
from benchmarks.soak import NOTHING_WRONG, compared, too_short


def measured(base: float, per_million: float, noise: float) -> Series:
    chance, series = random.Random(7), Series("MiB")
    for sample in range(1, 101):
        series.add(sample * 10_000, base + per_million * sample / 100 + chance.uniform(-noise, noise))
    return series


@pytest.mark.parametrize(
    ("base", "per_million", "noise", "rises"),
    [
        (100.0, 50.0, 5.0, True),
        (100.0, 0.0, 5.0, False),
        (100.0, 2.0, 0.1, False),  # beyond its error, and 1.3 of 100 in the time that is looked at
        (100.0, -50.0, 5.0, False),
        (0.0, 0.0, 0.0, False),
    ],
)
def test_what_rises_is_told_from_what_is_flat(base: float, per_million: float, noise: float, rises: bool) -> None:
    series = measured(base, per_million, noise)
    assert series.rises() is rises
    slope, error = series.slope()
    assert slope == pytest.approx(per_million, abs=4 * error + 1e-9)


def test_what_fills_up_in_the_beginning_does_not_rise() -> None:
    series = Series("MiB")
    for sample in range(1, 101):
        series.add(sample * 10_000, min(sample, 30) * 10.0)
    assert not series.rises()


def test_one_more_connection_does_not_rise_and_several_do() -> None:
    for more, rises in ((1.0, False), (4.0, True)):
        series = Series("connections", spare=2.0)
        for sample in range(1, 101):
            series.add(sample * 10_000, 10.0 + more * (sample > 66))
        assert series.rises() is rises


@pytest.mark.parametrize(("per_million", "rises"), [(0.0, False), (400.0, True)])
def test_what_falls_now_and_then_rises_only_if_it_does_so_beyond_that(per_million: float, rises: bool) -> None:
    series = Series("rows")
    for sample in range(1, 101):
        series.add(sample * 10_000, 100.0 + 2.0 * ((sample + 22) % 56) + per_million * sample / 100)
    assert series.rises() is rises


@pytest.mark.parametrize(
    ("with_rows", "twice", "letters", "found"),
    [
        ({1, 2, 3}, 0, {"0"}, NOTHING_WRONG),
        ({1, 3}, 0, {"0"}, "lost=1 doubled=0 misreported=0"),
        ({1, 2, 3}, 1, {"0"}, "lost=0 doubled=1 misreported=0"),
        ({1, 2, 3}, 0, set(), "lost=1 doubled=0 misreported=0"),  # what fails has a letter
        ({0, 1, 2, 3}, 0, {"0"}, "lost=0 doubled=1 misreported=0"),  # and no row
        ({1, 2}, 1, {"0"}, "lost=1 doubled=1 misreported=0"),  # as many rows as there should be
        ({1, 2, 3}, 0, {"0", "2"}, "lost=0 doubled=0 misreported=1"),  # done, and its letter says that it failed
        ({1, 2, 99}, 0, {"0"}, "lost=1 doubled=0 misreported=1"),  # nobody had asked for it
    ],
)
def test_a_soak_compares_rows_and_letters_by_number(
    with_rows: set[int], twice: int, letters: set[str], found: str
) -> None:
    assert compared(4, {0}, with_rows, twice, letters) == found


@pytest.mark.parametrize(("samples", "warm", "is_short"), [(100, 120.0, False), (29, 120.0, True), (100, 119.0, True)])
def test_a_short_soak_shows_nothing(samples: int, warm: float, is_short: bool) -> None:
    assert bool(too_short(samples, warm, kept=60.0)) is is_short
