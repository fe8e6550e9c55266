"""While no standby confirms, `revoke(terminate=True)` keeps its worker for seconds only, and is carried out all the same."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

import pytest
from celery import Celery
from celery.app.task import Context
from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError

from idempotency import IdempotentTask
from idempotency.worker.revocation import revoke_terminated
from services.cluster_postgres import PostgresPair
from tests.support import bank as bank_module
from tests.support import crashing
from tests.support.batches import put_one
from tests.support.deliveries import Deliveries, request_of
from tests.support.failover import fixture_database, fixture_pair, fixture_template  # noqa: F401
from tests.support.operations import Entries, Record
from tests.support.processes import Processes, eventually
from tests.support.tasks import make_task

pytestmark = [pytest.mark.direct, pytest.mark.long]
# Seconds.
SOON = 30
LETTERS = text("SELECT reason FROM idempotency.dead_letters")

app = bank_module.app


@app.task(base=IdempotentTask, bind=True, name="revoked.hold", key="{account}")
def hold(self: IdempotentTask, account: str) -> None:
    crashing.reach("working")


@app.task(name="revoked.plain")
def plain(path: str) -> None:
    Path(path).touch()


def test_a_mark_that_is_not_confirmed_is_given_up_within_seconds_and_may_be_made(
    pair: PostgresPair, bank: Celery, deliveries: Deliveries, record: Record, entries: Entries
) -> None:
    task = make_task(bank, put_one, key="{account}")
    bank.finalize()
    context = Context(request_of(bank, task, "t1"), args=["e0"], kwargs={}, is_eager=False, called_directly=False)
    pair.standby.kill()
    raised: list[BaseException] = []

    def revoke() -> None:
        try:
            revoke_terminated(task, context)
        except OperationalError as error:
            raised.append(error)

    revoking = Thread(target=revoke, daemon=True)
    revoking.start()
    revoking.join(SOON)
    assert not revoking.is_alive()
    assert "no answer within" in str(raised)
    pair.standby.start()
    eventually(lambda: record("e0"), what="a standby has it")
    assert deliveries.deliver(task, "e0", origin="recover", task_id="t1").state == "IGNORED"
    row = record("e0")
    assert row is not None
    assert (row.status, row.error_code, entries("e0")) == ("failed", "revoked", 0)


def test_other_tasks_of_the_worker_go_on_meanwhile(
    pair: PostgresPair,
    bank: Celery,
    processes: Processes,
    environment: dict[str, str],
    engine: Engine,
    record: Record,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    crashing.plan(environment["CRASH_DIRECTORY"], "working", crashing.HOLD)
    held = Path(environment["CRASH_DIRECTORY"]) / "working.held"
    hold.apply_async(("e0",), task_id="terminated")
    worker = processes.worker("--concurrency", "2", app=__name__, LEASE="5")
    eventually(held.exists, what="the body runs")
    pair.standby.kill()
    bank.control.revoke("terminated", terminate=True, signal="SIGKILL")
    eventually(lambda: "revoke_failed" in worker.log, timeout=SOON, what="the mark is given up")
    plain.delay(str(tmp_path / "meanwhile"))
    eventually((tmp_path / "meanwhile").exists, what=worker.log)
    pair.standby.start()
    request.getfixturevalue("relay")  # which brings the operation back once its lease is over

    def has_ended() -> bool:
        row = record("e0")
        return row is not None and row.status == "failed"

    eventually(has_ended, what=worker.log)
    with engine.connect() as connection:
        assert connection.execute(LETTERS).scalars().all() == ["revoked"]
