"""Importing the library defines names and does nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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
