"""The checker has nothing to say about a real run with killed, stopped and doubled attempts in it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import text

import services
from idempotency.relay.relay import Relay
from idempotency.relay.resend import resend_lost
from idempotency.store import dead_letters
from idempotency.upkeep.maintenance import recover
from tests.chaos import ledgers
from tests.chaos.checker import Accepted, Evidence, check
from tests.controls.stage import stage
from tests.support import bank, crashing
from tests.support.outside import OutsideWorld
from tests.support.processes import eventually

POINTS = (
    "hint.left",
    "claimed",
    "step.recorded",
    "effect.begun",
    "effect.called",
    "finish.written",
    "finish.committed",
)


@pytest.fixture
def ready(servers: services.Services) -> Iterator[Any]:
    if servers.broker == "redis":
        pytest.skip("the stage needs RabbitMQ")
    with stage(servers) as ready:
        yield ready


@pytest.fixture
def relayed(ready: Any) -> Iterator[Any]:
    """A relay that recovers too, in a thread."""
    relay, stop = Relay(ready.app), threading.Event()
    thread = threading.Thread(target=relay.run, args=(stop, lambda: (recover(ready.app), None)[1]), daemon=True)
    thread.start()
    yield ready
    stop.set()
    thread.join(10)


@pytest.mark.long
def test_a_run_with_kills_failures_duplicates_and_a_replay_is_clean(relayed: Any, outside: OutsideWorld) -> None:
    ready, accepted = relayed, []
    workers = [ready.worker().wait_until_ready() for _ in range(2)]
    for point in POINTS:
        crashing.plan(ready.crashes, point, crashing.KILL_CHILD)
        bank.transfer.delay(point, outside.url)
        rows = ((f"{point}/step", 1), (point, 7))
        accepted.append(Accepted("default", bank.transfer.name, point, rows, '{"amount": 7}', acts=1))
        eventually((ready.crashes / f"{point}.reached").exists, timeout=60, what=point)
    for number in range(10):
        for tenant in ("default", "other"):
            for _ in range(3):
                bank.deposit.apply_async((f"d{number}",), tenant=tenant)
            accepted.append(Accepted(tenant, bank.deposit.name, f"d{number}", ((f"d{number}", 1),)))
    for how, code in (("permanent", "no_account"), ("again", "attempts_exhausted"), ("retry", "attempts_exhausted")):
        bank.failing.delay(how, how)
        accepted.append(Accepted("default", bank.failing.name, how, failure=code))
    with ready.session() as session:
        bank.deposit.enqueue(session, "enqueued", ordering_key="k")
        bank.deposit.enqueue(session, "enqueued too", ordering_key="k")

    def ended(expected: Any) -> Any:
        query = "SELECT count(*) FROM idempotency.records WHERE status IN ('completed', 'failed')"
        return ready.sql(query).scalar_one() == expected

    eventually(lambda: ended(len(accepted) + 2), timeout=90, what="every operation ended")
    with ready.engine.connect().execution_options(isolation_level="READ COMMITTED") as connection:
        letter = connection.execute(
            text("SELECT id FROM idempotency.dead_letters WHERE key = 'permanent'")
        ).scalar_one()
        dead_letters.replay(connection, letter)
        connection.commit()
    eventually(
        lambda: ready.sql("SELECT count(*) FROM idempotency.dead_letters WHERE key = 'permanent'").scalar_one() == 2,
        timeout=60,
        what="failed again",
    )
    resend_lost(ready.app)
    assert all(worker.process.poll() is None for worker in workers)

    found = check(
        Evidence(
            ready.engine,
            accepted,
            acts=outside.acts,
            tenants=frozenset({"default", "other"}),
            max_attempts=5,
        )
    )
    assert [str(violation) for violation in found.violations] == []
    counts = found.counts
    assert (counts.accepted, counts.completed, counts.failed) == (len(accepted) + 2, len(POINTS) + 22, 3)
    assert (counts.lost, counts.doubled, counts.dead, counts.queued) == (0, 0, 0, 0)
    assert counts.takeovers >= len(POINTS) - 2  # those that were killed between their claim and their end


@pytest.mark.long
def test_the_lines_of_a_worker_name_its_pool_process(relayed: Any) -> None:
    worker = relayed.worker().wait_until_ready()
    relayed.send(bank.deposit, "a")
    row = relayed.wait_for("a", "completed", worker)
    signed = {line.writer for line in ledgers.read(relayed.engine) if line.book == "records"}
    assert signed == {f"pid {row.locked_by.split('|')[3]}"}
