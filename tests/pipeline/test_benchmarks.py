"""What `make bench` and `make soak` measure runs, and what it says is there; so little says nothing about time."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import services
from tests.support.benchmarks import ROOT, bench


@pytest.mark.long
def test_attempts_are_timed_beside_records_what_waits_and_an_open_transaction(
    servers: services.Services, database: str
) -> None:
    options = ("--messages", "20", "--records", "20000", "--waiting", "1000")
    fields = bench(servers, database, "scale,waiting,held,relay", *options)
    named = ("scale_claim_ratio", "backlog_ratio", "held_ratio", "relay_vs_apply_async")
    assert all(float(fields[name]) > 0 for name in named)
    # of both rounds of the database with the open transaction, and the bytes of each
    assert float(fields["dead_rows_per_operation"]) > 0
    assert float(fields["wal_bytes_per_operation"]) > 100
    assert float(fields["without"]) > 100


@pytest.mark.long
def test_a_soak_counts_each_operation_once_and_says_that_a_short_one_shows_nothing() -> None:
    command = [sys.executable, "-m", "benchmarks.soak", "--operations", "2000", "--concurrency", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert re.search(r"^RESULT operations=2000 .* lost=0 doubled=0 misreported=0 ", done.stdout, re.MULTILINE), (
        done.stderr[-2000:]
    )
    assert done.returncode in (1, 2)  # 1: in so short a time, tables have only begun to fill
    assert done.returncode == 1 or "proves nothing" in done.stdout
