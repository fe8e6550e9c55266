"""Errors of our connections name the constraint, and no value of a row; code that needs the detail finds it in `diag`."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from celery import Celery
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.exc import DBAPIError

from idempotency import PermanentError
from idempotency.application import runtime_of
from idempotency.store.answers import error_text
from idempotency.store.statements import describe, execute, leave_out_values

CANARY = "canary@bank.example"
TABLE = """
CREATE TABLE people (
    email text CONSTRAINT one_person UNIQUE DEFERRABLE, age int NOT NULL CONSTRAINT is_born CHECK (age >= 0),
    parent text CONSTRAINT has_parent REFERENCES people (email));
"""
# a statement, and what its error has to name
WRONG = {
    "unique": ("INSERT INTO people VALUES (:canary, 1), (:canary, 1)", "one_person"),
    "check": ("INSERT INTO people VALUES (:canary, -1)", "is_born"),
    "null": ("INSERT INTO people VALUES (:canary, NULL)", '"age"'),
    "reference": ("INSERT INTO people VALUES ('a', 1, :canary)", "has_parent"),
    "number": ("SELECT CAST(:canary AS int)", "invalid input syntax for type integer"),
    "date": ("SELECT CAST(:canary AS timestamptz)", "invalid input syntax for type timestamp"),
    "json": ("SELECT CAST(:canary AS jsonb)", "invalid input syntax for type json"),
}


@pytest.fixture
def people(bank: Celery, connection: Connection) -> None:
    connection.execute(text(TABLE.replace(" DEFERRABLE", "")))


def by_session(bank: Celery, statement: str) -> None:
    with runtime_of(bank).engine.begin() as connection:
        connection.execute(text(statement), {"canary": CANARY})


def by_our_statements(bank: Celery, statement: str) -> None:
    with runtime_of(bank).autocommit() as connection:
        execute(connection, statement.replace(":canary", "%(canary)s"), {"canary": CANARY})


@pytest.mark.usefixtures("people")
@pytest.mark.parametrize("way", [by_session, by_our_statements])
def test_an_error_of_our_connections_names_the_constraint_and_no_row(
    subtests: Any, bank: Celery, way: Callable[[Celery, str], None]
) -> None:
    for wrong, (statement, named) in WRONG.items():
        with subtests.test(wrong):
            with pytest.raises(DBAPIError) as raised:
                way(bank, statement)
            shown = "".join(traceback.format_exception(raised.value))
            for said in (shown, repr(raised.value), describe(raised.value), error_text("x", str(raised.value))):
                assert CANARY not in said
            assert named in describe(raised.value)
            assert named in str(raised.value)
            if wrong in ("unique", "reference", "check"):
                assert CANARY in raised.value.orig.diag.message_detail  # type: ignore[union-attr]


@pytest.mark.direct
@pytest.mark.usefixtures("people")
def test_an_error_of_another_connection_reaches_celery_without_values(subtests: Any, database: str) -> None:
    engine = create_engine(database)
    for wrong, (statement, named) in WRONG.items():
        with subtests.test(wrong):
            try:
                with engine.begin() as connection:
                    connection.execute(text(statement), {"canary": CANARY})
            except DBAPIError as error:
                wrapped = ValueError(f"cannot note a person: {error}")
                wrapped.__cause__ = error
            assert CANARY in "".join(traceback.format_exception(wrapped))
            leave_out_values(wrapped)
            shown = "".join(traceback.format_exception(wrapped)) + repr(wrapped)
            assert named in shown
            if wrong not in ("number", "date", "json"):  # a text that its author has made of an error about data
                assert CANARY not in shown
            assert CANARY not in str(wrapped.__cause__)
            assert CANARY not in str(PermanentError(str(wrapped.__cause__)))
    engine.dispose()


@pytest.mark.usefixtures("people")
def test_a_statement_that_is_wrong_is_shown_with_what_is_wrong(bank: Celery) -> None:
    with pytest.raises(DBAPIError, match='column "emial" does not exist') as raised:
        by_session(bank, "SELECT emial FROM people")
    assert "HINT:  Perhaps you meant to reference the column" in str(raised.value)
    assert "[SQL: SELECT emial FROM people]" in str(raised.value)
    assert isinstance(raised.value.orig, psycopg.errors.UndefinedColumn)
