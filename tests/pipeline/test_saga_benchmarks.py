"""The benchmarks about sagas run; so few steps and sagas say nothing about time. (Beside DBOS: tests/ecosystem.)"""

from __future__ import annotations

import pytest

import services
from tests.support.benchmarks import bench


@pytest.mark.long
def test_the_benchmark_of_long_sagas_runs(servers: services.Services, database: str) -> None:
    fields = bench(servers, database, "saga_length", "--steps", "30")
    assert float(fields["saga_length"]) > 0
    # claim, saga, its steps, then begin and wait, commit
    assert fields["resume_10_trips"] == fields["resume_30_trips"] == "6"


@pytest.mark.long
def test_the_benchmark_of_waiting_sagas_runs(servers: services.Services, database: str) -> None:
    fields = bench(servers, database, "saga_waits", "--sagas", "200")
    assert {"saga_waits", "relay", "recover", "resend", "purge", "status", "woken_vs_plain"} <= set(fields)
    assert float(fields["per_second"]) > 0
