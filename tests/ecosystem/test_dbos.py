"""The benchmark that runs the same saga on DBOS: both sides do all of their steps."""

from __future__ import annotations

import pytest

import services
from tests.support.benchmarks import bench

pytest.importorskip("dbos")
pytestmark = pytest.mark.ecosystem


def test_the_benchmark_beside_dbos_runs(servers: services.Services, database: str) -> None:
    fields = bench(servers, database, "sagas", "--messages", "20")
    assert float(fields["sagas_vs_dbos"]) > 0
