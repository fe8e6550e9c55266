"""A relay that purges for long: it is alive, and its alerts do not wait for the end of it."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
from celery import Celery
from sqlalchemy import Engine, text

from idempotency.store import sweeps
from idempotency.store.sweeps import Pace
from idempotency.upkeep import alerts, loops
from idempotency.upkeep.maintenance import purge_once

pytestmark = pytest.mark.plain

# Of so many operations each takes so long to delete.
SLOW = """
INSERT INTO idempotency.records
    (tenant, task, key, status, fence, fingerprint, message, queue, result, response_code, completed_at, expires_at, service)
SELECT 'default', 't', 'k' || n, 'completed', n, 'v1:f', 'm', 'q', 'null', 200, clock_timestamp() - interval '9 days',
       clock_timestamp() - interval '1 day', 'bank' FROM generate_series(1, 600) n;
CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.002); RETURN OLD; END $$;
CREATE TRIGGER slow BEFORE DELETE ON idempotency.records FOR EACH ROW EXECUTE FUNCTION slow();
"""


ROWS = """
INSERT INTO idempotency.outbox
    (message_id, tenant, task, key, fingerprint, message, queue, origin, generation, service, status, published_at, settled_at)
SELECT gen_random_uuid()::text, 'default', 'external', 'x' || n, 'v1:f', 'm', 'q', 'enqueue', 1, 'bank', 'published',
       clock_timestamp() - interval '99 days', clock_timestamp() - interval '99 days' FROM generate_series(1, 300) n;
"""


def left(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM idempotency.records")).scalar_one())


@pytest.mark.long
def test_it_tells_of_each_batch_and_ends_in_time(bank: Celery, engine: Engine) -> None:
    with engine.connect() as connection:
        connection.exec_driver_sql(SLOW)
    told: list[int] = []
    pace = Pace(progressed=lambda *_: told.append(left(engine)), within=0.3)
    purged = purge_once(bank, limit=5_000, pace=pace)
    assert purged.more
    assert 0 < purged.operations < 600
    assert left(engine) == 600 - purged.operations
    assert set(told) >= set(range(left(engine), 600, 100))
    assert purge_once(bank, limit=5_000) == (purged.__class__(600 - purged.operations, 0, 0, more=False))


@pytest.mark.long
def test_alerts_are_sent_meanwhile(bank: Celery, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(alerts, "run_once", lambda app: sent.append(left(engine)))
    monkeypatch.setattr(loops, "ALERT_WATCH", 0.05)
    monkeypatch.setattr(loops, "UPKEEP_PAUSE", 0.0)
    with engine.connect() as connection:
        connection.exec_driver_sql(SLOW)
    stop = threading.Event()
    threads = [
        threading.Thread(target=each, args=(bank, stop, lambda *_: None)) for each in (loops._alert, loops._purge)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 60
    while left(engine) and time.monotonic() < deadline:
        time.sleep(0.1)
    stop.set()
    for thread in threads:
        thread.join(30)
    assert left(engine) == 0
    assert len({many for many in sent if 0 < many < 600}) >= 2


def test_what_one_kind_leaves_undone_keeps_no_other_waiting(
    bank: Celery, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rested: list[float] = []
    monkeypatch.setattr(sweeps, "time", SimpleNamespace(monotonic=time.monotonic, sleep=rested.append))
    with engine.connect() as connection:
        connection.exec_driver_sql(SLOW)
        connection.exec_driver_sql(ROWS)
    purged = purge_once(bank, limit=5_000, pace=Pace(rest=100.0, within=0.5))
    assert purged.more
    assert 0 < purged.operations < 600
    assert purged.rows == 300
    assert 0 < max(rested) <= 0.5  # a hundred times a batch would be twenty seconds


def test_it_tells_of_each_row_that_is_handled_alone(bank: Celery, engine: Engine) -> None:
    refuses = SLOW.replace("PERFORM", "IF OLD.key = 'k1' THEN RAISE EXCEPTION 'refused'; END IF; PERFORM")
    with engine.connect() as connection:
        connection.exec_driver_sql(refuses.replace("600", "120"))
    told: list[int] = []
    purge_once(bank, limit=5_000, pace=Pace(progressed=lambda *_: told.append(left(engine))))
    assert left(engine) == 1
    assert len(set(told)) > 90
