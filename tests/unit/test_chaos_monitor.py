"""What the monitor says about processes that end by themselves, and what many runs say together."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from sqlalchemy.exc import DBAPIError, OperationalError, ProgrammingError

from idempotency import SettingsError
from services import process
from tests.chaos import monitor
from tests.chaos.fleet import EDGE, WORKER, Fleet
from tests.chaos.many import Run, figures, verdict
from tests.chaos.monitor import Ended, Known, explanation, is_of_the_storm, memory_kills, unexplained

ENDED = Ended("relay-1", "relay", 1, ("relay_started", "idempotency: the database did not answer", ""))


def test_a_process_that_ended_by_itself_is_a_violation_with_its_last_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "KNOWN", ())
    (violation,) = unexplained([ENDED])
    assert str(violation) == (
        "monitor relay-1: ended by itself with status 1: idempotency: the database did not answer"
    )


def test_an_end_with_a_known_reason_is_explained_and_no_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Known("relay", "did not answer", "a relay of yesterday")
    monkeypatch.setattr(monitor, "KNOWN", (known,))
    assert explanation(ENDED) == "a relay of yesterday"
    assert unexplained([ENDED]) == []


def test_a_process_that_is_told_to_stop_while_it_starts_has_not_ended_by_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fleet = Fleet(tmp_path, {}, workers=1, concurrency=1, relays=1, beats=0, callers=0)
    (worker,) = fleet.of(WORKER)
    with subprocess.Popen(["sleep", "60"]) as child:

        def launch(*_: Any, **__: Any) -> int:
            fleet.terminate(worker, psutil.Process(child.pid))
            return child.pid

        monkeypatch.setattr(process, "launch", launch)
        fleet._start(worker)
    assert worker.overdue is not None


def test_a_web_servers_port_is_its_own_whether_or_not_it_runs(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, {}, workers=1, concurrency=1, relays=1, beats=0, callers=0, edges=2)
    first, second = (member.port or 0 for member in fleet.of(EDGE))
    assert first != second
    for _ in range(2):  # started, ended, and started again
        socket.create_server(("127.0.0.1", first)).close()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", first))  # by another program, while the server is down
    fleet.stop()


@pytest.mark.parametrize("known", [Known("worker", "did not answer", "-"), Known("relay", "out of memory", "-")])
def test_a_reason_holds_for_its_own_kind_and_log_line_only(monkeypatch: pytest.MonkeyPatch, known: Any) -> None:
    monkeypatch.setattr(monitor, "KNOWN", (known,))
    assert len(unexplained([ENDED])) == 1


def test_an_end_without_a_log_is_a_violation_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "KNOWN", ())
    assert "its log is empty" in str(unexplained([Ended("beat-1", "beat", 1)])[0])


@pytest.mark.parametrize(
    ("statuses", "together"),
    [((0, 0), 0), ((0, 2, 1), 1), ((0, 2), 2), ((0, 3, 2), 3), ((1, 3), 1), ((0, -9), 1), ((0, 130), 1)],
)
def test_many_runs_are_as_good_as_their_worst(statuses: Any, together: int) -> None:
    assert verdict([Run(1, status, {}, Path("-")) for status in statuses]) == together


def test_the_figures_of_a_run_are_those_of_its_last_line() -> None:
    output = "noise lost=9\nRESULT seed=7 seconds=60 faults=30 kinds=24 accepted=10 lost=0 violations=1\n"
    assert figures(output) == {"faults": "30", "kinds": "24", "accepted": "10", "lost": "0", "violations": "1"}
    assert figures("chaos: interrupted") == {}


def refused(sqlstate: str | None, kind: type[DBAPIError] = OperationalError) -> DBAPIError:
    error = psycopg.OperationalError("refused")
    error.sqlstate = sqlstate
    return kind("INSERT", {}, error)


@pytest.mark.parametrize("state", [None, "25006", "40P01", "40001", "55P03", "57014", "57P03", "08006", "53300"])
def test_what_faults_do_to_a_statement_is_no_finding(state: str | None) -> None:
    assert is_of_the_storm(refused(state))


@pytest.mark.parametrize(
    "error",
    [
        *(refused(state, DBAPIError) for state in ("23505", "42P01", "42703", "22P02")),
        refused(None, ProgrammingError),  # of the driver itself: it cannot send a value
        SettingsError("no"),
        KeyError("k"),
    ],
)
def test_whatever_else_a_submission_or_a_command_is_told_is_a_finding(error: Exception) -> None:
    assert not is_of_the_storm(error)


def test_the_kernels_kills_are_counted_where_it_tells_them(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("pgfault 17\noom_kill 3\n")
    assert memory_kills(tmp_path / "vmstat") == 3
    assert memory_kills(tmp_path / "none") == 0
