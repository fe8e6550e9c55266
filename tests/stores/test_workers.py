"""Real workers over RabbitMQ whose processes are killed or frozen: exactly the weaker promise, and no less."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import amqp
import kombu.pools
import pytest

import services
from idempotency.queues import dead_letter_queue, own_dead_letter_queue
from idempotency.stores.addresses import open_store
from idempotency.stores.store import Store, Stored
from idempotency.wire.keys import OperationId
from idempotency.worker.store_runtimes import close_store_runtimes
from tests.stores import application
from tests.stores.application import charge, hurried, slow
from tests.stores.conftest import REGION, TABLE
from tests.stores.promises import STORES, promise
from tests.support import crashing
from tests.support.outside import OutsideWorld
from tests.support.processes import PYTHONPATH, Processes, eventually

# Seconds: long enough for the heartbeat of a busy machine, short enough to wait for.
LEASE = 2.0


@dataclass
class Fleet:
    """A worker with two processes, its store, and where its crashes are planned."""

    store: Store
    processes: Processes
    directory: Path

    def plan(self, point: str, action: str) -> Path:
        for left in self.directory.glob(f"{point}*"):
            left.unlink()
        return crashing.plan(self.directory, point, action)

    def stored(self, account: str, task: str = charge.name) -> Stored | None:
        return self.store.read(OperationId("default", task, account))

    def completed(self, account: str, task: str = charge.name) -> Stored:
        def look() -> Stored | None:
            stored = self.stored(account, task)
            return stored if stored is not None and stored.state == "completed" else None

        return eventually(look, timeout=60)


@pytest.fixture(scope="module", params=STORES[1:])
def fleet(request: pytest.FixtureRequest, servers: services.Services) -> Iterator[Fleet]:
    address = servers.redis_url
    if request.param == "dynamodb":
        request.getfixturevalue("dynamodb_endpoint")
        address = f"dynamodb://{REGION}/{TABLE}"
    directory = Path(tempfile.mkdtemp(prefix="crash-"))
    environment = {
        **os.environ,
        "STORE": address,
        "STORE_QUEUE": f"stores-{uuid4().hex[:8]}",
        "BROKER_URL": servers.broker_url,
        "QUORUM": "1",
        "LEASE": str(LEASE),
        "CRASH_DIRECTORY": str(directory),
        "PYTHONPATH": PYTHONPATH,
    }
    processes = Processes(environment)
    application.configure(environment)
    store = open_store(address, service="charges", timeout=5.0)
    try:
        processes.worker(app="tests.stores.application")
        yield Fleet(store, processes, directory)
    finally:
        processes.kill_all()
        store.close()
        close_store_runtimes(application.app)
        with application.app.connection_for_write() as connection:
            for name in (environment["STORE_QUEUE"], f"{environment['STORE_QUEUE']}.dead_letters"):
                connection.default_channel.queue_delete(name)
        kombu.pools.reset()
        shutil.rmtree(directory, ignore_errors=True)


def new_account() -> str:
    return f"a{uuid4().hex[:8]}"


@pytest.mark.few(1)
@promise("a crash between effect and record leaves one effect")
def test_a_kill_between_effect_and_record_repeats_the_effect_under_the_same_key(
    fleet: Fleet, outside: OutsideWorld
) -> None:
    account = new_account()
    planned = fleet.plan("store.recording", crashing.KILL_CHILD)
    charge.delay(account, outside.url)
    stored = fleet.completed(account)
    assert not planned.exists()
    assert list(outside.calls.values()) == [2]  # one key, called twice
    assert list(outside.acts.values()) == [1]
    assert stored.attempts == 2


# Redis tells of a dead holder by itself; where it is watched, the limit would end the watch.
@pytest.mark.long
@pytest.mark.parametrize("fleet", ["dynamodb", pytest.param("redis", marks=pytest.mark.long)], indirect=True)
def test_who_has_died_is_replaced_although_the_time_limit_is_shorter_than_the_lease(
    fleet: Fleet, outside: OutsideWorld
) -> None:
    account = new_account()
    fleet.plan("called", crashing.KILL_CHILD)
    hurried.delay(account, outside.url)
    stored = fleet.completed(account, hurried.name)
    assert stored.attempts == 2
    assert list(outside.calls.values()) == [2]


@pytest.mark.long
@pytest.mark.few(1)
@promise("a crash before the effect leaves one effect")
def test_a_kill_before_the_effect_leaves_one_effect(fleet: Fleet, outside: OutsideWorld) -> None:
    account = new_account()
    planned = fleet.plan("body.entered", crashing.KILL_CHILD)
    charge.delay(account, outside.url)
    stored = fleet.completed(account)
    assert not planned.exists()
    assert list(outside.calls.values()) == [1]
    assert stored.attempts == 2


@pytest.mark.few(1)
@promise("a crash after the record repeats nothing")
def test_a_kill_after_the_record_repeats_nothing(fleet: Fleet, outside: OutsideWorld) -> None:
    account, last = new_account(), new_account()
    planned = fleet.plan("store.recorded", crashing.KILL_CHILD)
    charge.delay(account, outside.url)
    eventually(lambda: not planned.exists())
    charge.delay(last, outside.url)
    fleet.completed(last)
    assert fleet.completed(account).attempts == 1
    assert list(outside.calls.values()) == [1, 1]


@pytest.mark.long
@promise("who has lost its claim changes nothing")
def test_a_frozen_process_that_wakes_after_its_lease_records_nothing(fleet: Fleet, outside: OutsideWorld) -> None:
    account = new_account()
    fleet.plan("store.recording", crashing.STOP)
    charge.delay(account, outside.url)
    stopped = fleet.directory / "store.recording.stopped"
    eventually(stopped.exists)
    frozen = fleet.stored(account)
    assert frozen is not None
    assert frozen.state == "started"
    try:
        charge.delay(account, outside.url)  # another message of the same call, for the other process
        winner = fleet.completed(account)
        assert winner.fence > frozen.fence
    finally:
        os.kill(int(stopped.read_text()), signal.SIGCONT)
    fenced = f"event=fenced task={charge.name} key={account} fence={frozen.fence}"
    eventually(lambda: any(fenced in each.log for each in fleet.processes._workers))
    assert fleet.stored(account) == winner
    assert list(outside.calls.values()) == [2]
    assert list(outside.acts.values()) == [1]


@pytest.mark.long
@pytest.mark.few(1)
def test_attempts_come_back_through_the_brokers_delays(fleet: Fleet, outside: OutsideWorld) -> None:
    account = new_account()
    outside.script = ["fail before"] * 3
    charge.delay(account, outside.url)
    assert fleet.completed(account).attempts == 4
    assert list(outside.calls.values()) == [4]
    assert list(outside.acts.values()) == [1]


@pytest.mark.long
@promise("a crash between effect and record leaves one effect")
def test_after_the_death_of_a_whole_worker_another_repeats_the_effect(fleet: Fleet, outside: OutsideWorld) -> None:
    account = new_account()
    fleet.plan("store.recording", crashing.KILL_WORKER)
    charge.delay(account, outside.url)
    eventually((fleet.directory / "store.recording.reached").exists)
    fleet.processes.worker(app="tests.stores.application")
    assert fleet.completed(account).attempts == 2
    assert list(outside.calls.values()) == [2]
    assert list(outside.acts.values()) == [1]


@pytest.mark.few(1)
def test_no_log_line_shows_an_argument_a_result_or_an_address(fleet: Fleet, outside: OutsideWorld) -> None:
    account = new_account()
    charge.delay(account, outside.url, amount=918273645)
    fleet.completed(account)
    workers = fleet.processes._workers
    assert any(" succeeded in " in worker.log for worker in workers)  # what they do is in their logs
    for worker in workers:
        assert "918273645" not in worker.log
        assert outside.url not in worker.log


@pytest.mark.long
def test_remote_control_shows_no_argument_of_what_runs(fleet: Fleet, outside: OutsideWorld) -> None:
    account = new_account()
    fleet.plan("working", crashing.HOLD)
    slow.delay(account, outside.url, 0.1)
    eventually((fleet.directory / "working.held").exists)
    try:
        active = eventually(lambda: application.app.control.inspect(timeout=2).active())
        assert account in str(active)  # its key
        assert outside.url not in str(active)
    finally:
        (fleet.directory / "working.go").touch()


@pytest.mark.parametrize("fleet", ["redis"], indirect=True)
def test_what_cannot_be_read_of_a_message_ends_no_worker_and_is_rejected(fleet: Fleet, outside: OutsideWorld) -> None:
    """There is no guard here: what is rejected is kept by RabbitMQ, in the queue that the application has for that."""
    queue, account = fleet.processes.environment["STORE_QUEUE"], new_account()
    workers = [each for each in fleet.processes._workers if each.process.poll() is None]
    said = {"task": charge.name, "id": "m1", "lang": "py"}
    body, headers = json.dumps([[new_account(), outside.url], {}, {}]), "application_headers"
    with application.app.connection_for_write() as connection:
        channel, dead = connection.default_channel, own_dead_letter_queue(queue)
        dead_letter_queue(dead)(channel).declare()
        for given in (
            {"type": b"caf\xe9", headers: said},
            {headers: said | {b"caf\xe9": 1}},
            {headers: said | {"task": ["no", "text"]}},  # which Celery looks up
        ):
            message = amqp.Message(body, **{"content_type": "application/json", "content_encoding": "utf-8", **given})
            channel.basic_publish(message, routing_key=queue)
        charge.delay(account, outside.url)
        fleet.completed(account)
        eventually(lambda: channel.queue_declare(dead, passive=True).message_count == 3)
    assert all(each.process.poll() is None for each in workers)
    assert any("type: not UTF-8" in each.log for each in workers)
    assert list(outside.calls.values()) == [1]
