"""The place of large results: nothing of one is lost, and nothing stays that is not needed."""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Engine

from idempotency import lookup
from idempotency.checks.doctor import doctor
from idempotency.checks.findings import Level
from idempotency.errors import ChangeRefused, ResultErased, SettingsError
from idempotency.objects import PAGE, ObjectStore, object_store
from idempotency.operate.change import Change
from idempotency.operate.erase import erase
from idempotency.settings import Settings
from idempotency.testing.processes import Action, Interruption
from idempotency.testing.processes import Delivery as DeliveryProcess
from idempotency.upkeep import alerts, loops, maintenance, objects
from idempotency.wire.headers import KEY_HEADER, TENANT_HEADER
from idempotency.wire.message import Message
from tests.support import operations as op
from tests.support.deliveries import Deliveries
from tests.support.large_results import DAY, Down, Place, body, large, place_of
from tests.support.tasks import make_task


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


def test_a_folder_or_file_that_is_another_users_holds_up_nothing_else(
    bank: Celery, directory: Place, tmp_path: Path, swept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a file whose name is a folder's. The refusals are made here: these tests may run as root."""
    store, scandir, unlink = place_of(bank), os.scandir, Path.unlink
    for folder in ("11", "22", "33"):
        for number in (1, 2):
            store.put(f"{folder}/{folder}{number:030x}", b"1")
    (tmp_path / "results" / "00").write_bytes(b"another's")
    kept = f"22/22{1:030x}"

    def scan(path: Any) -> Any:
        if str(path).endswith("/11"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    def refused(path: Path, missing_ok: bool = False) -> None:
        if str(path).endswith(kept):
            raise PermissionError(1, "Operation not permitted", str(path))
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scan)
        patch.setattr(Path, "unlink", refused)
        with pytest.raises(PermissionError):
            swept()
    assert directory.names == [f"11/11{1:030x}", f"11/11{2:030x}", kept]


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


def test_what_is_deleted_before_a_listing_fails_is_logged(
    bank: Celery, set_place: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Half(Down):
        def older(self, seconds: float) -> Iterator[list[str]]:
            yield ["ab/" + "ab" * 16]
            yield ["cd/" + "cd" * 16]
            raise OSError("listing")

        def delete(self, names: Sequence[str]) -> None:
            if names[0].startswith("ab"):
                raise PermissionError("locked")

    set_place(Half())
    with caplog.at_level("INFO", "idempotency"), pytest.raises(OSError, match="listing"):
        objects.sweep(bank)
    assert "event=objects_deleted objects=1" in caplog.messages


@pytest.mark.long
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


@pytest.mark.long
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
    assert (finding.level, finding.found) == (Level.REFUSAL, "does not answer: no such directory")


def test_a_mount_point_is_no_place() -> None:
    """It is there, and empty, while nothing is mounted: what is put then is hidden once it is."""
    store = object_store("file:///proc")
    for ask in (lambda: store.put("ab/" + "ab" * 16, b"1"), lambda: store.get("ab/" + "ab" * 16, 1)):
        with pytest.raises(NotADirectoryError, match="is a mount point; name a directory in it"):
            ask()


def test_a_link_to_a_directory_below_a_mount_point_is_a_place_and_one_to_it_is_none(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as mounted:
        (tmp_path / "below").symlink_to(mounted)
        (tmp_path / "itself").symlink_to("/dev/shm")
        store = object_store(f"file://{tmp_path}/below")
        store.put("ab/" + "ab" * 16, b"1")
        assert store.get("ab/" + "ab" * 16, 2) == b"1"
        with pytest.raises(NotADirectoryError, match="is a mount point"):
            object_store(f"file://{tmp_path}/itself").put("ab/" + "ab" * 16, b"1")


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
