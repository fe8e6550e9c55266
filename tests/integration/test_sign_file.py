"""`idempotency alive`: a process that hangs is told from one whose servers are away, and from one that has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from celery import Celery
from celery.concurrency import get_implementation
from sqlalchemy import event, make_url

from idempotency.attempt.liveness import process_identity
from idempotency.upkeep.presence import TIMEOUT, ConsumerTurns, SignOfLife
from idempotency.upkeep.sign_file import SignFile, silence
from tests.support import bank as b
from tests.support.commands import Run, runner
from tests.support.processes import Processes, Worker, eventually
from tests.support.proxy import Proxy

HANGING = "tests.support.hanging"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(monkeypatch, capsys)


@pytest.fixture
def file(tmp_path: Path, environment: dict[str, str]) -> Path:
    environment |= {
        "SIGN_OF_LIFE": "0.2", "SIGN_OF_LIFE_FILE": str(tmp_path / "alive"), "HANG": str(tmp_path / "hang"),
    }  # fmt: skip
    return tmp_path / "alive"


def signed(worker: Worker, file: Path) -> None:
    """Wait until a worker has signed in its file."""
    holder = eventually(lambda: file.read_text() if file.exists() else "", what="a sign in the file")
    assert holder.split("|")[3] == str(worker.process.pid)


@pytest.mark.long
def test_a_worker_whose_main_loop_hangs_is_told_and_ends_in_order(
    bank: Celery, processes: Processes, run: Run, file: Path
) -> None:
    worker = processes.worker("--concurrency", "1", app=HANGING)
    signed(worker, file)
    assert run("alive", file).status == 0
    hang = file.with_name("hang")
    hang.touch()
    b.deposit.delay(account="a")
    eventually(lambda: run("alive", file, "--within", 1).status == 1, what="the hung loop")
    assert run("alive", file).status == 0, "three minutes are not over"
    hang.unlink()
    eventually(lambda: run("alive", file, "--within", 1).status == 0, what="the next turn")
    worker.terminate()
    assert worker.process.wait(30) == 0
    assert (file.exists(), run("alive", file).out) == (False, "no sign is expected\n")


@pytest.mark.long
def test_a_worker_whose_servers_are_away_is_alive(
    bank: Celery, processes: Processes, run: Run, file: Path, environment: dict[str, str]
) -> None:
    database, broker = make_url(environment["DATABASE_URL"]), urlsplit(environment["BROKER_URL"])
    with Proxy(str(database.host), database.port or 0) as one, Proxy("127.0.0.1", broker.port or 0) as other:
        through = database.set(host="127.0.0.1", port=one.port).render_as_string(hide_password=False)
        worker = processes.worker(
            "--concurrency",
            "1",
            app=HANGING,
            DATABASE_URL=through,
            BROKER_URL=broker._replace(netloc=f"{broker.netloc.rpartition('@')[0]}@127.0.0.1:{other.port}").geturl(),
        )
        signed(worker, file)
        for proxy in (one, other):
            proxy.refuse()
            proxy.reset()
        eventually(lambda: one.refusals and other.refusals, what="connections that are refused")
        until = time.monotonic() + 3.5  # more than a turn may take here
        while time.monotonic() < until:
            assert run("alive", file, "--within", 2).status == 0
            time.sleep(0.2)
        assert worker.process.poll() is None


@pytest.mark.parametrize(("pool", "is_watched"), [("prefork", True), ("solo", False), ("threads", False)])
def test_only_where_no_body_runs_in_it_is_the_main_loop_watched(pool: str, is_watched: bool) -> None:
    for hub, expected in ((object(), is_watched), (None, False)):
        consumer = SimpleNamespace(hub=hub, pool=get_implementation(pool))
        assert ConsumerTurns(consumer).include_if(consumer) is expected


@pytest.mark.long
def test_a_process_that_stands_still_is_told_and_one_that_was_killed_is_not(
    bank: Celery, environment: dict[str, str], run: Run, file: Path
) -> None:
    command = [sys.executable, "-m", "idempotency.cli", "relay", "-A", "tests.support.bank"]
    relay = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        eventually(file.exists, what="a sign of the relay")
        relay.send_signal(signal.SIGSTOP)
        eventually(lambda: run("alive", file, "--within", 1).status == 1, what="the relay's silence")
    finally:
        relay.kill()
        relay.wait(30)
    assert file.exists()
    assert (run("alive", file, "--within", 1).status, silence(file)) == (0, None)


def test_what_another_container_has_left_behind_says_nothing(tmp_path: Path) -> None:
    file = tmp_path / "alive"
    SignFile(file).write()
    os.utime(file, (0, 0))
    assert (silence(file) or 0) > 1e9
    host, boot, namespace, pid, start = process_identity().split("|")
    for other in (f"{host}|{boot}|pid:[1]|{pid}|{start}", f"{host}|{boot}|{namespace}|{pid}|1", "", "x"):
        file.write_text(other)
        os.utime(file, (0, 0))
        assert silence(file) is None


def test_a_file_that_cannot_be_written_is_logged_once_and_ends_nothing(
    bank: Celery, tmp_path: Path, caplog: pytest.LogCaptureFixture, run: Run
) -> None:
    bank.conf.idempotency_sign_of_life_file = str(tmp_path / "none" / "alive")
    life = SignOfLife(bank, "relay")
    assert (life.sign(), life.sign()) == (True, True)
    assert caplog.text.count("sign_of_life_file_not_written") == 1
    answer = run("alive", tmp_path)
    assert (answer.status, answer.error) == (1, f"idempotency: {tmp_path}: Is a directory\n")


@pytest.mark.long
def test_a_database_that_takes_a_statement_and_never_answers_makes_nobody_look_hung(
    bank: Celery, tmp_path: Path, run: Run
) -> None:
    """A pooler or a proxy in between acknowledges, so TCP notices nothing; statement_timeout is the server's own."""
    file = tmp_path / "alive"
    database = make_url(bank.conf.idempotency_database_url)
    bank.conf.idempotency_sign_of_life, bank.conf.idempotency_sign_of_life_file = 0.2, str(file)
    with Proxy(str(database.host), database.port or 0) as proxy:
        bank.conf.idempotency_database_url = database.set(host="127.0.0.1", port=proxy.port).render_as_string(
            hide_password=False
        )
        life = SignOfLife(bank, "worker")
        assert life.sign()

        @event.listens_for(life._engine, "before_cursor_execute")
        def swallow(*_: object) -> None:
            proxy.black_hole("replies")

        life.start()
        eventually(lambda: proxy.swallowed, what="an answer that is lost")
        time.sleep(4 * TIMEOUT)  # longer than the two statements and a connection may take
        silent = silence(file) or 0.0
        status = run("alive", file, "--within", 3 * TIMEOUT).status
        proxy.heal()  # ends the thread's connection; the answer to the next statement is lost again
        ending = threading.Thread(target=life.end, daemon=True)
        ending.start()
        ending.join(10 * TIMEOUT)  # "a few times this at most"
        hangs = ending.is_alive()
        event.remove(life._engine, "before_cursor_execute", swallow)
        proxy.heal()
        ending.join(30)
    assert silent < 3 * TIMEOUT
    assert status == 0
    assert not hangs


def test_a_disk_that_is_full_makes_nobody_look_hung(bank: Celery, tmp_path: Path, run: Run) -> None:
    file = tmp_path / "alive"
    bank.conf.idempotency_sign_of_life_file = str(file)
    life = SignOfLife(bank, "worker")
    assert life.sign()
    (tmp_path / f".alive.{os.getpid()}").mkdir()  # in the place of ENOSPC: the new file cannot be written
    os.utime(file, (time.time() - 300, time.time() - 300))  # five minutes later
    assert life.sign()  # it signs in Postgres
    assert run("alive", file).status == 0


def test_of_a_file_that_is_not_text_nothing_is_concluded(tmp_path: Path) -> None:
    file = tmp_path / "alive"
    file.write_bytes(b"\xff\xfe")
    assert silence(file) is None
