"""Benchmarks as `make bench` runs them, on the servers of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import services

ROOT = Path(__file__).parents[2]


def bench(servers: services.Services, database: str, only: str, *options: str) -> dict[str, str]:
    """Run benchmarks, one round of each. Returns the fields of all their RESULT lines."""
    environment = os.environ | servers.environment() | {"DATABASE_URL": database}
    command = [sys.executable, "-m", "benchmarks", "--only", only, "--rounds", "1", *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-2000:]
    results = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return dict(field.split("=") for fields in results for field in fields)
