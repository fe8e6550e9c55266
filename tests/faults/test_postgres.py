"""F12–F14: Postgres is killed, its connections break on a reply, its disk is full or it refuses writes."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy.exc import OperationalError

from idempotency.application import close_runtime
from idempotency.relay.relay import Relay, Relayed
from tests.faults.conftest import SeenCell
from tests.faults.marks import each
from tests.faults.own_postgres import (  # noqa: F401
    Writes,
    fixture_database,
    fixture_postgres,
    fixture_template,
    fixture_writes,
    plain,
)
from tests.faults.scene import PATIENCE, Scene
from tests.support import bank as app_module
from tests.support.processes import eventually

# as psycopg sends it; "BEGIN ISOLATION LEVEL READ COMMITTED" is something else
COMMIT = b"\x0bCOMMIT\x00"
CLAIM = b"INSERT INTO idempotency.records"
FINISH = b"'completed', result ="


@pytest.fixture
def relay(scene: Scene) -> Iterator[Relay]:
    """A relay that this test runs pass by pass."""
    relay = Relay(scene.app, confirm_timeout=2.0)
    relay.publisher.in_queue(scene.app.conf.task_default_queue)  # connected, and the queues are there
    yield relay
    relay.close()


def waits(scene: Scene) -> bool:
    return scene.logged("event=claim_waits") > 0


def published_again(scene: Scene) -> str:
    """The broker has one copy of a row that is still to be published; then what a second relay makes of it."""
    assert scene.outbox()[0].status == "pending"
    eventually(lambda: scene.messages() == 1, what="the first copy")
    scene.age()  # the reservation of the relay that failed
    scene.relay()
    eventually(lambda: scene.outbox()[0].status == "published", timeout=PATIENCE)
    eventually(lambda: scene.messages() == 2, what="the second copy")
    scene.worker(children=1)
    scene.completed()
    eventually(lambda: len(scene.trace("hint.left")) == 2, what="both copies taken")
    assert scene.outcome() == "D"
    return "K"


# ---------------------------------------------------------------- F12: killed


@pytest.mark.parametrize("phase", each("F12", "P0", "P1", "P2", "P3", "P4", "P5"))
def test_an_attempt_goes_on_after_postgres_was_killed_and_has_recovered(
    phase: str, scene: Scene, postgres: Any, cell: SeenCell
) -> None:
    proxy = scene.postgres_proxy()
    scene.worker()
    scene.bring_to(phase, proxy)
    postgres.kill()
    proxy.heal()
    scene.let_go(phase)
    eventually(lambda: waits(scene), what="it waits for Postgres")
    postgres.start()
    scene.completed()
    eventually(lambda: scene.messages() == 0)
    cell.saw(scene.outcome())


@pytest.mark.cell("F12", "P6")
def test_what_postgres_had_committed_answers_a_duplicate_after_recovery(
    scene: Scene, postgres: Any, cell: SeenCell
) -> None:
    scene.worker()
    scene.bring_to("P6")
    postgres.kill()
    postgres.start()
    assert scene.status() == "completed"
    scene.let_go("P6")
    scene.duplicate()
    eventually(lambda: len(scene.trace("hint.left")) == 2, timeout=PATIENCE)
    eventually(lambda: scene.logged(" succeeded in ") == 2, timeout=PATIENCE, what="both answered")
    cell.saw(scene.outcome())


@pytest.mark.parametrize("phase", each("F12", "P7", "P8", "P9"))
def test_a_relay_that_loses_postgres_before_its_mark_publishes_again(
    phase: str, scene: Scene, relay: Relay, postgres: Any, cell: SeenCell
) -> None:
    scene.accept()
    scene.at({"P7": "relay.selected", "P8": "relay.published", "P9": "relay.confirmed"}[phase], postgres.kill)
    with pytest.raises(OperationalError):
        relay.run_once()
    postgres.start()
    cell.saw(published_again(scene))


# ---------------------------------------------------------------- F13: a reply that is lost with its connection


@pytest.mark.parametrize("phase", each("F13", "P0", "P1", "P4", "P5"))
def test_a_reply_of_postgres_that_never_arrives_is_asked_for_again(phase: str, scene: Scene, cell: SeenCell) -> None:
    proxy = scene.postgres_proxy()
    scene.worker(children=1)
    before = {"P0": "P0", "P1": "P0", "P4": "P3", "P5": "P4"}[phase]
    scene.bring_to(before)
    # P0: the first question on the connection that is to claim; its process has none yet
    proxy.cut_reply_to({"P0": b"default_transaction_isolation", "P1": CLAIM, "P4": FINISH, "P5": COMMIT}[phase])
    scene.let_go(before)
    scene.completed()
    eventually(lambda: scene.logged(" succeeded in ") >= 1, timeout=PATIENCE)
    assert proxy.cuts == 1
    cell.saw(scene.outcome())


@pytest.mark.cell("F13", "P6")
def test_a_duplicate_whose_answer_is_lost_asks_again_for_the_result(scene: Scene, cell: SeenCell) -> None:
    proxy = scene.postgres_proxy()
    scene.worker(children=1)
    scene.relay()
    scene.accept()
    scene.completed()
    fence = scene.record().fence
    proxy.cut_reply_to(CLAIM)
    scene.duplicate()
    eventually(lambda: scene.logged(" succeeded in ") == 2, timeout=PATIENCE, what="both answered")
    assert (proxy.cuts, scene.record().fence) == (1, fence)
    cell.saw(scene.outcome())


@pytest.fixture
def proxied_relay(scene: Scene) -> Iterator[Relay]:
    """A relay whose own statements go through a proxy."""
    direct = scene.environment["DATABASE_URL"]
    scene.proxy = scene.postgres_proxy()
    app_module.configure(scene.environment)
    relay = Relay(scene.app, confirm_timeout=2.0)
    relay.publisher.in_queue(scene.app.conf.task_default_queue)
    assert relay.run_once() == Relayed(0, 0)
    yield relay
    relay.close()
    close_runtime(scene.app)
    scene.environment["DATABASE_URL"] = direct
    app_module.configure(scene.environment)


@pytest.mark.cell("F13", "P7")
def test_a_relay_that_never_hears_of_its_rows_leaves_them_for_a_lease(
    scene: Scene, proxied_relay: Relay, cell: SeenCell
) -> None:
    scene.accept()
    scene.proxy.cut_reply_to(b"RETURNING o.id, o.message_id, o.message, o.origin")
    with pytest.raises(OperationalError):
        proxied_relay.run_once()
    assert scene.proxy.cuts == 1
    assert proxied_relay.run_once() == Relayed(0, 0)
    assert scene.outbox()[0].relayed_until is not None
    scene.age()
    assert proxied_relay.run_once() == Relayed(1, 0)
    assert scene.messages() == 1
    scene.worker(children=1)
    scene.completed()
    assert scene.outcome() == "–"
    cell.saw("W")


@pytest.mark.cell("F13", "P9")
def test_a_relay_whose_connection_ends_before_its_mark_publishes_again(
    scene: Scene, proxied_relay: Relay, cell: SeenCell
) -> None:
    scene.accept()
    scene.at("relay.confirmed", scene.proxy.reset)
    with pytest.raises(OperationalError):
        proxied_relay.run_once()
    assert scene.proxy.resets > 0
    cell.saw(published_again(scene))


@pytest.mark.cell("F13", "P9")
def test_a_mark_whose_reply_is_lost_was_made_and_nothing_is_sent_again(
    scene: Scene, proxied_relay: Relay, cell: SeenCell
) -> None:
    scene.accept()
    scene.proxy.cut_reply_to(b"SET status = 'published'")
    with pytest.raises(OperationalError):
        proxied_relay.run_once()
    assert scene.proxy.cuts == 1
    assert scene.outbox()[0].status == "published"
    scene.age()
    assert proxied_relay.run_once() == Relayed(0, 0)
    scene.worker(children=1)
    scene.completed()
    cell.saw(scene.outcome())


# ---------------------------------------------------------------- F14: no writes


@pytest.mark.parametrize(
    "phase",
    [
        pytest.param("P0", marks=[pytest.mark.cell("F14", "P0")], id="P0"),
        *each("F14", "P1", "P2", "P3"),
    ],
)
def test_an_attempt_waits_while_postgres_takes_no_writes_and_then_goes_on(
    phase: Any, scene: Scene, writes: Writes, cell: SeenCell
) -> None:
    scene.worker()
    scene.bring_to(phase)
    writes.stop()
    scene.let_go(phase)
    eventually(lambda: waits(scene), what="it waits")
    writes.allow()
    scene.completed()
    cell.saw(scene.outcome())


@pytest.mark.cell("F14", "P6")
def test_a_duplicate_waits_for_postgres_and_gets_the_stored_result(
    scene: Scene, writes: Writes, cell: SeenCell
) -> None:
    scene.worker()
    scene.bring_to("P6")
    writes.stop()
    scene.let_go("P6")
    eventually(lambda: scene.logged(" succeeded in ") == 1, what="nothing more had to be written")
    scene.duplicate()
    eventually(lambda: waits(scene), what="the duplicate waits")
    writes.allow()
    eventually(lambda: scene.logged(" succeeded in ") == 2, timeout=PATIENCE, what="both answered")
    cell.saw(scene.outcome())


@pytest.mark.parametrize("phase", each("F14", "P7", "P9"))
def test_a_relay_that_must_not_write_its_mark_publishes_again_later(
    phase: str, scene: Scene, relay: Relay, writes: Writes, cell: SeenCell
) -> None:
    scene.accept()
    scene.at({"P7": "relay.selected", "P9": "relay.confirmed"}[phase], writes.stop)
    with pytest.raises(OperationalError):
        relay.run_once()
    writes.allow()
    cell.saw(published_again(scene))


@contextlib.contextmanager
def disk_full(backend: int) -> Iterator[None]:
    """Each write to the log of one backend fails: no space left on device."""
    command = ["strace", "-p", str(backend), "-e", "trace=pwrite64,pwritev", "-e"]
    command += ["inject=pwrite64,pwritev:error=ENOSPC"]
    strace = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert strace.stderr is not None
    attached = strace.stderr.readline()
    try:
        assert "attached" in attached, attached
        yield
    finally:
        strace.terminate()
        _, said = strace.communicate(timeout=20)
    assert "ENOSPC" in said, said


@pytest.mark.parametrize("phase", each("F14", "P4", "P5"))
def test_a_commit_for_which_the_disk_has_no_space_is_not_one(
    phase: str, scene: Scene, postgres: Any, cell: SeenCell
) -> None:
    if shutil.which("strace") is None:
        cell.not_run("no strace")
    scene.worker()
    scene.bring_to("P4")
    if phase == "P5":
        finishing = "SELECT pid FROM pg_stat_activity WHERE state = 'idle in transaction' AND query LIKE '%completed%'"
        (backend,) = scene.rows(finishing)
        with disk_full(backend.pid):
            scene.let_go("P4")
            eventually(lambda: waits(scene), timeout=PATIENCE, what="it waits for Postgres")
    else:
        # another session's commit finds the disk full, and takes the whole server down
        with psycopg.connect(plain(scene.engine.url.render_as_string(hide_password=False))) as other:
            other.execute("INSERT INTO failures (account, code) VALUES ('x', 'y')")
            with disk_full(other.info.backend_pid), pytest.raises(psycopg.OperationalError):
                other.commit()
        scene.let_go("P4")
    postgres.wait_until_ready()
    scene.completed()
    assert "PANIC" in postgres.log.read_text()
    cell.saw(scene.outcome())
