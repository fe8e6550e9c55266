"""Celery's integration tests: `t/` of the source distribution of the installed version, downloaded by name."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

# What the tests read beside their own folder: pytest's configuration.
WANTED = ("t", "pyproject.toml", "setup.cfg")
# Celery's default loader reads it, in the workers that tests start themselves, too: they share the queue of their side.
CONFIGURATION = """
import os

if os.environ["CELERY_SUITE_SIDE"] == "ours":
    from tests.celery_suite.configuration import configuration

    globals().update(configuration())
"""


def unpacked(below: Path) -> Path:
    """The directory with the tests of the installed Celery, downloaded on first use.

    Raises `subprocess.CalledProcessError` if it cannot be downloaded.
    """
    name = f"celery-{version('celery')}"
    place = below / name
    if not place.exists():
        below.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=below) as directory:
            archive = _downloaded(Path(directory))
            wanted = [f"{name}/{part}" for part in WANTED]
            subprocess.run(["tar", "-xzf", str(archive), "-C", directory, *wanted], check=True)
            (Path(directory) / name).rename(place)
    (place / "celeryconfig.py").write_text(CONFIGURATION)
    return place


def _downloaded(directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-build-isolation", "--no-binary", ":all:", "--dest", str(directory)]
    subprocess.run([*command, f"celery=={version('celery')}"], check=True)
    return next(directory.glob("celery-*.tar.gz"))
