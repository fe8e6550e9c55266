"""The drill itself, with two of its incidents: one that the library tells of, and one that only Prometheus sees."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.documents import ROOT
from tests.support.monitoring import needs_prometheus


@pytest.mark.long
@needs_prometheus
def test_two_incidents_are_ended_by_their_runbooks() -> None:
    command = [sys.executable, "-m", "drill", "--only", "unknown-effect,read-only"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = re.search(r"^RESULT drill incidents=2 ended=2 median_seconds=\S+ worst_seconds=(\S+)$", done.stdout, re.M)
    assert figures is not None, done.stdout
    assert float(figures[1]) <= 60


@pytest.mark.long
def test_an_incident_that_is_none_is_refused() -> None:
    command = [sys.executable, "-m", "drill", "--only", "flood"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "no such incident: flood" in done.stderr
