"""What a body leaves in the transaction that a batch shares: nothing that another body gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import BigInteger, Column, Engine, MetaData, NullPool, Table, Text, create_engine, event, insert, text
from sqlalchemy.orm import Session, sessionmaker

from idempotency import IdempotentTask
from idempotency.application import close_runtime
from idempotency.observe import metrics
from tests.integration.conftest import configured as configured
from tests.support.batches import accounts, message, put, run, states, together
from tests.support.tasks import make_task

Body = Callable[..., Any]


def run_batch_of(app: Celery, body: Body, *names: str) -> None:
    """Run a batch of these."""
    task = together(app, body)
    run(app, task, *(message(app, task, name) for name in names))


class Elsewhere(Session):
    """A session that writes to a connection of its own."""

    def get_bind(self, *args: Any, clause: Any = None, **options: Any) -> Any:
        return self.info["elsewhere"] if clause is not None else super().get_bind(*args, clause=clause, **options)


def test_a_session_that_writes_elsewhere_commits_nothing_there(
    configured: Celery, engine: Engine, database: str
) -> None:
    """What it wrote would be committed at the end of its body, and once more by the batch's second run."""
    other = create_engine(database, poolclass=NullPool)
    configured.conf.idempotency_session = sessionmaker(class_=Elsewhere, info={"elsewhere": other})
    close_runtime(configured)

    def body(self: IdempotentTask, account: str) -> None:
        put(self, account)
        if account == "bad":
            raise ValueError("bad")

    run_batch_of(configured, body, "e0", "bad", "e1")
    assert states(engine) == dict.fromkeys(("e0", "bad", "e1"), "failed")
    assert accounts(engine) == {}


def test_no_body_rolls_back_to_a_savepoint_that_another_has_left(bank: Celery, engine: Engine) -> None:
    """e1 raises before its own SAVEPOINT, and its handler goes back to one."""

    def body(self: IdempotentTask, account: str) -> None:
        try:
            if account == "e1":
                raise ValueError("before the savepoint")
            self.session.execute(text("SAVEPOINT mine"))
            put(self, account)
        except ValueError:
            self.session.execute(text("ROLLBACK TO SAVEPOINT mine"))
            put(self, f"{account} refused")

    run_batch_of(bank, body, "e0", "e1")
    assert states(engine) == {"e0": "completed", "e1": "failed"}  # as without a batch
    assert accounts(engine) == {"e0": [1]}


@pytest.mark.parametrize("through", ["connection", "session"])
@pytest.mark.parametrize("beside", [(), ("bad",)])
def test_a_nested_transaction_that_is_left_open_is_undone_by_no_other(
    bank: Celery, engine: Engine, through: str, beside: tuple[str, ...]
) -> None:
    def body(self: IdempotentTask, account: str) -> None:
        if account == "bad":
            raise ValueError("bad")
        if account == "e0":
            nested = self.session.connection() if through == "connection" else self.session
            nested.begin_nested()
            put(self, account)
        else:
            put(self, account, 7)
            self.session.rollback()
            put(self, account)

    run_batch_of(bank, body, "e0", *beside, "e1")
    assert states(engine) == {"e0": "completed", "e1": "completed"} | dict.fromkeys(beside, "failed")
    assert accounts(engine) == {"e0": [1], "e1": [1]}


def test_savepoints_of_sqlalchemy_share_the_transaction(bank: Celery, engine: Engine) -> None:
    entered: list[str] = []

    def body(self: IdempotentTask, account: str) -> None:
        entered.append(account)
        with self.session.begin_nested():
            put(self, account)
        nested = self.session.begin_nested()
        put(self, account, 7)
        nested.rollback()

    run_batch_of(bank, body, "e0", "e1", "e2")
    assert entered == ["e0", "e1", "e2"]
    assert accounts(engine) == {"e0": [1], "e1": [1], "e2": [1]}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "scratch",
    [
        "CREATE TEMP TABLE IF NOT EXISTS scratch (amount int) ON COMMIT DROP",
        "CREATE LOCAL TEMPORARY TABLE IF NOT EXISTS scratch (amount int) ON COMMIT DELETE ROWS",
        "CREATE /* rows of one order, which are gone as soon as it commits */ TEMP TABLE IF NOT EXISTS scratch (amount int) "
        "ON COMMIT DROP",
        "CREATE TABLE IF NOT EXISTS pg_temp.scratch (amount int)",
    ],
)
def test_a_temporary_table_has_the_rows_of_one(bank: Celery, engine: Engine, scratch: str) -> None:
    def body(self: IdempotentTask, account: str) -> None:
        self.session.execute(text(scratch))
        if "pg_temp" in scratch:
            self.session.execute(text("TRUNCATE scratch"))  # which lives as long as the connection
        self.session.execute(text("INSERT INTO scratch VALUES (10)"))
        put(self, account, self.session.execute(text("SELECT sum(amount) FROM scratch")).scalar_one())

    run_batch_of(bank, body, "e0", "e1", "e2")
    assert accounts(engine) == {"e0": [10], "e1": [10], "e2": [10]}
    assert set(states(engine).values()) == {"completed"}


BALANCE = """
CREATE TABLE balances (total int);
INSERT INTO balances VALUES (0);
CREATE TABLE credits (amount int);
CREATE FUNCTION credited() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    UPDATE balances SET total = total + NEW.amount; RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER credited AFTER INSERT ON credits DEFERRABLE INITIALLY {initially}
    FOR EACH ROW EXECUTE FUNCTION credited();
"""


@pytest.mark.parametrize("beside", [(), ("bad",)])
@pytest.mark.parametrize(("initially", "read"), [("IMMEDIATE", [1, 2, 3]), ("DEFERRED", [0, 0, 0])])
def test_constraints_are_as_deferred_as_without_one_that_fails(
    bank: Celery, engine: Engine, initially: str, read: list[int], beside: tuple[str, ...]
) -> None:
    with engine.connect() as connection:
        connection.exec_driver_sql(BALANCE.format(initially=initially))

    def body(self: IdempotentTask, account: str) -> None:
        self.session.execute(text("INSERT INTO credits VALUES (1)"))
        total = int(self.session.execute(text("SELECT total FROM balances")).scalar_one())
        if account == "bad":
            raise ValueError("bad")
        put(self, account, total)

    run_batch_of(bank, body, "e0", *beside, "e1", "e2")
    assert states(engine) == dict.fromkeys(("e0", "e1", "e2"), "completed") | dict.fromkeys(beside, "failed")
    assert accounts(engine) == {f"e{place}": [total] for place, total in enumerate(read)}
    with engine.connect() as connection:
        assert connection.execute(text("SELECT total FROM balances")).scalar_one() == 3  # each trigger has fired once


ENTRIES = Table("entries", MetaData(), Column("account", Text), Column("amount", BigInteger))
OTHER = "CREATE SCHEMA other; CREATE TABLE other.entries (LIKE public.entries INCLUDING ALL)"


def elsewhere(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(text("SELECT account FROM other.entries ORDER BY account")).scalars())


@pytest.mark.parametrize("of", [("e0",), ("e0", "e1"), ("e2",)])
@pytest.mark.parametrize("how", ["options", "settings"])
def test_where_one_body_writes_no_other_does(bank: Celery, engine: Engine, of: tuple[str, ...], how: str) -> None:
    """By SQLAlchemy's `schema_translate_map`, as for a customer's own schema, or by an UPDATE that is a SET."""
    with engine.connect() as connection:
        connection.exec_driver_sql(OTHER)

    def body(self: IdempotentTask, account: str) -> None:
        if account in of and how == "options":
            self.session.connection(execution_options={"schema_translate_map": {None: "other"}})
        elif account in of:
            self.session.execute(text("UPDATE pg_settings SET setting = 'other' WHERE name = 'search_path'"))
        self.session.execute(insert(ENTRIES), {"account": account, "amount": 1})

    names = ("e0", "e1", "e2", "e3")
    run_batch_of(bank, body, *names)
    assert states(engine) == dict.fromkeys(names, "completed")
    assert elsewhere(engine) == list(of)
    assert accounts(engine) == {name: [1] for name in names if name not in of}


class Shop(Session):
    """An application's own class of sessions, which acts once its outermost transaction has ended."""


@pytest.fixture
def shop(configured: Celery, request: pytest.FixtureRequest) -> Callable[[Any], Celery]:
    """The application with sessions of this class or maker."""

    def made(sessions: Any) -> Celery:
        configured.conf.idempotency_session = sessions
        close_runtime(configured)
        request.addfinalizer(lambda: close_runtime(configured))
        return configured

    return made


def test_who_listens_for_the_end_of_a_transaction_is_told_of_the_real_one(
    shop: Callable[[Any], Celery], engine: Engine, request: pytest.FixtureRequest
) -> None:
    told: list[tuple[str, bool]] = []

    def ended(session: Session, transaction: Any) -> None:
        if transaction.parent is None and (account := session.info.get("account")):
            told.append((account, account in accounts(engine)))

    def body(self: IdempotentTask, account: str) -> None:
        self.session.info["account"] = account
        put(self, account)

    event.listen(Shop, "after_transaction_end", ended)
    request.addfinalizer(lambda: event.remove(Shop, "after_transaction_end", ended))
    run_batch_of(shop(Shop), body, "e0", "e1")
    assert told == [("e0", True), ("e1", True)]


@pytest.mark.parametrize("beside", [(), ("bad",)])
def test_a_class_that_acts_in_its_commit_does_so_after_the_real_one_and_once(
    shop: Callable[[Any], Celery], engine: Engine, beside: tuple[str, ...]
) -> None:
    told: list[tuple[str, bool]] = []

    class Publishing(Session):
        def commit(self) -> None:
            super().commit()
            told.append((self.info["account"], self.info["account"] in accounts(engine)))

    def body(self: IdempotentTask, account: str) -> None:
        self.session.info["account"] = account
        put(self, account)
        if account == "bad":
            raise ValueError("bad")

    run_batch_of(shop(Publishing), body, "e0", *beside, "e1")
    assert [each for each in told if each[0] != "bad"] == [("e0", True), ("e1", True)]


def test_options_that_all_sessions_have_keep_none_from_its_batch(shop: Callable[[Any], Celery], engine: Engine) -> None:
    entered: list[str] = []

    def body(self: IdempotentTask, account: str) -> None:
        entered.append(account)
        put(self, account)

    run_batch_of(shop(sessionmaker(execution_options={"logging_token": "shop"})), body, "e0", "e1", "e2")
    assert entered == ["e0", "e1", "e2"]
    assert states(engine) == dict.fromkeys(("e0", "e1", "e2"), "completed")


@pytest.mark.parametrize("how", ["reset", "close"])
def test_what_a_body_has_undone_by_ending_its_transaction_is_undone(bank: Celery, engine: Engine, how: str) -> None:
    def body(self: IdempotentTask, account: str) -> None:
        put(self, account, 7)
        if how == "reset":
            self.session.reset()
        else:
            transaction: Any = self.session.get_transaction()
            transaction.close()
        put(self, account)

    run_batch_of(bank, body, "e0", "e1")
    assert accounts(engine) == {"e0": [1], "e1": [1]}


@pytest.mark.parametrize("beside", [(), ("bad",)])
def test_options_set_before_the_commit_are_no_others(bank: Celery, engine: Engine, beside: tuple[str, ...]) -> None:
    with engine.connect() as connection:
        connection.exec_driver_sql(OTHER)

    def audit(session: Session) -> None:
        session.connection().execution_options(schema_translate_map={None: "other"})

    def body(self: IdempotentTask, account: str) -> None:
        if account == "bad":
            raise ValueError("bad")
        if account == "e0":
            event.listen(self.session, "before_commit", audit)
        self.session.execute(insert(ENTRIES), {"account": account, "amount": 1})

    run_batch_of(bank, body, *beside, "e0", "e1", "e2")
    assert (elsewhere(engine), accounts(engine)) == ([], {"e0": [1], "e1": [1], "e2": [1]})


def test_a_cursor_that_is_left_open_is_read_on_by_no_other(bank: Celery, engine: Engine) -> None:
    def body(self: IdempotentTask, account: str) -> None:
        if not self.session.execute(text("SELECT count(*) FROM pg_cursors WHERE name = 'due'")).scalar_one():
            self.session.execute(text("DECLARE due CURSOR FOR SELECT * FROM generate_series(1, 3)"))
        put(self, account, sum(self.session.execute(text("FETCH ALL FROM due")).scalars()))

    run_batch_of(bank, body, "e0", "e1")
    assert accounts(engine) == {"e0": [6], "e1": [6]}


def test_a_table_of_a_name_that_looks_like_more_is_written_together(bank: Celery, engine: Engine) -> None:
    entered: list[str] = []
    with engine.connect() as connection:
        connection.exec_driver_sql("CREATE TABLE temp (account text)")

    def body(self: IdempotentTask, account: str) -> None:
        entered.append(account)
        self.session.execute(text("INSERT INTO temp VALUES (:account)"), {"account": account})

    run_batch_of(bank, body, "e0", "e1")
    assert entered == ["e0", "e1"]


def test_many_comments_before_a_statement_take_no_time(bank: Celery, engine: Engine) -> None:
    """Each of them once doubled it: a hundred would not end."""

    def body(self: IdempotentTask, account: str) -> None:
        self.session.execute(text("/* Postings of an order. */\n" * 100 + "SELECT 1"))
        put(self, account)

    run_batch_of(bank, body, "e0", "e1")
    assert accounts(engine) == {"e0": [1], "e1": [1]}


def counted_batches() -> dict[tuple[str, str], float]:
    return {
        (sample.labels["task"], sample.labels["ran"]): sample.value
        for metric in metrics.batches.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    }


def test_batches_are_counted_by_how_they_ran(bank: Celery, engine: Engine) -> None:
    def body(self: IdempotentTask, account: str) -> None:
        if account == "bad":
            raise ValueError("bad")
        if account == "options":
            self.session.connection(execution_options={"logging_token": account})
        put(self, account)

    def body_of_each(self: IdempotentTask, account: str) -> None:
        put(self, account)

    task = together(bank, body)
    each = make_task(bank, body_of_each, key="{account}", batch=10, batch_commit="each")
    before = counted_batches()  # a task of another test may have had the same name
    for of, names in (
        (task, ["e0", "e1"]),
        (task, ["e2", "bad", "e3"]),
        (task, ["e4", "options"]),
        (each, ["e0"]),
    ):
        run(bank, of, *(message(bank, of, name) for name in names))
    ran = {name: count - before.get(name, 0) for name, count in counted_batches().items()}
    assert {name: ran.get((task.name, name), 0) for name in ("together", "again", "alone", "each")} == {
        "together": 1,
        "again": 1,
        "alone": 1,
        "each": 0,
    }
    assert ran[each.name, "each"] == 1
