"""The benchmark's path through each store: what it times has to run; DynamoDB's stand-in says nothing about the time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import stores


@pytest.mark.long
def test_each_store_is_measured_also_in_a_table_of_an_earlier_run(
    store_database: str, redis_url: str, dynamodb_endpoint: str
) -> None:
    running: Any = SimpleNamespace(database_url=store_database, redis_url=redis_url)
    for _ in range(2):
        took = stores.measure(running, rounds=2, many=3)
        assert {name: len(each) for name, each in took.items()} == {"postgres": 2, "redis": 2, "dynamodb": 2}
        assert min(took["dynamodb"]) > 0
