"""Run the suite on the middleware that it was written for and on ours, and keep what differs in docs/edge-suite.md.

EDGE_SUITE_REPOSITORY is where the suite is cloned from, by default GitHub; the published package does not contain it.
Exit status 0: each difference has a reason. 1: not so.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from sqlalchemy import create_engine

import services
from idempotency.store import schema

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PAGE = ROOT / "docs" / "edge-suite.md"
PLACE = ROOT / "var" / "edge-suite"
REPOSITORY = "https://github.com/snok/asgi-idempotency-header"
COMMIT = "8f89a5c5c713881aff89cfb44b524c1792b6429d"

ANY_TYPE = (
    "the suite expects that only JSON is kept, so that a repeat runs the handler again; ours replays every media type, "
    "byte for byte, redirects and finite streams too"
)
# By test, without its parameters.
REASONS = {
    "test_middleware.py::test_non_json_responses": ANY_TYPE,
    "test_middleware.py::test_wrong_response_encoding": ANY_TYPE,
    "test_middleware.py::test_multiple_concurrent_requests": (
        "the suite sends two at once and asks that the first one sent wins; ours claims in threads, so that either may be "
        "the one that is carried out, and the other gets the 409"
    ),
    "test_middleware.py::test_bad_header_formatting": (
        "the suite enforces UUIDs; the draft leaves the form of a key to the server, and ours takes 1 to 255 printable "
        "ASCII characters"
    ),
}


def main() -> int:
    python, suite = _environment(), _suite()
    theirs = _run(python, suite, "theirs", "")
    with services.running(needs=["postgres"]) as servers:
        engine = create_engine(servers.database_url)
        schema.migrate(engine)
        engine.dispose()
        ours = _run(python, suite, "ours", servers.database_url)
    different = Counter(_name(test) for test, outcome in theirs.items() if ours.get(test) != outcome)
    unexplained = sorted(set(different) - set(REASONS))
    summary = (
        f"EDGE tests={len(theirs)} theirs={_passed(theirs)} ours={_passed(ours)} skipped_by_the_suite="
        f"{sum(outcome == 'skipped' for outcome in theirs.values())} differences={different.total()} "
        f"tests_that_differ={len(different)} unexplained={len(unexplained)}"
    )
    PAGE.write_text(_page(different, summary))
    print(summary)  # noqa: T201
    return 1 if unexplained or not theirs else 0


def _environment() -> Path:
    """The Python of an environment with what the suite was written for, and with this library."""
    python = PLACE / "venv" / "bin" / "python"
    if not python.exists():
        PLACE.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", PLACE / "venv"], check=True)
        install: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*install, "--requirement", HERE / "requirements.txt", "--editable", ROOT], check=True)
    return python


def _suite() -> Path:
    suite = PLACE / "suite"
    if not suite.exists():
        subprocess.run(
            ["git", "clone", "--quiet", os.environ.get("EDGE_SUITE_REPOSITORY", REPOSITORY), suite], check=True
        )
    subprocess.run(["git", "-C", suite, "checkout", "--quiet", COMMIT], check=True)
    return suite


def _run(python: Path, suite: Path, side: str, database_url: str) -> dict[str, str]:
    """The outcome of each test of the suite on one side."""
    outcomes = PLACE / f"{side}.json"
    outcomes.unlink(missing_ok=True)
    environment = os.environ | {
        "EDGE_SUITE_SIDE": side,
        "EDGE_SUITE_OUTCOMES": str(outcomes),
        "DATABASE_URL": database_url,
        "PYTHONPATH": str(HERE),
    }
    command = [str(python), "-m", "pytest", "-q", "-p", "edge_adapter", "-p", "no:cacheprovider", "-c", os.devnull]
    with (PLACE / f"{side}.log").open("w") as log:
        subprocess.run([*command, "--rootdir", ".", "tests"], cwd=suite, env=environment, stdout=log, check=False)
    read: dict[str, str] = json.loads(outcomes.read_text())
    return read


def _name(test: str) -> str:
    return re.sub(r"\[.*", "", test)


def _passed(outcomes: dict[str, str]) -> int:
    return sum(outcome == "passed" for outcome in outcomes.values())


def _page(different: Counter[str], summary: str) -> str:
    rows = "\n".join(
        f"| `{name}` | {count} | {REASONS.get(name, 'UNEXPLAINED')} |" for name, count in sorted(different.items())
    )
    return f"""# The tests of `asgi-idempotency-header`, on our middleware

The test suite of the published middleware [asgi-idempotency-header]({REPOSITORY}) 0.2.0, at commit `{COMMIT[:12]}`, run
twice: on that middleware, and on ours behind an adapter that translates the names of its options and of the header that
marks a replay. `make edge-suite` does this and writes this page. Tests that the suite itself skips (a method that is
not keyed in that configuration) say nothing about either.

| test that passes there and fails on ours | variants | why |
|---|---|---|
{rows}

    {summary}

Its tests of storage backends are about its own classes, and pass on both sides for that reason.
"""


if __name__ == "__main__":
    raise SystemExit(main())
