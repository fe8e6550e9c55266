"""Two type checkers on an application: what they know of its tasks, and which calls they refuse.

The programs are checked outside this repository, as an application is that has the library installed, with the stubs of
`celery-types`. A line that has to be refused names the error of each checker: `# E: mypy's pyright's`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted((Path(__file__).parent / "programs").glob("*.py"))
EXPECTED = re.compile(r"# E: (\S+) (\S+)$")
# Seconds: a checker takes 20 alone, and many times that beside other work.
BOUND = 600
# a program and a line
Errors = dict[tuple[str, int], str]


@pytest.fixture
def application(tmp_path: Path) -> Path:
    """The programs in a folder of their own."""
    for program in PROGRAMS:
        shutil.copy(program, tmp_path)
    return tmp_path


def expected(checker: int) -> Errors:
    """The first error of each line that the programs expect of a checker: mypy (0) or pyright (1)."""
    lines = [(program.name, *line) for program in PROGRAMS for line in enumerate(program.read_text().splitlines(), 1)]
    marked = {(name, number): EXPECTED.search(line) for name, number, line in lines}
    return {place: found.groups()[checker] for place, found in marked.items() if found is not None}


def first(errors: Iterable[tuple[str, int, str]]) -> Errors:
    found: Errors = {}
    for program, line, code in errors:
        found.setdefault((program, line), code)
    return found


def test_both_kinds_of_program_are_there() -> None:
    assert [program.stem for program in PROGRAMS] == ["accepted", "django_accepted", "django_rejected", "rejected"]
    assert {name for name, _ in expected(1)} == {"django_rejected.py", "rejected.py"}


@pytest.mark.long
@pytest.mark.timeout(BOUND + 60)
def test_mypy_keeps_the_types_of_a_task_and_refuses_wrong_calls(application: Path) -> None:
    command = [sys.executable, "-m", "mypy", "--strict", "--output", "json", "--config-file", ""]
    cache = ["--cache-dir", str(ROOT / ".mypy_cache" / "typing")]
    done = subprocess.run(
        # of the library, its types alone
        [*command, *cache, "--follow-imports", "silent", *(program.name for program in PROGRAMS)],
        cwd=application,
        env=os.environ | {"MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=BOUND,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert first((e["file"], e["line"], e["code"]) for e in found if e["severity"] == "error") == expected(0)


@pytest.mark.timeout(BOUND + 60)
def test_pyright_keeps_the_types_of_a_task_and_refuses_wrong_calls(application: Path) -> None:
    configuration = {"typeCheckingMode": "strict", "extraPaths": [str(ROOT)]}
    (application / "pyrightconfig.json").write_text(json.dumps(configuration))
    done = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable],
        cwd=application,
        capture_output=True,
        text=True,
        check=False,
        timeout=BOUND,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads(done.stdout)["generalDiagnostics"]
    errors = ((Path(e["file"]).name, e["range"]["start"]["line"] + 1, e["rule"]) for e in found)
    assert first(errors) == expected(1)
