"""Errors of the ORM: what Postgres quotes of data is in none."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
from celery import Celery
from django.db import DatabaseError, connection

from idempotency.store.statements import leave_out_values
from tests.django.conftest import make_task
from tests.support.deliveries import Deliveries

CANARY = "canary@bank.example"
# a statement, and what its error has to say; Django puts the value into it
WRONG = {
    "number": ("SELECT CAST(%s AS int)", "invalid input syntax for type integer"),
    "operator": ("SELECT 1 WHERE CAST(%s AS text) = 1", "operator does not exist"),
    "constraint": (
        "INSERT INTO ledger_entry (id, account) VALUES (1, %s), (1, 'b')",
        "ledger_entry",
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("wrong", WRONG)
def test_an_error_of_the_orm_about_data_quotes_no_row(app: Celery, deliveries: Deliveries, wrong: str) -> None:
    statement, named = WRONG[wrong]
    caught = []

    def body(self: Any) -> None:
        try:
            with connection.cursor() as cursor:
                cursor.execute(statement, [CANARY])
        except DatabaseError as error:
            caught.append(str(error))
            raise

    outcome = deliveries.deliver(make_task(app, body), key="k")
    assert outcome.state == "RETRY"
    for said in (repr(outcome.value), *caught):
        assert CANARY not in said
        assert named in said


@pytest.mark.parametrize("wrong", WRONG)
def test_an_error_of_a_connection_of_djangos_own_loses_its_values_on_the_way_to_celery(app: Celery, wrong: str) -> None:
    statement, named = WRONG[wrong]
    with pytest.raises(DatabaseError) as raised, connection.cursor() as cursor:
        cursor.execute(statement, [CANARY])
    assert CANARY in str(raised.value)
    again = ValueError("no answer")
    again.__cause__ = raised.value
    leave_out_values(again)
    shown = "".join(traceback.format_exception(again)) + repr(raised.value)
    assert CANARY not in shown
    assert named in str(raised.value)
