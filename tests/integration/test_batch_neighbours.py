"""What one body of a batch does to those that share its transaction: nothing."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from celery import Celery
from celery.backends.base import DisabledBackend
from psycopg import sql
from sqlalchemy import Engine, event, text
from sqlalchemy.orm import Session

from idempotency import IdempotentTask, OperationId
from idempotency.application import close_runtime, runtime_of
from idempotency.store import batches, claims
from idempotency.wire.delivery import Delivery
from tests.support.batches import SETTING, accounts, many, message, put, put_one, run, states, together
from tests.support.tasks import make_task


def test_a_body_that_runs_again_gets_its_arguments_as_they_were_sent(bank: Celery, engine: Engine) -> None:
    def body(self: IdempotentTask, account: str, items: list[int]) -> None:
        total = 0
        while items:
            total += items.pop()
        put(self, account, total)
        if account == "e3":
            raise ValueError("bad")

    task = together(bank, body)
    run(bank, task, *(message(bank, task, f"e{n}", [5, 6]) for n in range(4)))
    assert accounts(engine) == {"e0": [11], "e1": [11], "e2": [11]}
    assert states(engine) == {"e0": "completed", "e1": "completed", "e2": "completed", "e3": "failed"}


@pytest.mark.few(8)
@pytest.mark.parametrize(
    "setting",
    [
        "SET LOCAL app.tenant = 'e0'",
        "/* of e0 */ SET LOCAL app.tenant = 'e0'",
        "-- of e0\nSET LOCAL app.tenant = 'e0'",
        "SELECT set_config('app.tenant', 'e0', true)",
        "DO $$ BEGIN SET LOCAL app.tenant = 'e0'; END $$",
    ],
)
@pytest.mark.parametrize("way", ["session", "before the commit", "cursor", "driver", "composed"])
def test_what_a_body_has_set_is_so_for_no_other(bank: Celery, engine: Engine, setting: str, way: str) -> None:
    seen: dict[str, Any] = {}

    def body(self: IdempotentTask, account: str) -> None:
        seen[account] = self.session.execute(text(SETTING)).scalar_one() or ""
        if account == "e0":
            connection: Any = self.session.connection().connection
            match way:
                case "session":
                    self.session.execute(text(setting))
                case "before the commit":
                    event.listen(self.session, "before_commit", lambda session: session.execute(text(setting)))
                case "cursor":
                    connection.cursor().execute(setting.encode())
                case "driver":
                    connection.driver_connection.execute(setting)
                case "composed":
                    connection.driver_connection.execute(sql.SQL(setting))
        put(self, account)

    task = together(bank, body)
    run(bank, task, *(message(bank, task, f"e{n}") for n in range(3)))
    assert seen == {"e0": "", "e1": "", "e2": ""}
    assert states(engine) == {"e0": "completed", "e1": "completed", "e2": "completed"}


class Shop(Session):
    """An application's own class of sessions."""


@pytest.mark.parametrize("listens", ["the body", "the application"])
def test_who_listens_for_a_commit_is_told_of_the_real_one_and_once(
    configured: Celery, engine: Engine, request: pytest.FixtureRequest, listens: str
) -> None:
    entered, told = [], []

    def after(session: Session) -> None:
        told.append(accounts(engine))

    def body(self: IdempotentTask, account: str) -> None:
        entered.append(account)
        put(self, account)
        if listens == "the body" and account == "e1":
            event.listen(self.session, "after_commit", after)

    if listens == "the application":
        event.listen(Shop, "after_commit", after)
        request.addfinalizer(lambda: event.remove(Shop, "after_commit", after))
        configured.conf.idempotency_session = Shop
    close_runtime(configured)
    request.addfinalizer(lambda: close_runtime(configured))
    task = together(configured, body)
    run(configured, task, *(message(configured, task, f"e{n}") for n in range(3)))
    assert states(engine) == {"e0": "completed", "e1": "completed", "e2": "completed"}
    if listens == "the application":
        assert told == [{"e0": [1]}, {"e0": [1], "e1": [1]}, {"e0": [1], "e1": [1], "e2": [1]}]
        assert entered == ["e0", "e1", "e2"]
    else:
        assert told == [{"e0": [1], "e1": [1], "e2": [1]}]


@pytest.mark.parametrize("way", ["session", "proxied", "driver"])
def test_a_body_that_rolls_back_loses_the_work_of_no_other(bank: Celery, engine: Engine, way: str) -> None:
    def body(self: IdempotentTask, account: str) -> None:
        put(self, account)
        if account == "e1":
            connection: Any = self.session.connection().connection
            match way:
                case "session":
                    self.session.rollback()
                case "proxied":
                    connection.rollback()
                case "driver":
                    connection.driver_connection.rollback()
            put(self, account)

    task = together(bank, body)
    run(bank, task, *(message(bank, task, f"e{n}") for n in range(3)))
    assert states(engine) == {"e0": "completed", "e1": "completed", "e2": "completed"}
    assert accounts(engine) == {"e0": [1], "e1": [1], "e2": [1]}


@pytest.mark.parametrize("commit", [b"COMMIT", "; COMMIT", ";/* */ ; END", sql.SQL("COMMIT")])
def test_a_body_that_would_commit_does_nothing_twice(bank: Celery, engine: Engine, commit: Any) -> None:
    def body(self: IdempotentTask, account: str) -> None:
        put(self, account)
        if account == "e1":
            self.session.connection().connection.cursor().execute(commit)
        if account == "e3":
            raise ValueError("bad")

    task = together(bank, body)
    run(bank, task, *(message(bank, task, f"e{n}") for n in range(4)))
    assert states(engine) == {"e0": "completed", "e1": "failed", "e2": "completed", "e3": "failed"}
    assert accounts(engine) == {"e0": [1], "e2": [1]}


@pytest.mark.parametrize(
    ("payload", "runs"), [('[["bad"], {}, {"args": []}]', True), ('[["bad"], {}]', False), ('{"a": 1}', False)]
)
def test_a_payload_of_another_form_stops_no_other(bank: Celery, engine: Engine, payload: str, runs: bool) -> None:
    def body(self: IdempotentTask, account: str) -> None:
        put(self, account)

    task = together(bank, body)
    bad = message(bank, task, body=payload)
    run(bank, task, message(bank, task, "e0"), bad, message(bank, task, "e1"))
    assert accounts(engine) == {"e0": [1], "e1": [1]} | ({"bad": [1]} if runs else {})


def test_a_message_that_is_alone_in_its_batch_is_entered_once(bank: Celery, engine: Engine) -> None:
    """There is nobody whose transaction it could share, so nothing has to be run again."""
    entered: list[str] = []

    def body(self: IdempotentTask, account: str) -> None:
        entered.append(account)
        put(self, account)
        raise ValueError("bad")

    task = together(bank, body)
    run(bank, task, message(bank, task, "e0"))
    assert (entered, states(engine), accounts(engine)) == (["e0"], {"e0": "failed"}, {})


class Noted(DisabledBackend):
    """A result backend that notes the states it is told."""

    def __init__(self, app: Celery) -> None:
        super().__init__(app)
        self.told: list[str] = []

    def store_result(self, task_id: str, result: Any, state: str, **_: Any) -> Any:
        self.told.append(state)
        return result


@pytest.mark.parametrize(("commit", "started"), [("each", 2), ("together", 0)])
def test_no_result_backend_is_waited_for_while_others_hold_their_locks(
    bank: Celery, engine: Engine, commit: str, started: int
) -> None:
    backend = Noted(bank)
    options: dict[str, Any] = {"track_started": True, "ignore_result": False, "backend": backend}
    task = make_task(bank, put_one, key="{account}", batch=10, batch_commit=commit, **options)
    run(bank, task, *many(bank, task, 2))
    assert states(engine) == {"e0": "completed", "e1": "completed"}
    assert (backend.told.count("STARTED"), backend.told.count("SUCCESS")) == (started, 2)


@pytest.mark.long
def test_what_runs_alone_after_its_batch_is_not_claimed_again(
    bank: Celery, engine: Engine, configure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor if the bodies have taken longer than a lease, which was renewed meanwhile."""
    configure(lease=4.0, heartbeat=0.5)
    claimed: list[str] = []
    claim = claims.claim

    def noted(connection: Any, id: OperationId, **options: Any) -> Any:
        claimed.append(id.key)
        return claim(connection, id, **options)

    def body(self: IdempotentTask, account: str) -> None:
        put(self, account)
        if account == "e0":
            time.sleep(2.2)  # twice: a batch with one that cannot stay runs again
        if account == "e1":
            raise ValueError("bad")

    monkeypatch.setattr(claims, "claim", noted)
    task = together(bank, body)
    run(bank, task, *(message(bank, task, f"e{n}") for n in range(3)))
    assert states(engine) == {"e0": "completed", "e1": "failed", "e2": "completed"}
    assert claimed == []
    assert not runtime_of(bank).heartbeat._holdings


def test_a_second_run_finds_the_request_as_it_came(bank: Celery, engine: Engine) -> None:
    """What a run has left there was rolled back with what it wrote."""
    found: list[bool] = []

    def body(self: IdempotentTask, account: str) -> None:
        if getattr(self.request, "posted", None) is None:
            put(self, account)
            self.request.posted = True
        self.request.callbacks.append("added")
        found.append(self.request.callbacks == ["added"])
        self.request.callbacks.clear()
        if account == "e3":
            raise ValueError("bad")

    task = together(bank, body)
    sent = [json.dumps([[f"e{n}"], {}, {"callbacks": []}]) for n in range(4)]
    run(bank, task, *(message(bank, task, body=each) for each in sent))
    assert states(engine) == {"e0": "completed", "e1": "completed", "e2": "completed", "e3": "failed"}
    assert accounts(engine) == {"e0": [1], "e1": [1], "e2": [1]}
    assert set(found) == {True}


def test_what_is_too_old_by_the_databases_clock_joins_no_batch(bank: Celery, engine: Engine) -> None:
    """Whatever the worker's clock says: it may be a copy of an operation that is purged, and is asked about alone."""
    day = 86400.0
    with engine.connect() as connection:
        now = connection.execute(text("SELECT extract(epoch FROM clock_timestamp())::float8")).scalar_one()
    ages = {"unsigned": None, "young": now - day / 2, "old": now - 1.25 * day}
    deliveries = [
        Delivery(OperationId("default", "t", key), "f" * 64, {}, message="{}", signed_at=at) for key, at in ages.items()
    ]
    with runtime_of(bank).autocommit() as connection:
        (claimed,) = batches.claim_new(
            connection, deliveries, ["a", "b", "c"], service="bank", holder="h", lease=30.0, horizon=day
        )
    assert {claim.id.key for claim in claimed} == {"unsigned", "young"}


def test_a_batch_drops_no_hint_that_its_claims_have_not_left(bank: Celery, engine: Engine) -> None:
    def body(self: IdempotentTask, account: str) -> None:
        put(self, account)

    task = together(bank, body)
    run(bank, task, *(message(bank, task, f"e{n}") for n in range(3)))
    assert accounts(engine) == {"e0": [1], "e1": [1], "e2": [1]}
    assert not runtime_of(bank).hints._dropped


class InCents(IdempotentTask):
    abstract = True

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        kwargs["amount"] *= 100


def test_what_before_start_changes_is_changed_once_for_each_run_of_the_body(bank: Celery, engine: Engine) -> None:
    def body(self: Any, account: str, amount: int) -> None:
        put(self, account, amount)
        if account == "e3":
            raise ValueError("bad")

    options: dict[str, Any] = {"key": "{account}", "batch": 10, "max_attempts": 1}
    task = bank.task(base=InCents, bind=True, name=f"test.{id(body)}", shared=False, **options)(body)
    sent = [json.dumps([[], {"account": f"e{n}", "amount": 5}, {}]) for n in range(4)]
    run(bank, task, *(message(bank, task, body=each) for each in sent))
    assert accounts(engine) == {"e0": [500], "e1": [500], "e2": [500]}


def test_a_call_that_only_a_body_alone_may_make_is_made(bank: Celery, engine: Engine) -> None:
    """In a batch it is inside the transaction of all: a body that catches the refusal would end without its call."""

    def other(self: IdempotentTask, account: str) -> str:
        put(self, account)
        return "called"

    def body(self: IdempotentTask, account: str) -> str:
        try:
            return str(inner(f"in {account}"))
        except Exception as error:
            put(self, f"{type(error).__name__} {account}")
            return "refused"

    inner = make_task(bank, other, key="{account}")
    task = together(bank, body)
    run(bank, task, *(message(bank, task, f"e{n}") for n in range(2)))
    assert accounts(engine) == {"in e0": [1], "in e1": [1]}
