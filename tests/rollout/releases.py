"""What is deployed: the code of this checkout, and that of an older commit, unpacked beside it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
MIGRATIONS = "idempotency/store/migrations/versions"
# Of ours, which older code has not: put beside it.
HARNESS = ("tests/rollout/__init__.py", "tests/rollout/application.py")


class NoHistory(Exception):
    """The older code is not in this clone."""


def commit_of(wanted: str) -> str:
    """The commit that a name means: a revision of the schema stands for the last commit before the next migration.

    Raises `NoHistory` if this clone has no such commit.
    """
    if not re.fullmatch(r"\d{4}", wanted):
        return _git("rev-parse", "--verify", "--quiet", f"{wanted}^{{commit}}", what=f"no commit {wanted}").strip()
    following = f"{MIGRATIONS}/v{int(wanted) + 1:04}_*"
    added = _git("log", "--format=%H", "--diff-filter=A", "--", following, what="no history").split()
    if not added:
        raise NoHistory(f"the commit that followed revision {wanted} is not in this clone{_how_shallow()}")
    # where it was merged, it was added in a branch first
    return _git("rev-parse", "--verify", "--quiet", f"{added[-1]}^", what=f"no commit before {added[-1][:12]}").strip()


def unpack(commit: str, directory: Path) -> Path:
    """The code of a commit, below a directory that this makes, with what the run needs beside it. Raises `NoHistory`."""
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True)
    if packed.returncode != 0:
        raise NoHistory(f"commit {commit[:12]} cannot be unpacked: {packed.stderr.decode().strip()[-200:]}")
    directory.mkdir(parents=True)
    subprocess.run(["tar", "--extract", "--directory", directory], input=packed.stdout, check=True)
    for name in HARNESS:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, directory / name)
    return directory


def revision_of(root: Path) -> str:
    """The newest revision of the schema that code knows. Raises `NoHistory` if it has none."""
    found = sorted(path.name[1:5] for path in (root / MIGRATIONS).glob("v[0-9]*.py"))
    if not found:
        raise NoHistory("the older code has no migrations where they are now: choose a later commit")
    return found[-1]


def knows_clusters(root: Path) -> bool:
    """Whether code takes the addresses of several servers; older code has one name that leads to the primary."""
    return (root / "idempotency" / "sentinel.py").exists()


def _git(*arguments: str, what: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        raise NoHistory("git is not installed") from None
    if done.returncode != 0:
        raise NoHistory(f"{what} in this clone{_how_shallow()}")
    return done.stdout


def _how_shallow() -> str:
    """What to do about a clone without history."""
    asked = subprocess.run(
        ["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    if asked == "true":
        return ", which is shallow: git fetch --unshallow"
    return "" if asked == "false" else ", which is no git repository"
