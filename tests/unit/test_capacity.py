"""docs/capacity.md says what docs/capacity.json has measured; its arithmetic is that of its formulas; too small a disk is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import capacity_page as page
from benchmarks.capacity_waiting import GUESS_SHORT, OWED, ROOM, NoRoom, check_room, room_needed
from idempotency.relay.relay import BATCH


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(page.MEASURED.read_text())
    return found


def test_the_page_is_what_was_measured(measured: dict[str, Any]) -> None:
    assert page.PAGE.read_text() == page.rendered(page.PAGE.read_text(), measured), "run make capacity"


def test_a_figure_that_was_changed_by_hand_is_noticed(measured: dict[str, Any]) -> None:
    text = page.PAGE.read_text()
    other = re.sub(r"(\| WAL, bytes \| )[^|]+", r"\g<1>1 ", text)
    assert other != text
    assert page.rendered(other, measured) == text


def test_a_page_without_a_table_is_refused(measured: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must have the blocks about, costs"):
        page.rendered(page.PAGE.read_text().replace("<!-- costs -->", ""), measured)


def test_what_is_assumed_is_what_the_command_assumes(measured: dict[str, Any]) -> None:
    assert measured["assumed"] == page.ASSUMED
    assert all(f"`{name}`" in page.PAGE.read_text() for name in page.ASSUMED)


def test_the_arithmetic_is_that_of_the_page() -> None:
    """By hand, with figures that are easy to follow."""
    cpu = {"caller": 0.001, "worker": 0.002, "relay": 0.0005, "postgres": 0.001, "redis": 0.0001, "rabbitmq": 0.0002}
    connections = {"worker": {"postgres": 4}, "relay": {"postgres": 3}}
    cost = {"cpu": cpu, "wal": 4000, "commits": 4, "messages": 1, "redis_commands": 3, "bytes": 2000}
    cost |= {"concurrency": 2, "connections": connections}
    measured = {"costs": {"plain": cost, "effect": cost}, "assumed": page.ASSUMED, "machine": {"processors": 2}}
    many = page.needed(measured, "plain", 100_000)
    assert many["Postgres' cores"] == pytest.approx(100_000 * 0.001 / 0.6)
    assert many["WAL MB/s"] == pytest.approx(400)
    assert many["cells"] == 6  # of 167 cores, 32 in each; the log alone would need 2
    assert many["pool processes"] == 334
    assert many["relays"] == 84
    assert many["connections of each"] == -(-(334 * 2 + 84 * 3) // 6)
    assert many["poolers of each"] == 0
    assert many["its nodes"] == 7  # of 100 cores for three copies
    assert many["Redis servers"] == 17
    assert many["disk TB"] == pytest.approx(100_000 * 2000 * 72 * 3600 / 1e12)
    assert page.needed(measured, "effect", 1000)["pool processes"] == 204  # 200 of them wait for a call
    one = page.carries(measured, "plain")
    assert one["one relay"] == pytest.approx(1200)
    assert one["the same: its log"] == pytest.approx(50_000)
    # a relay that waits for confirms longer than it computes
    slow = measured | {
        "waiting": [
            {"relay": BATCH * 0.003, "is_whole": True},
            {"relay": BATCH * 0.002, "is_whole": True},
            {"relay": BATCH * 0.001, "is_whole": False},
        ]
    }
    assert page.carries(slow, "plain")["one relay"] == pytest.approx(300)
    assert page.needed(slow, "plain", 99_000)["relays"] == 330
    assert page.needed(measured, "plain", 1)["relays"] == page.needed(measured, "plain", 1)["cells"] == 1


@pytest.mark.parametrize(
    ("value", "shown"), [(0, "0"), (float("inf"), "–"), (1234.5, "1,230"), (12.34, "12.3"), (0.01234, "0.0123")]
)
def test_figures_have_three_digits(value: float, shown: str) -> None:
    assert page.number(value) == shown


def test_a_disk_that_is_too_small_is_refused_by_what_is_needed(tmp_path: Path) -> None:
    check_room(tmp_path, 1)
    needed = room_needed(10**12, GUESS_SHORT)
    assert needed == pytest.approx(10**12 * GUESS_SHORT * ROOM + OWED)
    with pytest.raises(NoRoom, match=rf"1,000,000,000,000 waiting: need {needed / 1e9:.0f} GB of disk .* have \d+ GB"):
        check_room(tmp_path, 10**12)
