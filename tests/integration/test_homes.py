"""Whose database a caller's session is connected to, where its address does not name it in its path."""

from __future__ import annotations

import pytest
from celery import Celery
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.orm import Session

from idempotency.application import close_runtime, runtime_of
from idempotency.errors import InvalidArguments
from tests.support import bank as bank_module


@pytest.mark.direct
def test_a_database_that_is_named_behind_a_question_mark_is_told_from_others(
    bank: Celery, database: str, empty_database: str
) -> None:
    behind = [
        make_url(each).set(database="").update_query_dict({"dbname": str(make_url(each).database)})
        for each in (database, empty_database)
    ]
    bank.conf.idempotency_database_url = behind[0].render_as_string(hide_password=False)
    close_runtime(bank)
    mine, others = map(create_engine, behind)
    with Session(mine) as session, session.begin():
        bank_module.deposit.enqueue(session, account="a")
    with (
        Session(others) as session,
        pytest.raises(InvalidArguments, match="session: is connected to another database"),
    ):
        bank_module.deposit.enqueue(session, account="b")
    with runtime_of(bank).engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM idempotency.outbox")).scalar_one() == 1
    for engine in (mine, others):
        engine.dispose()
