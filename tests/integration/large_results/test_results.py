"""Results that are too long for Postgres are kept elsewhere, and are there for everybody who asks."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery
from celery.app.trace import trace_task_ret
from sqlalchemy import Engine, text

from idempotency import Handle, OperationId, lookup
from idempotency.application import runtime_of
from idempotency.attempt.endings import Finished
from idempotency.attempt.policy import Policy
from idempotency.attempt.run import run as run_attempt
from idempotency.attempt.runtime import Runtime
from idempotency.attempt.sharing import Alone
from idempotency.errors import InvalidResult, ResultUnreadable
from idempotency.operate.change import Change
from idempotency.operate.erase import erase
from idempotency.settings import Settings
from idempotency.store.answers import Completed
from idempotency.store.operations import operation
from idempotency.upkeep import alarms, overview
from idempotency.wire.delivery import Delivery
from idempotency.wire.keys import fingerprint
from tests.support import operations as op
from tests.support.batches import message, put, run, states
from tests.support.deliveries import Deliveries
from tests.support.large_results import LIMIT, Down, Place, body, large, place_of, stored
from tests.support.tasks import make_task


@pytest.mark.few(3)
@pytest.mark.parametrize("options", [{}, {"batch": 10}, {"batch": 10, "batch_commit": "each"}])
def test_a_large_result_is_kept_there_and_read_by_every_duplicate(
    bank: Celery, engine: Engine, kept: Place, options: dict[str, Any], entries: Any
) -> None:
    task = make_task(bank, body, key="{account}", **options)
    if options:
        run(bank, task, *(message(bank, task, account) for account in ("e0", "f1")))
    else:
        assert [task.apply(("e0",)).get(), task.apply(("f1",)).get()] == [large(), {"short": "f1"}]
    assert states(engine) == {"e0": "completed", "f1": "completed"}
    found = stored(engine)
    assert found["e0"].startswith("object:")
    assert len(found["e0"]) < 200
    assert found["f1"] == '{"short": "f1"}'
    assert len(kept.names) == 1
    with engine.connect() as connection:  # as `show` prints it
        records = [operation(connection, op.operation(task, each))["record"] for each in ("e0", "f1")]
    assert [each.get("result_object") for each in records] == [*kept.names, None]
    assert not any("result" in each for each in records)
    assert task.apply(("e0",)).get() == large()
    assert lookup(bank, task.name, "e0").result == large()
    if options:  # and a duplicate in a batch
        again = run(bank, task, *(message(bank, task, account) for account in ("e0", "f1")))
        assert [failed for failed, *_ in again] == [0, 0]
    assert entries("e0") == 1


def test_without_a_place_a_large_result_is_refused_as_before(bank: Celery) -> None:
    task = make_task(bank, body, key="{account}")
    with pytest.raises(InvalidResult, match=f"at most {LIMIT} bytes"):
        task.apply(("e0",)).get()


def test_what_is_larger_still_is_refused_and_leaves_nothing(bank: Celery, directory: Place, entries: Any) -> None:
    bank.conf.idempotency_large_result_limit = LIMIT + 5
    task = make_task(bank, body, key="{account}")
    with pytest.raises(InvalidResult, match=f"at most {LIMIT + 5} bytes"):
        task.apply(("e0",)).get()
    assert (directory.names, entries("e0")) == ([], 0)


def test_one_that_is_short_once_compressed_stays_in_its_record(bank: Celery, engine: Engine, directory: Place) -> None:
    bank.conf.idempotency_compress_results_above = 64 * 1024
    task = make_task(bank, body, key="{account}")
    assert task.apply(("e0",)).get() == large()
    assert stored(engine)["e0"].startswith("zstd:")
    assert directory.names == []


def test_code_that_does_not_know_it_takes_it_for_no_value(bank: Celery, engine: Engine, directory: Place) -> None:
    make_task(bank, body, key="{account}").apply(("e0",))
    with pytest.raises(json.JSONDecodeError):
        json.loads(stored(engine)["e0"])


def test_while_the_place_does_not_answer_nothing_is_committed_and_no_attempt_used_up(
    bank: Celery, engine: Engine, deliveries: Deliveries, directory: Place, set_place: Any, entries: Any, record: Any
) -> None:
    task = make_task(bank, body, key="{account}", max_attempts=1)
    set_place(Down())
    deliveries.deliver(task, "e0")
    row = record("e0")
    assert (row.status, row.attempts, entries("e0")) == ("released", 0, 0)
    assert "large results" in row.error
    set_place(directory.address)
    op.make_due(engine, "e0")
    deliveries.deliver(task, "e0")
    assert (record("e0").status, entries("e0"), len(directory.names)) == ("completed", 1, 1)


def test_it_may_be_away_for_longer_than_anything_may_be_deferred(
    bank: Celery, engine: Engine, deliveries: Deliveries, set_place: Any, record: Any
) -> None:
    bank.conf.idempotency_compress_results_above = None
    task = make_task(bank, body, key="{account}", max_attempts=1)
    set_place(Down())
    for _ in range(3):
        deliveries.deliver(task, "e0")
        op.make_due(engine, "e0")
        with engine.connect() as connection:
            op.age(connection, op.operation(task, "e0"), opened_at=-2 * runtime_of(bank).settings.defer_budget)
    assert (record("e0").status, record("e0").attempts) == ("released", 0)


@pytest.mark.parametrize("behind", [False, True], ids=["first run", "behind savepoints"])
def test_what_a_body_has_put_that_could_not_stay_is_deleted(
    behind: bool, bank: Celery, engine: Engine, directory: Place
) -> None:
    """An erasure would not find it: no record refers to it."""
    runs: list[str] = []

    def body(self: Any, account: str) -> Any:
        put(self, account)
        runs.append(account)
        if account == "e1":
            raise ValueError("cannot stay")
        if behind and account == "e0" and runs.count("e0") == 2:
            with suppress(Alone):  # it is noticed at its end all the same
                self.session.execute(text("SELECT set_config('application_name', 'other', true)"))
        return large()

    task = make_task(bank, body, key="{account}", batch=20, max_attempts=1)
    run(bank, task, *(message(bank, task, f"e{n}") for n in range(3)))
    assert states(engine) == {"e0": "completed", "e1": "failed", "e2": "completed"}
    assert runs.count("e0") == (3 if behind else 2)
    assert len(directory.names) == 2  # each once


def test_a_place_that_has_failed_is_not_asked_by_the_others_of_a_batch(
    bank: Celery, engine: Engine, set_place: Any
) -> None:
    """Each would hold the transaction, and what it has locked, for as long as the place takes to fail."""
    asked: list[str] = []

    class Counting(Down):
        def put(self, name: str, data: bytes) -> None:
            asked.append(name)
            super().put(name, data)

    bank.conf.idempotency_compress_results_above = None
    task = make_task(bank, body, key="{account}", batch=20)
    set_place(Counting())
    run(bank, task, *(message(bank, task, account) for account in ("a0", *(f"e{n}" for n in range(8)))))
    assert states(engine)["a0"] == "completed"
    assert len(asked) == 1


def test_a_time_limit_during_the_put_is_one(bank: Celery, deliveries: Deliveries, set_place: Any, record: Any) -> None:
    class Limited(Down):
        def put(self, name: str, data: bytes) -> None:
            raise SoftTimeLimitExceeded

    bank.conf.idempotency_compress_results_above = None
    set_place(Limited())
    deliveries.deliver(make_task(bank, body, key="{account}", max_attempts=1), "e0")
    assert (record("e0").status, record("e0").error_code) == ("failed", "attempts_exhausted")


def test_a_duplicate_that_cannot_read_it_changes_nothing(
    bank: Celery, engine: Engine, directory: Place, set_place: Any, entries: Any
) -> None:
    task = make_task(bank, body, key="{account}")
    task.apply(("e0",))
    set_place(Down())
    with pytest.raises(ConnectionError):
        task.apply(("e0",)).get()
    with pytest.raises(ConnectionError):
        _ = lookup(bank, task.name, "e0").result
    assert (states(engine), entries("e0")) == ({"e0": "completed"}, 1)


def test_what_was_altered_or_is_gone_is_no_value(bank: Celery, kept: Place) -> None:
    task = make_task(bank, body, key="{account}")
    task.apply(("e0",))
    (name,) = kept.names
    kept.replace(name, json.dumps(large(2), ensure_ascii=False).encode())
    with pytest.raises(ResultUnreadable, match="not what was stored"):
        task.apply(("e0",)).get()
    place_of(bank).delete([name])
    with pytest.raises(ResultUnreadable, match="is gone"):
        _ = lookup(bank, task.name, "e0").result


def test_what_is_longer_than_it_has_to_be_is_not_read_to_its_end(
    bank: Celery, directory: Place, tmp_path: Path
) -> None:
    make_task(bank, body, key="{account}").apply(("e0",))
    (name,) = directory.names
    os.truncate(tmp_path / "results" / name, 64 * 2**20)
    reference = next(iter(stored(runtime_of(bank).engine).values()))
    tracemalloc.start()
    try:
        with pytest.raises(ResultUnreadable, match="not what was stored"):
            runtime_of(bank).read_result(reference)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("altered", ["object:", "object:../../etc/passwd:00:1", "object:ab/../cd:00:1"])
def test_a_reference_that_was_altered_is_not_followed(bank: Celery, directory: Place, altered: str) -> None:
    with pytest.raises(ResultUnreadable, match="altered"):
        runtime_of(bank).read_result(altered)


def test_a_process_without_the_setting_says_what_is_missing(bank: Celery, directory: Place, set_place: Any) -> None:
    task = make_task(bank, body, key="{account}")
    task.apply(("e0",))
    set_place(None)
    with pytest.raises(ResultUnreadable, match="idempotency_large_results_at"):
        _ = lookup(bank, task.name, "e0").result


def test_an_event_loop_that_fetches_holds_up_nobody_else(
    bank: Celery, directory: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither who asks for a status, nor what needs threads of the event loop, such as the look-up of a name."""
    task = make_task(bank, body, key="{account}")
    task.apply(("e0",))
    answers = threading.Event()
    kind: Any = type(place_of(bank))
    get = kind.get
    monkeypatch.setattr(kind, "get", lambda self, name, most: (answers.wait(30), get(self, name, most))[1])
    handle: Any = Handle(bank, op.operation(task, "e0"))

    async def result() -> Any:
        return await handle

    async def page() -> None:
        asked = [asyncio.create_task(result()) for _ in range(40)]
        await asyncio.sleep(0.2)
        async with asyncio.timeout(20):
            assert (await handle.alookup()).status == "completed"
            await asyncio.get_running_loop().getaddrinfo("127.0.0.1", 80)
        assert not any(each.done() for each in asked)
        answers.set()
        assert await asyncio.gather(*asked) == [large()] * 40

    asyncio.run(page())


def test_a_duplicate_that_cannot_read_it_calls_no_errbacks(
    bank: Celery, engine: Engine, directory: Place, set_place: Any
) -> None:
    """It is carried out: what they undo was done."""
    task = make_task(bank, body, key="{account}")
    called: list[str] = []

    @bank.task(name="test.give_back")
    def give_back(request: Any, error: Any, traceback: Any) -> None:
        called.append(type(error).__name__)

    embed = {"callbacks": None, "errbacks": [give_back.s()], "chain": None, "chord": None}
    sent = message(bank, task, body=json.dumps([["e0"], {}, embed]))
    bank.finalize()
    bank.set_current()
    for place in (directory.address, Down()):
        set_place(place)
        trace_task_ret(task.name, *sent, app=bank)
    erase(bank, op.operation(task, "e0"), Change("ann", "request 17"))
    trace_task_ret(task.name, *sent, app=bank)
    assert (states(engine), called) == ({"e0": "completed"}, [])
    bank.tasks.pop("test.give_back")


def test_an_alarm_tells_of_what_waits_for_the_place(
    bank: Celery, engine: Engine, deliveries: Deliveries, set_place: Any
) -> None:
    bank.conf.idempotency_compress_results_above = None
    set_place(Down())
    deliveries.deliver(make_task(bank, body, key="{account}"), "e0")
    with engine.connect() as connection:
        found = overview.take_snapshot(connection, bank, runtime_of(bank).settings)
    (alarm,) = [each for each in alarms.lasting(found, runtime_of(bank).settings) if each.name == "large_results"]
    assert alarm.found == "1 operation waits for their place, which does not take a result"


def test_without_celery_a_duplicate_gets_it_too(database: str, tmp_path: Path) -> None:
    given = {"database_url": database, "large_results_at": f"file://{tmp_path}", "compress_results_above": None}
    settings = Settings.read(given)
    runtime = Runtime(settings)
    delivery = Delivery(OperationId("default", "http.export", "r1"), fingerprint({}), {})
    try:
        first, again = (
            run_attempt(runtime, delivery, Policy.by_settings(settings), lambda attempt: large()) for _ in range(2)
        )
        assert isinstance(first, Finished)
        assert isinstance(again, Completed)
        assert again.value() == first.result == large()
    finally:
        runtime.close()
