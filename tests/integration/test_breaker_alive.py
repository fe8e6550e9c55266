"""Proofs of a breaker about `idempotency alive`: each test asserts what happens today, and says beside it what would be right."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from celery import Celery
from sqlalchemy import event, make_url

from idempotency.upkeep.presence import TIMEOUT, SignOfLife
from idempotency.upkeep.sign_file import silence
from tests.support.commands import Run, runner
from tests.support.processes import eventually
from tests.support.proxy import Proxy


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(monkeypatch, capsys)


def test_a_database_that_takes_a_statement_and_never_answers_makes_a_healthy_process_look_hung(
    bank: Celery, tmp_path: Path, run: Run
) -> None:
    """A pooler or a proxy in between acknowledges, so TCP notices nothing; statement_timeout is the server's own.

    RIGHT: the file is signed all the same ("Postgres and the broker are not asked", "a process that is restarted for that
    repairs nothing"): with a patience of the client's, as the heartbeat has, or with a thread of its own.
    """
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
        status = run("alive", file, "--within", 2 * TIMEOUT).status
        proxy.heal()  # ends the thread's connection; the answer to the next statement is lost again
        ending = threading.Thread(target=life.end, daemon=True)
        ending.start()
        ending.join(10 * TIMEOUT)  # "a few times this at most"
        hangs = ending.is_alive()
        event.remove(life._engine, "before_cursor_execute", swallow)
        proxy.heal()
        ending.join(30)
    assert silent > 3 * TIMEOUT  # RIGHT: below 2 * TIMEOUT
    assert status == 1  # RIGHT: 0
    assert hangs  # RIGHT: not hangs. A worker that was told to end stays until it is killed


def test_a_disk_that_is_full_makes_a_healthy_process_look_hung(bank: Celery, tmp_path: Path, run: Run) -> None:
    """The file is not written any more and stays, so the probe ends all processes of the node: restarting repairs nothing.

    RIGHT: fall back to what needs no space (os.utime on the open file), or remove the file.
    """
    file = tmp_path / "alive"
    bank.conf.idempotency_sign_of_life_file = str(file)
    life = SignOfLife(bank, "worker")
    assert life.sign()
    (tmp_path / f".alive.{os.getpid()}").mkdir()  # in the place of ENOSPC: the new file cannot be written
    os.utime(file, (time.time() - 300, time.time() - 300))  # five minutes later
    assert life.sign()  # it signs in Postgres
    assert run("alive", file).status == 1  # RIGHT: 0


def test_a_file_that_is_not_text_is_a_traceback_and_a_restart(tmp_path: Path) -> None:
    """RIGHT: nothing is concluded, as of a file of another container. A torn disk, or a file of another program."""
    file = tmp_path / "alive"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UnicodeDecodeError):  # RIGHT: None
        silence(file)
