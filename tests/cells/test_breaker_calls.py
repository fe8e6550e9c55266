"""Proofs of a breaker: each test asserts what happens today, and says beside it what would be right."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest
from celery import Celery
from sqlalchemy import Engine, text

from idempotency import runtime_for, use_cells
from idempotency.application import close_runtime
from idempotency.checks.doctor import doctor
from idempotency.checks.findings import Level
from idempotency.errors import SettingsError
from idempotency.letters.consumer import DeadLetterConsumer
from idempotency.operate import api_keys
from idempotency.operate.change import Change
from idempotency.settings import Settings
from tests.cells.conftest import Cells, Serve
from tests.support.celled import app, deposit
from tests.support.processes import eventually

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


def test_a_directory_that_is_slow_for_one_tenant_stops_the_callers_of_all(
    directory: Callable[[Callable[[str], str | None]], None],
) -> None:
    """RIGHT: `cell_of` is asked outside the process's one lock; one tenant's call holds up no other's."""
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
    assert waits  # RIGHT: not waits
    assert not other.is_alive()


def test_a_directory_that_looks_into_a_cell_hangs_for_ever(
    directory: Callable[[Callable[[str], str | None]], None],
) -> None:
    """RIGHT: it works, or is an error. The first call hangs with the lock of all applications of the process."""

    def cell_of(tenant: str) -> str | None:
        if tenant == "eu-acme":  # the directory of tenants is a table in the cell of eu-house, say
            runtime_for(app, "eu-house")
        return plain_cell_of(tenant)

    directory(cell_of)
    pid = os.fork()
    if pid == 0:
        runtime_for(app, "eu-acme")
        os._exit(0)
    assert _ends(pid) is None  # RIGHT: == 0


def test_a_child_that_is_forked_during_a_call_never_calls_again(
    directory: Callable[[Callable[[str], str | None]], None],
) -> None:
    """A caller holds the lock with every call, not with the first alone. RIGHT: the child opens its own, as without cells."""
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
    assert ended is None  # RIGHT: == 0


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


def test_a_child_that_closes_what_it_has_inherited_breaks_its_parents_connections(serve: Serve) -> None:
    """RIGHT: forgotten (`abandon`), as `runtime_for` does: the sockets are the parent's. (The same without cells.)"""
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
    try:
        with runtime.autocommit() as connection:
            after = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
    except Exception:
        after = None
    assert after != before  # RIGHT: after == before


# ---------------------------------------------------------------- set-up


def test_the_doctor_does_not_see_that_calls_without_a_tenant_are_refused(serve: Serve, cells: Cells) -> None:
    """ "has to be one of this cell", and nothing looks: each tick of beat is refused. RIGHT: a refusal by the doctor and at start."""
    cells["eu"]["tenant"] = "us-house"
    serve("eu")
    app.conf.beat_schedule = {"each": {"task": "deposit", "schedule": 60.0, "args": ["a1"]}}
    try:
        findings = doctor(app)
        assert [f for f in findings if f.level is Level.REFUSAL] == []  # RIGHT: one that names the tenant
        assert not [f for f in findings if "us-house" in f.found + f.advice]
        with pytest.raises(Exception, match="tenant 'us-house' is of cell 'us', and this process serves 'eu'"):
            deposit.apply_async(("a1",))
    finally:
        app.conf.beat_schedule = {}


CELL = {"database_url": "postgresql+psycopg://one/x", "broker_url": "amqp://h//"}


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"database_url": "postgresql+psycopg://two/x", "broker_url": "amqp://h:5672//"}, "the default port"),
        ({"database_url": "postgresql+psycopg://two/x", "broker_url": "amqp://h/"}, "the default virtual host"),
        ({"database_url": "postgresql+psycopg://two/x", "broker_url": "amqp://h/%2F"}, "escaped"),
        ({"database_url": "postgresql+psycopg://two/x", "broker_url": "pyamqp://h/?heartbeat=9"}, "options"),
        ({"database_url": "postgresql+psycopg://one,spare/x", "broker_url": "amqp://h/b"}, "a standby's host"),
        ({"database_url": "postgresql+psycopg://ONE/x", "broker_url": "amqp://h/b"}, "capital letters"),
    ],
)
def test_one_place_written_in_two_ways_passes_for_two(other: dict[str, str], why: str) -> None:
    """RIGHT: refused, as what is written in one way. In one virtual host each cell's workers take the other's messages."""
    given = {"cells": {"eu": CELL, "us": other}, "cell_of": {"a": "eu"}, "cell": "eu"}
    assert Settings.read({**given, "database_url": CELL["database_url"]}).cells.keys() == {"eu", "us"}, why


@pytest.mark.parametrize(
    ("address", "shown"), [("postgresql+psycopg://u:p@9:S3CRET@h/x", "S3CRET"), ("no address", None)]
)
def test_an_address_that_cannot_be_read(address: str, shown: str | None) -> None:
    """RIGHT: `SettingsError`, without the address: "never a URL or a password"."""
    given = {
        "database_url": CELL["database_url"],
        "cells": {"eu": CELL, "us": {"database_url": address, "broker_url": "amqp://h/b"}},
        "cell_of": {"a": "eu"},
        "cell": "eu",
    }
    with pytest.raises(Exception, match=shown or "Could not parse") as refused:
        Settings.read(given)
    assert isinstance(refused.value, SettingsError) == (shown is not None)  # RIGHT: always, and nothing is shown


def test_with_a_namespace_of_celerys(cells: Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    """HELD if it passes: the settings as CELERY_IDEMPOTENCY_CELLS are the same."""
    monkeypatch.setenv("IDEMPOTENCY_CELL", "us")
    made = Celery("namespaced", set_as_current=False)
    given = {"CELERY_IDEMPOTENCY_CELLS": cells, "CELERY_IDEMPOTENCY_CELL_OF": {"a": "us", "us-house": "us"}}
    made.config_from_object(given, namespace="CELERY")
    use_cells(made)
    assert made.conf.broker_url == cells["us"]["broker_url"]
    assert runtime_for(made, "a").settings.cell == "us"
    close_runtime(made)
    monkeypatch.delenv("IDEMPOTENCY_CELL")
    use_cells(made)
    assert runtime_for(made, "a").settings.cell == "us"
    close_runtime(made)


# ---------------------------------------------------------------- what arrives, and people


def test_a_letter_whose_tenant_cannot_be_told_does_not_hold_up_the_others(
    serve: Serve, engines: dict[str, Engine]
) -> None:
    """HELD if it passes: it is held, and stored as what nobody could handle after some tries; the letter beside it is stored."""
    serve("eu")
    consumer = DeadLetterConsumer(app)
    consumer._connect()
    fingerprint = deposit._checked(("a1",), {}, "a1", "eu-acme")[1]["idempotency-fingerprint"]
    with app.connection_for_write() as broker:
        producer = broker.Producer()
        for tenant in ("broken", "us-bolt"):
            headers = {"task": "deposit", "id": tenant, "idempotency-key": "a1", "idempotency-tenant": tenant}
            headers |= {"idempotency-fingerprint": fingerprint}
            producer.publish([["a1"], {}, {}], routing_key="deposits.dead_letters", headers=headers, serializer="json")

    def reasons() -> list[tuple[str, str]]:
        with engines["eu"].connect() as connection:
            rows = connection.execute(text("SELECT tenant, reason FROM idempotency.dead_letters ORDER BY id"))
            return [(row.tenant, row.reason) for row in rows]

    eventually(lambda: (consumer.run_once() and False) or ("us-bolt", "other_cell") in reasons(), timeout=20)
    consumer.close()


def test_people_write_into_a_cell_what_belongs_to_another(serve: Serve, engines: dict[str, Engine]) -> None:
    """An API key for a tenant that is not of this cell. RIGHT: `WrongCell`. It opens nothing there, and a copy later brings it."""
    serve("eu")
    with runtime_for(app, "eu-acme").engine.begin() as connection:
        made = api_keys.create_api_key(connection, Change("ann", "x"), "us-bolt", name="n", scopes=["*"])
    assert made.id
    with engines["eu"].connect() as connection:
        assert connection.execute(text("SELECT tenant FROM idempotency.api_keys")).scalars().all() == ["us-bolt"]
