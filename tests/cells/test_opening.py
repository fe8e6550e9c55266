"""How a process without a cell opens those that it calls into: threads, forks, and what the application's `cell_of` does."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
from sqlalchemy import text

from idempotency import application, runtime_for
from idempotency.application import close_runtime
from tests.cells.conftest import Cells, Serve
from tests.support.celled import app

# How long a call may take that waits for nothing.
SOON = 3.0


@pytest.fixture
def directory(serve: Serve, cells: Cells) -> Callable[[Callable[[str], str | None]], None]:
    """Sets the function that says which cell a tenant is of."""

    def use(function: Callable[[str], str | None]) -> None:
        serve(None)
        app.conf.idempotency_cell_of = function
        close_runtime(app)

    return use


def plain_cell_of(tenant: str) -> str | None:
    return tenant[:2] if tenant.startswith(("eu-", "us-")) else None


def test_a_directory_that_is_slow_for_one_tenant_stops_no_other_caller(
    directory: Callable[[Callable[[str], str | None]], None],
) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def cell_of(tenant: str) -> str | None:
        if tenant == "eu-slow":
            asked.set()
            go_on.wait(30)
        return plain_cell_of(tenant)

    directory(cell_of)
    runtime_for(app, "us-bolt")  # open
    slow = threading.Thread(target=lambda: runtime_for(app, "eu-slow"))
    slow.start()
    assert asked.wait(10)
    other = threading.Thread(target=lambda: runtime_for(app, "us-bolt"))
    other.start()
    other.join(SOON)
    waits = other.is_alive()
    go_on.set()
    slow.join(10)
    other.join(10)
    assert not waits
    assert not other.is_alive()


def test_a_directory_may_look_into_a_cell(
    directory: Callable[[Callable[[str], str | None]], None],
) -> None:

    def cell_of(tenant: str) -> str | None:
        if tenant == "eu-acme":  # the directory of tenants is a table in the cell of eu-house, say
            runtime_for(app, "eu-house")
        return plain_cell_of(tenant)

    directory(cell_of)
    pid = os.fork()
    if pid == 0:
        runtime_for(app, "eu-acme")
        os._exit(0)
    assert _ends(pid) == 0


def test_a_child_that_is_forked_during_a_call_opens_its_own(
    directory: Callable[[Callable[[str], str | None]], None],
) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def cell_of(tenant: str) -> str | None:
        if tenant == "eu-slow":
            asked.set()
            go_on.wait(30)
        return plain_cell_of(tenant)

    directory(cell_of)
    runtime_for(app, "us-bolt")
    slow = threading.Thread(target=lambda: runtime_for(app, "eu-slow"))
    slow.start()
    assert asked.wait(10)
    pid = os.fork()
    if pid == 0:
        runtime_for(app, "us-bolt")
        os._exit(0)
    ended = _ends(pid)
    go_on.set()
    slow.join(10)
    assert ended == 0


def _ends(pid: int) -> int | None:
    """The exit status of a child; None if it hangs, and then it is killed."""
    deadline = time.monotonic() + SOON
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


@pytest.mark.long
def test_a_child_that_closes_what_it_has_inherited_leaves_its_parents_connections(serve: Serve) -> None:
    serve(None)
    runtime = runtime_for(app, "eu-acme")
    with runtime.autocommit() as connection:
        before = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
    pid = os.fork()
    if pid == 0:
        close_runtime(app)
        os._exit(0)
    os.waitpid(pid, 0)
    time.sleep(0.5)
    with runtime_for(app, "us-bolt").autocommit() as connection:
        connection.execute(text("SELECT 1"))
    with runtime.autocommit() as connection:
        assert connection.execute(text("SELECT pg_backend_pid()")).scalar_one() == before


def test_a_child_that_is_forked_while_a_cell_is_opened_opens_its_own(serve: Serve) -> None:
    serve(None)
    with application._lock:  # as a thread holds it that opens one
        pid = os.fork()
        if pid == 0:
            runtime_for(app, "us-bolt")
            os._exit(0)
        ended = _ends(pid)
    assert ended == 0
