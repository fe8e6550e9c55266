"""Partitions of a cell that a tenant has moved away from, as docs/cells.md says."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection
from sqlalchemy.exc import IntegrityError

from idempotency.store import left_alone
from idempotency.store.migrations.partitioning import PARTITIONS
from idempotency.upkeep import maintenance
from tests.partitions.test_claims import found, partition_of
from tests.support.documents import blocks
from tests.support.operations import completed, new_id

CONSTRAINED = "SELECT conrelid::regclass::text FROM pg_constraint WHERE conname = 'acme_has_moved'"


def test_partitions_are_made_and_refuse_the_tenant_until_the_cell_is_opened_again(
    bank: Celery, connection: Connection
) -> None:
    close, _, reopen = blocks("docs/cells.md", "sql")
    driver: Any = connection.connection.driver_connection
    driver.execute(close)
    for each in found(connection).all:
        if not each.is_default:
            connection.exec_driver_sql(f"DROP TABLE {PARTITIONS}.{each.name}")
    left_alone.forget()
    maintenance.purge(bank)
    made = {f"{PARTITIONS}.{each.name}" for each in found(connection).all}
    assert len(made) > 2
    assert made < set(connection.exec_driver_sql(CONSTRAINED).scalars())
    assert f"{PARTITIONS}.{partition_of(connection, completed(connection, new_id('other')).id)}" in made
    with pytest.raises(IntegrityError, match="acme_has_moved"):
        completed(connection, new_id("acme"))
    driver.execute(reopen)
    assert list(connection.exec_driver_sql(CONSTRAINED).scalars()) == []
    completed(connection, new_id("acme"))
