"""Tasks that a test makes for itself, and the parts that their bodies are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import Celery
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session

from idempotency import Handle, IdempotentTask, Operation, OperationId, PermanentError
from tests.support.bank import INSERT

ROW = text("INSERT INTO entries (account, amount) VALUES ('row', 1)")
# What `on_failed` was told in this test: the code, and the operation. A fixture empties it before each test.
told: list[tuple[str, Operation]] = []


def make_task(app: Celery, body: Callable[..., Any], **options: Any) -> Any:
    """A task with this body, known to the application for this test only."""
    body.__name__ = "body"
    name = f"test.{id(body)}"
    app.tasks.pop(name, None)
    return app.task(base=IdempotentTask, bind=True, name=name, shared=False, **options)(body)


def accept(engine: Engine, task: Any, *arguments: Any) -> OperationId:
    """Accept an operation of key `a`, as an application does."""
    with Session(transactional(engine)) as session, session.begin():
        task.enqueue(session, *arguments)
    return OperationId("default", task.name, "a")


def transactional(engine: Engine) -> Engine:
    """The tests' own engine, whose connections commit each statement, with transactions."""
    return engine.execution_options(isolation_level="READ COMMITTED")


def enqueued(connection: Connection, task: Any, *arguments: Any, **options: Any) -> Handle:
    """Enqueue in a transaction that is committed at once."""
    with transactional(connection.engine).begin() as own:
        handle: Handle = task.enqueue(own, *arguments, **options)
    return handle


def on_failed(session: Session, operation: Operation, error: PermanentError) -> None:
    told.append((error.code, operation))


def told_codes() -> list[str]:
    return [code for code, _ in told]


# ---------------------------------------------------------------- steps and their undos


def write(session: Session, account: str) -> str:
    session.execute(INSERT, {"account": account, "amount": 1})
    return account


def unwrite(session: Session, account: str) -> None:
    """Undo `write`; the order of undos can be read off the rows it leaves."""
    session.execute(text("DELETE FROM entries WHERE account = :account"), {"account": account})
    session.execute(INSERT, {"account": f"undone {account}", "amount": 1})


def unwrite_with_effects(session: Session, account: str, effects: dict[str, Any]) -> None:
    unwrite(session, account)
    session.execute(INSERT, {"account": f"reversed {effects['call']['charge']}", "amount": 1})


def pay(self: Any) -> str:
    """A body that writes one row."""
    self.session.execute(INSERT, {"account": "paid", "amount": 1})
    return "paid"


# ---------------------------------------------------------------- effects


class Provider:
    """Acts when it is called; what it answers is scripted, an exception is raised after it has acted (or not)."""

    def __init__(self, *script: Exception | None, acts: bool = True) -> None:
        self.script = list(script)
        self.acts = acts
        self.keys: list[str] = []

    def __call__(self, *, idempotency_key: str) -> dict[str, Any]:
        if self.acts:
            self.keys.append(idempotency_key)
        if self.script and (error := self.script.pop(0)) is not None:
            raise error
        return {"charge": "ch_1"}


def lost() -> Exception:
    return ConnectionError("the reply was lost")
