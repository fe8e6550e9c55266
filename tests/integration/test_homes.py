"""Whose database a caller's session is connected to, where its address does not name it in its path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.engine import URL, make_url
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


@pytest.fixture
def named_as_the_user(database: str, template: str, maintenance_database: Engine) -> Iterator[URL]:
    """A database with the library's tables that has the name of the user: where libpq goes if nothing names one."""
    url = make_url(database)
    with maintenance_database.connect() as connection:
        connection.execute(text(f'CREATE DATABASE "{url.username}" TEMPLATE {template} STRATEGY FILE_COPY'))
    yield url.set(database=url.username)
    with maintenance_database.connect() as connection:
        connection.execute(text(f'DROP DATABASE "{url.username}" WITH (FORCE)'))


@pytest.mark.direct
@pytest.mark.parametrize("by", ["a service", "an engine"])
def test_no_database_is_taken_for_home_because_the_address_names_none(
    bank: Celery, database: str, named_as_the_user: URL, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = make_url(database)
    name, nameless = given.database, given.set(database="")
    if by == "a service":
        (tmp_path / "services").write_text(f"[shop]\ndbname={name}\n")
        monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))
        nameless = nameless.update_query_dict({"service": "shop"})
    else:

        def engine(address: Any, **options: Any) -> Engine:
            return create_engine(make_url(address).set(database=name), **options)

        monkeypatch.setitem(bank.conf, "idempotency_engine", engine)
    bank.conf.idempotency_database_url = nameless.render_as_string(hide_password=False)
    close_runtime(bank)
    mine, other = create_engine(given), create_engine(named_as_the_user)
    with Session(mine) as session, session.begin():
        bank_module.deposit.enqueue(session, account="a")
    with Session(other) as session, pytest.raises(InvalidArguments, match="session: is connected to another database"):
        bank_module.deposit.enqueue(session, account="lost")
    for each in (mine, other):
        each.dispose()
    close_runtime(bank)
