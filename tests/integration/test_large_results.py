"""Results that are too long for Postgres are kept elsewhere: nothing of one is lost, and nothing stays that is not needed."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import boto3
import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery
from moto.moto_server.threaded_moto_server import ThreadedMotoServer
from sqlalchemy import Engine, text

from idempotency import Handle, IdempotentTask, OperationId, lookup
from idempotency.application import close_runtime, runtime_of
from idempotency.attempt.endings import Finished
from idempotency.attempt.policy import Policy
from idempotency.attempt.run import run as run_attempt
from idempotency.attempt.runtime import Runtime
from idempotency.checks.doctor import doctor
from idempotency.checks.findings import Level
from idempotency.errors import ChangeRefused, InvalidResult, ResultErased, ResultUnreadable, SettingsError
from idempotency.objects import PAGE, ObjectStore, object_store
from idempotency.operate.change import Change
from idempotency.operate.erase import erase
from idempotency.settings import Settings
from idempotency.store.answers import Completed
from idempotency.testing.processes import Action, Interruption
from idempotency.testing.processes import Delivery as DeliveryProcess
from idempotency.upkeep import alerts, loops, maintenance, objects
from idempotency.wire.delivery import Delivery
from idempotency.wire.headers import KEY_HEADER, TENANT_HEADER
from idempotency.wire.keys import fingerprint
from idempotency.wire.message import Message
from tests.integration.test_batch_neighbours import message, put, run, states
from tests.support import operations as op
from tests.support.deliveries import Deliveries
from tests.support.tasks import make_task

LIMIT = 256 * 1024
DAY = 86400.0


def large(seed: int = 1) -> dict[str, str]:
    return {"document": f"{seed}ä" + "x" * LIMIT}


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """A server that speaks S3's protocol; its bucket is empty."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        yield "http://{}:{}".format(*server.get_host_and_port())
    finally:
        server.stop()


class Place:
    """A place for objects, and what a test does to it behind the library's back."""

    def __init__(self, address: str, directory: Path | None, client: Any) -> None:
        self.address, self._directory, self._client = address, directory, client

    @property
    def names(self) -> list[str]:
        if self._directory is not None:
            return sorted(str(path.relative_to(self._directory)) for path in self._directory.glob("*/*"))
        found = self._client.list_objects_v2(Bucket="results", Prefix="shop/")
        return [each["Key"].removeprefix("shop/") for each in found.get("Contents", ())]

    @property
    def everything(self) -> list[str]:
        """Whatever is there or below."""
        if self._directory is not None:
            found = [path for path in self._directory.rglob("*") if path.is_file()]
            return sorted(str(path.relative_to(self._directory)) for path in found)
        return self.names

    def add(self, name: str) -> None:
        """Put what is not the library's."""
        if self._directory is not None:
            (self._directory / name).parent.mkdir(parents=True, exist_ok=True)
        self.replace(name, b"another's")

    def replace(self, name: str, data: bytes) -> None:
        if self._directory is not None:
            (self._directory / name).write_bytes(data)
        else:
            self._client.put_object(Bucket="results", Key=f"shop/{name}", Body=data)


@pytest.fixture(params=["file", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    if request.param == "file":
        (tmp_path / "results").mkdir()
        yield Place(f"file://{tmp_path}/results", tmp_path / "results", None)
        return
    endpoint: str = request.getfixturevalue("s3")
    given = {
        "ENDPOINT_URL": endpoint,
        "ACCESS_KEY_ID": "id",
        "SECRET_ACCESS_KEY": "secret",
        "DEFAULT_REGION": "eu-west-1",
    }
    for name, value in given.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="results", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    yield Place("s3://results/shop", None, client)
    for each in client.list_objects_v2(Bucket="results").get("Contents", ()):
        client.delete_object(Bucket="results", Key=each["Key"])
    client.delete_bucket(Bucket="results")


@pytest.fixture
def kept(bank: Celery, place: Place) -> Place:
    bank.conf.idempotency_large_results_at = place.address
    bank.conf.idempotency_compress_results_above = None
    return place


@pytest.fixture
def directory(bank: Celery, tmp_path: Path) -> Place:
    """A directory, where it does not matter which place it is."""
    (tmp_path / "results").mkdir()
    bank.conf.idempotency_large_results_at = f"file://{tmp_path}/results"
    bank.conf.idempotency_compress_results_above = None
    return Place(f"file://{tmp_path}/results", tmp_path / "results", None)


def body(self: IdempotentTask, account: str) -> Any:
    put(self, account)
    return large() if account.startswith("e") else {"short": account}


def place_of(app: Celery) -> ObjectStore:
    store = runtime_of(app).settings.large_results_at
    assert store is not None
    return store


def stored(engine: Engine) -> dict[str, str]:
    with engine.connect() as connection:
        return {row.key: row.result for row in connection.execute(text("SELECT key, result FROM idempotency.records"))}


def sweep_all(app: Celery, monkeypatch: pytest.MonkeyPatch) -> int:
    kind: Any = type(place_of(app))
    older = kind.older
    with monkeypatch.context() as patch:
        patch.setattr(kind, "older", lambda self, seconds: older(self, -60.0))
        return objects.sweep(app)


@pytest.fixture
def swept(bank: Celery, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Sweep as if all that is there had been put long ago."""

    return lambda: sweep_all(bank, monkeypatch)


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
    assert task.apply(("e0",)).get() == large()
    assert lookup(bank, task.name, "e0").result == large()
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


class Down:
    """A place that does not answer."""

    def put(self, name: str, data: bytes) -> None:
        raise ConnectionError("down")

    def get(self, name: str, at_most: int) -> bytes:
        raise ConnectionError("down")

    def delete(self, names: Sequence[str]) -> None:
        raise ConnectionError("down")

    def older(self, seconds: float) -> Iterator[list[str]]:
        raise ConnectionError("down")


@pytest.fixture
def set_place(bank: Celery) -> Callable[[Any], None]:
    def set_to(place: Any) -> None:
        close_runtime(bank)
        bank.conf.idempotency_large_results_at = place

    return set_to


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


def test_a_kill_between_the_object_and_the_commit_leaves_what_the_next_sweep_deletes(
    bank: Celery, engine: Engine, directory: Place, swept: Any, entries: Any, record: Any
) -> None:
    task = make_task(bank, body, key="{account}")
    sent = Message.composed(
        bank, task.name, ("e0",), {}, task_id="1", headers={KEY_HEADER: "e0", TENANT_HEADER: "default"}
    )
    for life, interruption in enumerate([Interruption(Action.KILL, "result.put"), None]):
        delivery = DeliveryProcess(bank, task, sent, interruption=interruption)
        try:
            assert delivery.wait(60)
            outcome = delivery.journal().outcome
        finally:
            delivery.end()
        if life == 0:
            assert (outcome, record("e0").status, entries("e0")) == ("killed by SIGKILL", "started", 0)
            op.deaths(engine, "e0", 1)
    assert (record("e0").status, entries("e0"), len(directory.names)) == ("completed", 1, 2)
    assert swept() == 1
    assert lookup(bank, task.name, "e0").result == large()


def test_what_is_purged_is_swept_and_what_is_referred_to_stays(
    bank: Celery, engine: Engine, kept: Place, swept: Any
) -> None:
    task = make_task(bank, body, key="{account}")
    for account in ("e0", "e1"):
        task.apply((account,))
    assert swept() == 0
    with engine.connect() as connection:
        op.age(connection, op.operation(task, "e0"), expires_at=-1.0)
    assert maintenance.purge(bank) == 1
    assert len(kept.names) == 2
    assert swept() == 1
    assert len(kept.names) == 1
    assert lookup(bank, task.name, "e1").result == large()


def test_what_was_put_just_now_is_left_for_the_commit_to_come(bank: Celery, kept: Place) -> None:
    store = place_of(bank)
    store.put("ab/" + "ab" * 16, b"1")
    assert objects.sweep(bank) == 0
    assert len(kept.names) == 1


def test_the_sweep_leaves_what_is_not_the_librarys(bank: Celery, kept: Place, swept: Any) -> None:
    """Backups in the same bucket, a file whose name is no text, and the place of another database below this one."""
    store = place_of(bank)
    name = "ab/" + "ab" * 16
    strange = ["backups/2026-11-27.dump", "invoice-17.pdf", f"staging/{name}", "ab/" + "AB" * 16, f"{name}.old"]
    store.put(name, b"1")
    for each in strange:
        kept.add(each)
    assert swept() == 1
    assert kept.everything == sorted(strange)


def test_what_cannot_be_deleted_holds_up_nothing_else(
    bank: Celery, set_place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted: list[str] = []

    class Locked(Down):
        def older(self, seconds: float) -> Iterator[list[str]]:
            yield from (["ab/" + "ab" * 16], ["cd/" + "cd" * 16])

        def delete(self, names: Sequence[str]) -> None:
            if names[0].startswith("ab"):
                raise PermissionError("locked")
            deleted.extend(names)

    set_place(Locked())
    with pytest.raises(PermissionError):
        objects.sweep(bank)
    assert deleted == ["cd/" + "cd" * 16]


def test_the_sweep_is_in_no_alerts_way(bank: Celery, set_place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, looked = threading.Event(), threading.Event()
    stop = threading.Event()

    class Slow(Down):
        def older(self, seconds: float) -> Iterator[list[str]]:
            begun.set()
            assert stop.wait(60)
            yield []

    set_place(Slow())
    monkeypatch.setattr(loops, "OBJECT_WATCH", 0.0)
    monkeypatch.setattr(alerts, "run_once", lambda app: begun.is_set() and looked.set())
    monkeypatch.setattr(loops, "ALERT_WATCH", 0.1)
    relay = threading.Thread(target=loops.run_relay, args=(bank, stop), daemon=True)
    relay.start()
    try:
        assert looked.wait(30)
    finally:
        stop.set()
        relay.join(30)


def test_the_sweep_looks_at_all_pages_and_at_what_a_dead_writer_left(bank: Celery, directory: Place) -> None:
    store = place_of(bank)
    store.put("ab/" + "ab" * 16, b"1")
    (folder,) = {Path(directory.address.removeprefix("file://")) / "ab"}
    for number in range(PAGE):
        (folder / f"{number:032x}").write_bytes(b"2")
    (folder / ("cd" * 16 + ".part")).write_bytes(b"3")
    past = time.time() - 2 * DAY
    for path in folder.iterdir():
        os.utime(path, (past, past))
    assert objects.sweep(bank) == PAGE + 2
    assert list(folder.iterdir()) == []


def test_an_erasure_deletes_it_at_once_and_one_that_cannot_is_swept(
    bank: Celery, engine: Engine, kept: Place, set_place: Any, swept: Any
) -> None:
    task = make_task(bank, body, key="{account}")
    for account in ("e0", "e1"):
        task.apply((account,))
    erase(bank, op.operation(task, "e0"), Change("ann", "request 17"))
    assert len(kept.names) == 1
    with pytest.raises(ResultErased):
        _ = lookup(bank, task.name, "e0").result
    set_place(None)
    with pytest.raises(ChangeRefused, match="idempotency_large_results_at"):
        erase(bank, op.operation(task, "e1"), Change("ann", "request 17"))
    set_place(Down())
    erase(bank, op.operation(task, "e1"), Change("ann", "request 17"))
    set_place(kept.address)
    assert len(kept.names) == 1
    assert swept() == 1


def test_a_directory_that_is_not_mounted_is_not_made(
    bank: Celery, deliveries: Deliveries, tmp_path: Path, record: Any
) -> None:
    bank.conf.idempotency_large_results_at = f"file://{tmp_path}/mount"
    bank.conf.idempotency_compress_results_above = None
    deliveries.deliver(make_task(bank, body, key="{account}"), "e0")
    assert record("e0").status == "released"
    assert not (tmp_path / "mount").exists()
    (finding,) = [each for each in doctor(bank) if each.subject == "large results"]
    assert (finding.level, finding.found) == (Level.REFUSAL, "does not answer: NotADirectoryError")


def test_a_mount_point_is_no_place() -> None:
    """It is there, and empty, while nothing is mounted: what is put then is hidden once it is."""
    store = object_store("file:///dev/shm")
    for ask in (lambda: store.put("ab/" + "ab" * 16, b"1"), lambda: store.get("ab/" + "ab" * 16, 1)):
        with pytest.raises(NotADirectoryError, match="is a mount point; name a directory in it"):
            ask()


def test_a_full_disk_stays_no_fuller(directory: Place, bank: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        place_of(bank).put("ab/" + "ab" * 16, b"1")
    assert directory.everything == []


def test_what_an_erasure_does_not_find_is_told(bank: Celery, directory: Place, set_place: Any, tmp_path: Path) -> None:
    """The place was changed: what is in the one before is not found, and so not deleted."""
    task = make_task(bank, body, key="{account}")
    task.apply(("e0",))
    (tmp_path / "new").mkdir()
    set_place(f"file://{tmp_path}/new")
    erased = erase(bank, op.operation(task, "e0"), Change("ann", "request 17"))
    assert (erased.operations, erased.not_found) == ([op.operation(task, "e0")], directory.names)


def test_while_it_is_fetched_an_event_loop_goes_on(
    bank: Celery, directory: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The place answers only once the loop has done something else."""
    task = make_task(bank, body, key="{account}")
    task.apply(("e0",))
    went_on = threading.Event()
    kind: Any = type(place_of(bank))
    get = kind.get

    def slow(self: Any, name: str, at_most: int) -> Any:
        assert went_on.wait(30)
        went_on.clear()
        return get(self, name, at_most)

    monkeypatch.setattr(kind, "get", slow)
    handle: Any = Handle(bank, op.operation(task, "e0"))

    async def both(asking: Any) -> Any:
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(asking)
            await asyncio.sleep(0.2)
            went_on.set()
        return asked.result()

    async def of(handle: Any) -> Any:
        return await handle

    assert asyncio.run(both(of(handle))) == large()
    assert asyncio.run(both(handle.alookup())).result == large()


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


def test_the_files_are_for_their_user_alone(bank: Celery, directory: Place, tmp_path: Path) -> None:
    make_task(bank, body, key="{account}").apply(("e0",))
    (name,) = directory.names
    file = tmp_path / "results" / name
    assert [path.stat().st_mode & 0o777 for path in (file, file.parent)] == [0o600, 0o700]


@pytest.mark.parametrize(
    "wrong", ["file://host/results", "file:results", "s3:///prefix", "s3://key:secret@bucket/x", "http://h/x"]
)
def test_what_is_no_place_is_refused_by_name(wrong: str) -> None:
    with pytest.raises(SettingsError, match="large_results_at: must be file:///a/directory"):
        Settings.read({"database_url": "postgresql+psycopg://h/d", "large_results_at": wrong})


def test_a_place_of_your_own_is_named_or_given() -> None:
    assert isinstance(Down(), ObjectStore)
    given = Settings.read({"database_url": "postgresql+psycopg://h/d", "large_results_at": Down()})
    assert isinstance(given.large_results_at, Down)
    with pytest.raises(SettingsError, match="ObjectStore"):
        Settings.read({"database_url": "postgresql+psycopg://h/d", "large_results_at": f"{__name__}:Down"})


def test_a_store_is_not_asked_before_it_is_used() -> None:
    assert isinstance(object_store("s3://nowhere/at/all"), ObjectStore)
