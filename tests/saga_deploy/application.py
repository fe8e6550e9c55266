"""The application before a deploy, after it, and after a repaired one; a worker runs the code that $SAGA_CODE names.

What each saga does stands in `deeds`, where a trigger refuses every change of a row.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from celery import Celery
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from idempotency import IdempotentTask, PermanentError
from idempotency.queues import quorum_queue
from idempotency.sagas import saga
from tests.support import bank
from tests.support.applications import application

OLD, NEW, REPAIRED = "old", "new", "repaired"
TABLES = """
CREATE TABLE deeds (id bigserial PRIMARY KEY, thing text NOT NULL, deed text NOT NULL, code text NOT NULL);
CREATE FUNCTION deeds_stay() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION 'deeds are only added'; END $$;
CREATE TRIGGER deeds_stay BEFORE UPDATE OR DELETE OR TRUNCATE ON deeds EXECUTE FUNCTION deeds_stay();
"""
DEED = text("INSERT INTO deeds (thing, deed, code) VALUES (:thing, :deed, :code)")
GO, INNER_GO = "deploys.go", "deploys.inner_go"
EVENTS = {GO: "{thing}", INNER_GO: "{thing}"}
# How long each waits for its event.
PATIENCE = timedelta(days=1000)


def prepare(engine: Engine) -> None:
    """Make the application's tables in a migrated database."""
    with engine.begin() as connection:
        connection.execute(text(TABLES))


def make(environment: Mapping[str, str]) -> Celery:
    """The application with the code that the environment names."""
    queue = environment["BANK_QUEUE"]
    bank.configure(dict(environment))
    app = application(
        "deploys",
        task_queues=[quorum_queue(queue, exchange=queue, dead_letter_queue=f"{queue}-dead")],
        task_default_queue=queue,
        task_default_exchange=queue,
        task_default_routing_key=queue,
        task_create_missing_queues=False,
        worker_prefetch_multiplier=1,
        worker_enable_prefetch_count_reduction=False,
        broker_connection_retry_on_startup=True,
    )
    define(app, environment.get("SAGA_CODE", OLD))
    return app


def define(app: Celery, code: str) -> None:
    """The sagas, and the tasks that they call."""

    def enter(session: Session, thing: str, deed: str) -> None:
        session.execute(DEED, {"thing": thing, "deed": deed, "code": code})

    def task(name: str, says: str) -> Any:
        @app.task(base=IdempotentTask, bind=True, name=name, shared=False)
        def does(self: IdempotentTask, thing: str, deed: str) -> None:
            enter(self.session, thing, f"{says}{deed}")

        return does

    def kind(name: str) -> Any:
        return saga(f"deploys.{name}", key="{thing}", entity="thing", events=EVENTS, app=app)

    act, undo, undo_better = (
        task("deploys.act", ""),
        task("deploys.undo", "undo "),
        task("deploys.undo_better", "undo+ "),
    )

    @kind("appended")
    def appended(saga: Any, thing: str) -> None:
        """The new code does one thing more, at the end."""
        saga.step("open", enter, thing, "open")
        saga.wait_for(GO, match=thing, timeout=PATIENCE)
        saga.step("close", enter, thing, "close")
        if code != OLD:
            saga.call(act, thing, "tell")

    @kind("reordered")
    def reordered(saga: Any, thing: str) -> None:
        """The new code does two things in another order, in sagas that have not begun."""
        if code != OLD and saga.version("pack first"):
            saga.step("pack", enter, thing, "pack")
            saga.step("label", enter, thing, "label")
        else:
            saga.step("label", enter, thing, "label")
            saga.step("pack", enter, thing, "pack")
        saga.wait_for(GO, match=thing, timeout=PATIENCE)
        saga.step("ship", enter, thing, "ship")

    @kind("inner")
    def inner(saga: Any, thing: str) -> None:
        saga.wait_for(INNER_GO, match=thing, timeout=PATIENCE)
        saga.step("in", enter, thing, "in")

    @kind("inserted")
    def inserted(saga: Any, thing: str) -> None:
        """The new code does one thing more after a call that takes long."""
        saga.step("open", enter, thing, "open")
        saga.call(inner, thing)
        if code != OLD and saga.version("check"):
            saga.step("check", enter, thing, "check")
        saga.step("close", enter, thing, "close")

    @kind("timed")
    def timed(saga: Any, thing: str) -> None:
        """The new code sleeps longer; a deadline is set once."""
        saga.step("open", enter, thing, "open")
        saga.sleep(timedelta(days=1 if code == OLD else 3))
        saga.step("close", enter, thing, "close")

    @kind("undone")
    def undone(saga: Any, thing: str) -> None:
        """The new code undoes in another way; what is recorded is undone as it was recorded."""
        saga.step("open", enter, thing, "open", undo=undo if code == OLD else undo_better)
        saga.call(act, thing, "charge", undo=undo if code == OLD else undo_better)
        saga.wait_for(GO, match=thing, timeout=PATIENCE)
        raise PermanentError("it was refused", "refused")

    @kind("mismatched")
    def mismatched(saga: Any, thing: str) -> None:
        """The new code has one thing more in the middle, and nobody has thought of the sagas that wait."""
        saga.step("open", enter, thing, "open")
        if code == NEW:
            saga.step("approve", enter, thing, "approve")
        saga.wait_for(GO, match=thing, timeout=PATIENCE)
        saga.step("close", enter, thing, "close")


if "SAGA_CODE" in os.environ:
    app = make(os.environ)
