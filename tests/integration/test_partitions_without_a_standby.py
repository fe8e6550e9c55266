"""While no standby confirms, the upkeep of partitions stops nobody from reading a record."""

from __future__ import annotations

from threading import Thread
from typing import Any

import psycopg
import pytest
from celery import Celery
from sqlalchemy import Engine, make_url

from idempotency import lookup
from idempotency.application import close_runtime
from idempotency.store import periods
from idempotency.upkeep import maintenance
from services.cluster_postgres import PostgresPair
from tests.support.batches import put_one
from tests.support.deliveries import Deliveries
from tests.support.failover import fixture_database, fixture_pair, fixture_template  # noqa: F401
from tests.support.partitions import put_into_partitions
from tests.support.processes import eventually
from tests.support.tasks import make_task

pytestmark = [pytest.mark.direct, pytest.mark.long]


def names(engine: Engine) -> set[str]:
    with engine.connect() as connection:
        made = periods.found(connection)
    assert made is not None
    return {each.name for each in made.all}


@pytest.mark.parametrize("what", ["drops", "makes"])
def test_what_a_pass_makes_or_drops_waits_for_no_standby(
    pair: PostgresPair,
    bank: Celery,
    database: str,
    deliveries: Deliveries,
    engine: Engine,
    configure: Any,
    what: str,
) -> None:
    """It holds a lock on all records until its commit is over."""
    configure(lease=3.0, heartbeat=1.0)
    put_into_partitions(database)
    first = names(engine)
    if what == "makes":  # as once in each period: the newest is still to be made
        with engine.connect() as connection:
            made = periods.found(connection)
            assert made is not None
            newest = max((each for each in made.all if each.ends_at), key=lambda each: str(each.ends_at)).name
            connection.exec_driver_sql(f"DROP TABLE idempotency_partitions.{newest}")
    task = make_task(bank, put_one, key="{account}")
    assert deliveries.deliver(task, "e0").state == "SUCCESS"
    close_runtime(bank)
    pair.standby.kill()
    upkeep = Thread(target=lambda: maintenance.purge(bank), daemon=True)
    upkeep.start()
    # what is before the oldest partition is empty, and goes
    eventually(lambda: names(engine) == (first if what == "makes" else first - {"records_before"}))
    url = pair.primary.database_url(str(make_url(database).database)).replace("+psycopg", "")
    with psycopg.connect(url, autocommit=True, options="-c lock_timeout=2s") as connection:
        found = connection.execute("SELECT status FROM idempotency.records WHERE key = 'e0'").fetchall()
    assert found == [("completed",)]
    assert lookup(bank, task.name, "e0").result == "e0"
    pair.standby.start()
    upkeep.join(60)
    assert not upkeep.is_alive()
