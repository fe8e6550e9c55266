"""What a rollout calls delayed and proved, and which commit its older code is of."""

from __future__ import annotations

import subprocess
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.evidence import Id, Violation
from tests.chaos.ledgers import Change
from tests.rollout import releases
from tests.rollout.releases import MIGRATIONS, NoHistory, commit_of, revision_of
from tests.rollout.run import BACK, NEW, OLD, Result, slowest_of_parts
from tests.rollout.waits import Wait, waits

BEGAN = datetime(2026, 3, 2, tzinfo=UTC)
ID = Id("red", "chaos.deposit", "7")
PROVED = Counter({f"{OLD}, older tables": 1, f"{OLD}, newest tables": 1, f"{NEW}, newest tables": 1, f"{BACK}, newest tables": 1})  # fmt: skip


def change(second: float, book: str, status: str | None, before: str | None = None, id: Id = ID) -> Change:
    """A line of the ledger."""
    named = {"tenant": id.tenant, "task": id.task, "key": id.key}
    old: Any = None if before is None else {**named, "status": before}
    at = BEGAN + timedelta(seconds=second)
    return Change(1, at, at, 1, 1, "pid 5", book, "UPDATE" if old else "INSERT", old, {**named, "status": status})


def test_a_wait_is_from_what_accepted_an_operation_to_its_first_end() -> None:
    other = Id("blue", "chaos.deposit", "7")
    changes = [
        change(0, "outbox", "pending"),
        change(1, "outbox", "pending", id=other),
        change(2, "records", "started"),
        change(3, "records", "completed", "started"),
        change(4, "records", "released", "completed"),
        change(9, "records", "completed", "released"),
        change(30, "records", "failed", "started", id=other),
    ]
    assert waits(changes, [ID, other, Id("red", "chaos.deposit", "8")]) == [
        Wait(29.0, BEGAN + timedelta(seconds=1), other, "pid 5"),
        Wait(3.0, BEGAN, ID, "pid 5"),
    ]


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({}, 0),
        ({"slowest": [Wait(19.9, BEGAN, ID, "pid 5")]}, 0),
        ({"slowest": [Wait(20.1, BEGAN, ID, "pid 5")]}, 1),
        ({"lost": 1}, 1),
        ({"doubled": 1}, 1),
        ({"violations": [Violation("I1", "red/chaos.deposit/7", "twice")]}, 1),
        ({"ended": PROVED - Counter({f"{BACK}, newest tables": 1})}, 2),
        ({"broken": 0}, 2),
        ({"missing": ["event"]}, 2),
        ({"control": "lost", "violations": [Violation("I21", "red/chaos.deposit/7", "deleted unsent")]}, 0),
        ({"control": "lost", "violations": [Violation("I15", "red/chaos.deposit/7", "gone")]}, 2),
        ({"control": "lost", "slowest": [Wait(20.1, BEGAN, ID, "pid 5")]}, 2),
        ({"control": "delayed", "slowest": [Wait(20.1, BEGAN, ID, "pid 5")]}, 0),
        ({"control": "delayed", "lost": 1}, 2),
    ],
)
def test_a_rollout_is_as_good_as_its_operations_and_proves_what_has_run(more: dict[str, Any], status: int) -> None:
    proved: dict[str, Any] = {"lease": 20.0, "accepted": 9, "ended": PROVED, "broken": 1}
    assert Result(**proved | more).status == status


def test_the_last_line_has_the_slowest_operation_and_the_lease() -> None:
    slowest = [Wait(20.5, BEGAN, ID, "pid 5"), Wait(0.5, BEGAN, ID, "pid 5")]
    result = Result(lease=20.0, accepted=9, slowest=slowest)
    assert result.line(61.4) == (
        "RESULT rollout cluster=1 operations=9 lost=0 doubled=0 delayed=1 slowest_seconds=20.5 lease=20 violations=0 seconds=61"
    )
    result.control = "delayed"
    assert result.line(61.4).startswith("RESULT rollout cluster=1 control=delayed operations=9 ")


def test_the_slowest_of_each_part_is_of_what_it_has_accepted() -> None:
    parts = [("older", BEGAN), ("schema", BEGAN + timedelta(seconds=10)), ("newest", BEGAN + timedelta(seconds=20))]
    found = [
        Wait(float(seconds), BEGAN + timedelta(seconds=at), ID, "pid 5") for at, seconds in ((0, 3), (9, 30), (20, 2))
    ]
    assert slowest_of_parts(parts, found) == {"older": 30.0, "newest": 2.0}


# ---------------------------------------------------------------- the older code


def git(*arguments: str, where: Path) -> str:
    settings = ("-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false")
    command = ["git", *settings, *arguments]
    return subprocess.run(command, cwd=where, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone whose schema has come to 0016, with a commit more of 0015."""
    place = tmp_path / "project"
    (place / MIGRATIONS).mkdir(parents=True)
    git("init", "--quiet", where=place)
    for name, subject in (("v0015_a.py", "one"), ("more.py", "two"), ("v0016_b.py", "three")):
        (place / MIGRATIONS / name).touch()
        git("add", "--all", where=place)
        git("commit", "--quiet", "--message", subject, where=place)
    monkeypatch.setattr(releases, "ROOT", place)
    monkeypatch.setattr(releases, "HARNESS", ())
    return place


def test_a_revision_of_the_schema_means_the_last_commit_that_had_it(history: Path, tmp_path: Path) -> None:
    commit = commit_of("0015")
    assert git("log", "-1", "--format=%s", commit, where=history) == "two"
    assert commit_of("HEAD") != commit
    older = releases.unpack(commit, tmp_path / "older")
    assert (revision_of(older), revision_of(history)) == ("0015", "0016")


def test_a_clone_without_the_older_code_says_what_to_do(
    history: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NoHistory, match=r"no commit nowhere in this clone$"):
        commit_of("nowhere")
    with pytest.raises(NoHistory, match=r"the commit that followed revision 0016 is not in this clone$"):
        commit_of("0016")
    shallow = tmp_path / "shallow"
    git("clone", "--quiet", "--depth", "1", history.as_uri(), str(shallow), where=tmp_path)
    monkeypatch.setattr(releases, "ROOT", shallow)
    with pytest.raises(NoHistory, match="shallow: git fetch --unshallow"):
        commit_of("0015")
    with pytest.raises(NoHistory, match="shallow: git fetch --unshallow"):
        commit_of("HEAD~1")
