"""Importing the library defines names and does nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """
import json, pathlib, pkgutil, importlib, sys
from celery import signals
from sqlalchemy import event
from sqlalchemy.pool import Pool
import idempotency

SIGNALS = [signal for signal in vars(signals).values() if isinstance(signal, signals.Signal)]

def found():
    return sum(len(signal.receivers or ()) for signal in SIGNALS)

before = found()
names = [name for _, name, _ in pkgutil.walk_packages(idempotency.__path__, "idempotency.") if ".migrations" not in name]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
after = found()
from idempotency.attempt import session
from idempotency.worker import eager
listening = event.contains(Pool, "checkout", eager._taken) or event.contains(
    session.AttemptSession, "before_commit", session._refuse_commit
)
print(json.dumps([len(names), before, after, listening, pathlib.Path(sys.argv[1]).exists()]))
"""


def test_importing_every_module_connects_and_makes_nothing(tmp_path: Path) -> None:
    counters = tmp_path / "counters"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(counters)],
        cwd=ROOT,
        env={"PATH": "", "PROMETHEUS_MULTIPROC_DIR": str(counters)},
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    modules, before, after, listening, made = json.loads(done.stdout)
    assert modules > 40
    assert after == before
    assert not listening
    assert not made


# What an extra brings, and what a process may never use. Each costs every process that imports it.
HEAVY = ["alembic", "prometheus_client", "rich", "typer", "redis", "pydantic_settings", "structlog", "opentelemetry"]


def loaded(code: str, *names: str) -> list[str]:
    """Which of these packages a new interpreter has loaded after running the code."""
    report = f"\nimport sys; print([name for name in {list(names)!r} if name in sys.modules], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code + report], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[str] = json.loads(done.stderr.splitlines()[-1].replace("'", '"'))
    return found


def test_the_public_names_load_no_optional_package() -> None:
    assert loaded("from idempotency import *\nfrom idempotency.queues import quorum_queue", *HEAVY) == []


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_load_neither_celery_nor_sqlalchemy(option: str) -> None:
    code = f"""
import sys
from idempotency import cli
sys.argv = ["idempotency", {option!r}]
try:
    cli.main()
except SystemExit as ended:
    assert ended.code == 0
"""
    assert loaded(code, "celery", "sqlalchemy", "pydantic", "psycopg", "redis", "alembic") == []
