"""Engines and sessions of the application's own: `idempotency_engine` and `idempotency_session`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
import sqlmodel
from celery import Celery
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError, ProgrammingError
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import NullPool

from idempotency import IdempotentTask, PermanentError, SessionNotYours, SettingsError
from idempotency.application import close_runtime, runtime_of, settings_of
from idempotency.checks.doctor import doctor
from idempotency.checks.findings import Level
from idempotency.relay.relay import Relay
from idempotency.store import overview
from idempotency.upkeep.presence import SignOfLife
from tests.support import bank as b
from tests.support.deliveries import Deliveries
from tests.support.operations import Entries, Record
from tests.support.tasks import ROW, make_task


@pytest.fixture
def changed(configured: Celery) -> Iterator[Celery]:
    close_runtime(configured)
    yield configured
    close_runtime(configured)


# ---------------------------------------------------------------- engines


def test_a_password_that_an_engine_of_the_application_gives_reaches_every_connection(
    changed: Celery, database: str, deliveries: Deliveries, entries: Entries
) -> None:
    """As with the tokens of a cloud provider: the address has no password, and each connection is given a new one."""
    url, given = make_url(database), []

    def engine(address: str, **options: Any) -> Engine:
        made = create_engine(address, **options)

        @event.listens_for(made, "do_connect")
        def _(dialect: Any, record: Any, args: Any, parameters: dict[str, Any]) -> None:
            given.append(parameters.get("options"))
            parameters["password"] = url.password

        return made

    # under a role whose password is asked for
    without = url.set(password="outdated").render_as_string(hide_password=False)
    changed.conf.idempotency_database_url = without
    assert any("database" in str(each) for each in doctor(changed) if each.level is Level.REFUSAL)
    changed.conf.idempotency_engine = engine
    close_runtime(changed)
    assert deliveries.deliver(b.deposit, "a1").state == "SUCCESS"
    runtime_of(changed).heartbeat._renew([])
    assert SignOfLife(changed, "relay", "r1").sign()
    with overview.monitoring_connection(settings_of(changed)) as connection:
        assert overview.take_snapshot(connection, settings_of(changed)).processes
    relay = Relay(changed)
    listener = runtime_of(changed).listen("idempotency_outbox")
    assert listener is not None
    listener.close(), relay.close()
    assert [
        each for each in doctor(changed) if each.subject.startswith("database") and each.level is not Level.OK
    ] == []
    assert entries("a1") == 1
    assert all("synchronous_commit=on" in options for options in given if options)


def test_our_requirements_hold_on_an_engine_of_the_application(changed: Celery, deliveries: Deliveries) -> None:
    changed.conf.idempotency_engine = create_engine
    shown = "SELECT current_setting('lock_timeout'), current_setting('idle_in_transaction_session_timeout')"
    task = make_task(changed, lambda self: list(self.session.execute(text(shown)).one()))
    assert deliveries.deliver(task, key="k").value == ["1min", "10min"]


def connects_itself(address: str, **options: Any) -> Engine:
    made = create_engine(address, **options)

    @event.listens_for(made, "do_connect")
    def _(dialect: Any, record: Any, args: Any, parameters: Any) -> Any:
        return dialect.connect(*args, **parameters)

    return made


def uses_another_driver(address: str, **options: Any) -> Engine:
    return create_engine(make_url(address).set(drivername="postgresql+psycopg2"))


@pytest.mark.parametrize(
    ("engine", "refused"),
    [
        pytest.param(
            connects_itself,
            r"^idempotency_engine: a listener of do_connect has connected itself; change the",
            marks=pytest.mark.direct,
        ),
        (uses_another_driver, r"^idempotency_engine: must return an Engine with the driver psycopg, got Engine\("),
        (lambda *_, **__: None, r"^idempotency_engine: must return an Engine with the driver psycopg, got NoneType$"),
        (lambda address, **_: address, r"^idempotency_engine: must return an Engine with the driver psycopg, got str$"),
        pytest.param(
            lambda address, **_: create_engine(address),
            r"^idempotency_engine: must pass all its arguments on to create_engine; some were lost$",
            marks=pytest.mark.direct,
        ),
    ],
)
def test_an_engine_that_cannot_keep_the_promise_is_refused(changed: Celery, engine: Any, refused: str) -> None:
    changed.conf.idempotency_engine = engine
    with pytest.raises(SettingsError, match=refused), runtime_of(changed).engine.connect():
        pass


def test_a_statement_of_ours_needs_an_engine_that_passes_on_its_mode(changed: Celery) -> None:
    """A claim in a transaction that nobody commits would be no claim."""
    changed.conf.idempotency_engine = lambda address, **options: create_engine(
        address, connect_args=options["connect_args"]
    )
    with pytest.raises(SettingsError, match=r"^idempotency_engine: must pass all"), runtime_of(changed).autocommit():
        pass


def test_an_engine_that_is_made_once_is_refused(changed: Celery, database: str) -> None:
    """The first one's options are not the second one's."""
    made: list[Engine] = []

    def engine(address: str, **options: Any) -> Engine:
        made[:] = made or [create_engine(address, **options)]
        return made[0]

    changed.conf.idempotency_engine = engine
    with pytest.raises(SettingsError, match=r"^idempotency_engine: must return a new Engine each time"):
        runtime_of(changed)


@pytest.fixture
def tenant(engine: Engine) -> Iterator[str]:
    """A role that may write the application's table, and none of ours."""
    role = f"tenant_{uuid4().hex[:8]}"
    with engine.connect() as connection:
        connection.execute(text(f"CREATE ROLE {role}"))
        connection.execute(text(f"GRANT {role} TO CURRENT_USER"))
        connection.execute(text(f"GRANT ALL ON entries, entries_id_seq TO {role}"))
    yield role
    with engine.connect() as connection:
        connection.execute(text(f"DROP OWNED BY {role}"))
        connection.execute(text(f"DROP ROLE {role}"))


def test_a_body_may_take_on_a_role_that_has_no_rights_on_our_tables(
    changed: Celery, deliveries: Deliveries, entries: Entries, tenant: str
) -> None:
    def in_step(session: Any) -> None:
        session.execute(text(f"SET LOCAL ROLE {tenant}"))
        session.execute(ROW)

    def body(self: IdempotentTask) -> None:
        self.step("first", in_step)
        self.session.execute(text("SELECT set_config('role', :role, true)"), {"role": tenant})
        self.session.execute(ROW)

    assert deliveries.deliver(make_task(changed, body), key="k").state == "SUCCESS"
    assert entries("row") == 2


def test_no_attempt_is_used_up_while_the_service_that_gives_passwords_is_away(
    changed: Celery, deliveries: Deliveries, record: Record, caplog: pytest.LogCaptureFixture
) -> None:
    """The same as while Postgres itself is away."""
    away = threading.Event()

    def engine(address: str, **options: Any) -> Engine:
        made = create_engine(address, **options)

        @event.listens_for(made, "do_connect")
        def _(*_: Any) -> None:
            if away.is_set():
                raise RuntimeError("503 from the metadata server")

        return made

    changed.conf.idempotency_engine = engine
    task = make_task(changed, lambda self: self.session.execute(ROW) and None)
    with runtime_of(changed).autocommit():  # claims have their connection; bodies need a new one
        pass
    away.set()
    assert deliveries.deliver(task, key="k").state == "RETRY"
    assert (record("k").status, record("k").attempts) == ("released", 0)
    with pytest.raises(OperationalError, match="idempotency_engine: RuntimeError in front of connecting") as raised:
        runtime_of(changed).engine.connect()
    assert "metadata" not in str(raised.value)
    stop = threading.Event()
    threading.Timer(1.5, stop.set).start()
    Relay(changed).run(stop)
    assert "relay_pass_failed" not in caplog.text


# ---------------------------------------------------------------- sessions


class Audited(Session):
    """An application's session, with a method and an attribute of its own."""

    def __init__(self, *args: Any, author: str = "nobody", **options: Any) -> None:
        super().__init__(*args, **options)
        self.author = author

    def write(self, account: str) -> None:
        self.execute(b.INSERT, {"account": f"{account} by {self.author}", "amount": 1})


def write_step(session: Any) -> None:
    session.write("step")


def test_a_body_works_in_a_session_of_the_application_s_own_class(
    changed: Celery, deliveries: Deliveries, entries: Entries
) -> None:
    def body(self: IdempotentTask) -> None:
        session: Any = self.session
        assert isinstance(session, Audited)
        self.step("first", write_step)
        session.write("body")

    changed.conf.idempotency_session = sessionmaker(class_=Audited, author="alice", autoflush=False)
    assert deliveries.deliver(make_task(changed, body), key="k").state == "SUCCESS"
    assert (entries("step by alice"), entries("body by alice")) == (1, 1)


def test_on_failed_is_told_in_a_session_of_the_application_s_own_class(
    changed: Celery, deliveries: Deliveries, entries: Entries
) -> None:
    def body(self: IdempotentTask) -> None:
        raise PermanentError("no", "no")

    changed.conf.idempotency_session = Audited
    task = make_task(changed, body, on_failed=lambda session, operation, error: session.write("failure"))
    deliveries.deliver(task, key="k")
    assert entries("failure by nobody") == 1


@pytest.mark.few(1)
@pytest.mark.parametrize("end", ["commit", "close", "begin"])
def test_the_attempt_alone_commits_a_session_of_any_class(
    changed: Celery, deliveries: Deliveries, record: Record, entries: Entries, end: str
) -> None:
    def body(self: IdempotentTask) -> None:
        self.session.execute(ROW)
        getattr(self.session, end)()

    changed.conf.idempotency_session = Audited
    assert isinstance(deliveries.deliver(make_task(changed, body), key="k").value, SessionNotYours)
    assert (record("k").error_code, entries("row")) == ("session_not_yours", 0)


def test_a_connection_committed_past_a_session_of_any_class_is_refused(
    changed: Celery, deliveries: Deliveries, entries: Entries
) -> None:
    def body(self: IdempotentTask) -> None:
        self.session.execute(ROW)
        self.session.connection().commit()

    changed.conf.idempotency_session = Audited
    assert isinstance(deliveries.deliver(make_task(changed, body), key="k").value, SessionNotYours)
    assert entries("row") == 0


def test_a_body_may_use_sqlmodel(changed: Celery, deliveries: Deliveries, entries: Entries) -> None:
    def body(self: IdempotentTask) -> int:
        session: Any = self.session
        session.exec(ROW)
        return int(session.exec(sqlmodel.text("SELECT count(*) FROM entries")).scalar_one())

    changed.conf.idempotency_session = "sqlmodel:Session"
    assert deliveries.deliver(make_task(changed, body), key="k").value == 1
    assert entries("row") == 1


class Elsewhere(Session):
    """A session that writes to a connection of its own."""

    def get_bind(self, *args: Any, clause: Any = None, **options: Any) -> Any:
        return self.info["elsewhere"] if clause is not None else super().get_bind(*args, clause=clause, **options)


def test_a_session_that_writes_on_a_second_connection_ends_its_operation(
    changed: Celery, database: str, deliveries: Deliveries, record: Record, entries: Entries
) -> None:
    other = create_engine(database, poolclass=NullPool)
    changed.conf.idempotency_session = sessionmaker(class_=Elsewhere, info={"elsewhere": other})
    task = make_task(changed, lambda self: self.session.execute(ROW) and None)
    assert isinstance(deliveries.deliver(task, key="k").value, SessionNotYours)
    assert (record("k").error_code, entries("row")) == ("session_not_yours", 0)


@pytest.mark.parametrize("statement", ["SELECT 1; COMMIT", "INSERT INTO entries VALUES (DEFAULT, 'x', 1); END"])
def test_a_string_of_several_statements_is_refused_since_one_could_end_the_transaction(
    changed: Celery, deliveries: Deliveries, entries: Entries, statement: str
) -> None:
    def body(self: IdempotentTask) -> None:
        self.session.execute(ROW)
        with pytest.raises(ProgrammingError, match="multiple commands"):
            self.session.connection().exec_driver_sql(statement)
        raise PermanentError("no", "no")

    deliveries.deliver(make_task(changed, body), key="k")
    assert (entries("row"), entries("x")) == (0, 0)


def test_a_body_may_copy(changed: Celery, deliveries: Deliveries, entries: Entries) -> None:
    def body(self: IdempotentTask) -> None:
        driver: Any = self.session.connection().connection.driver_connection
        with driver.cursor() as cursor, cursor.copy("COPY entries (account, amount) FROM STDIN") as copy:
            copy.write_row(("copied", 1))

    assert deliveries.deliver(make_task(changed, body), key="k").state == "SUCCESS"
    assert entries("copied") == 1


@pytest.mark.parametrize(
    "options",
    [{"binds": {Audited: create_engine("postgresql+psycopg://")}}, {"autobegin": False}, {"twophase": True}],
)
def test_a_maker_whose_sessions_could_not_be_committed_is_refused(changed: Celery, options: dict[str, Any]) -> None:
    changed.conf.idempotency_session = sessionmaker(**options)
    with pytest.raises(SettingsError, match=r"^idempotency_session: must "):
        settings_of(changed)


@pytest.mark.parametrize("chosen", [object, "sqlmodel:NoSuchName", "sqlmodel:Field"])
def test_what_makes_no_session_is_refused_by_the_setting_s_name(changed: Celery, chosen: object) -> None:
    changed.conf.idempotency_session = chosen
    with pytest.raises(SettingsError, match=r"^idempotency_session: "):
        settings_of(changed)
