"""The library's connections to Postgres: lost answers, what a body leaves on them, and outages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from celery import Celery
from psycopg import sql
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from idempotency import IdempotentTask, PermanentError, SessionNotYours
from idempotency.application import close_runtime, runtime_of
from idempotency.attempt.heartbeat import Holding
from idempotency.attempt.runtime import Runtime
from idempotency.store import operations
from idempotency.wire.keys import OperationId
from services.postgres import Postgres, create_database
from tests.support import bank as app_module
from tests.support import operations as op
from tests.support.deliveries import Deliveries
from tests.support.operations import Entries
from tests.support.processes import eventually
from tests.support.proxy import Proxy
from tests.support.tasks import ROW, make_task

# ---------------------------------------------------------------- what a body leaves behind

# Runs in the middle of COMMIT, and says under which settings.
WITNESS = """
CREATE FUNCTION witness() RETURNS trigger LANGUAGE plpgsql AS
    $$BEGIN INSERT INTO failures (account) VALUES (current_setting('synchronous_commit')); RETURN NULL; END$$;
CREATE CONSTRAINT TRIGGER witness AFTER INSERT ON entries DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION witness();
"""
# What is deferred in the rows of on_failed is looked at before COMMIT; the letter's is not.
ON_LETTERS = WITNESS.replace(" ON entries", " ON idempotency.dead_letters")


@pytest.mark.parametrize("scope", ["LOCAL", "SESSION"])
@pytest.mark.parametrize("end", ["finish", "step", "failure"])
def test_no_end_takes_over_what_the_body_has_set(
    bank: Celery, deliveries: Deliveries, engine: Engine, scope: str, end: str
) -> None:
    with engine.connect() as connection:
        connection.execute(text(ON_LETTERS if end == "failure" else WITNESS))

    def weaken(session: Session) -> None:
        session.execute(text(f"SET {scope} synchronous_commit = off"))
        session.execute(ROW)

    def body(self: IdempotentTask) -> None:
        if end == "step":
            self.step("one", weaken)
        elif end == "finish":
            weaken(self.session)
        else:
            raise ValueError

    on_failed = (lambda session, operation, error: weaken(session)) if end == "failure" else None
    deliveries.deliver(make_task(bank, body, on_failed=on_failed, max_attempts=1), key="k")
    with engine.connect() as connection:
        assert connection.execute(text("SELECT account FROM failures")).scalars().all() == ["on"]


@pytest.mark.direct
def test_an_attempt_finds_nothing_that_an_earlier_one_has_set(bank: Celery, deliveries: Deliveries) -> None:
    shown = text("""
        SELECT pg_backend_pid(), current_user, current_setting('synchronous_commit'), current_setting('search_path'),
               current_setting('lock_timeout'), current_setting('idle_in_transaction_session_timeout')
    """)

    def body(self: IdempotentTask, spoil: bool = False) -> Any:
        seen = list(self.session.execute(shown).one())
        if spoil:
            for each in (
                "synchronous_commit = off",
                "search_path = 'elsewhere'",
                "lock_timeout = 0",
                "idle_in_transaction_session_timeout = 0",
                "ROLE pg_monitor",
            ):
                self.session.execute(text(f"SET SESSION {each}"))
            self.session.execute(text("RESET ROLE; SET SESSION AUTHORIZATION pg_monitor; RESET SESSION AUTHORIZATION"))
        return seen

    task = make_task(bank, body)
    before = deliveries.deliver(task, key="before").value
    deliveries.deliver(task, spoil=True, key="spoils")
    assert deliveries.deliver(task, key="after").value == before


@pytest.mark.parametrize(
    ("default", "value", "shown"),
    [
        ("default_transaction_isolation", "serializable", "transaction_isolation"),
        ("default_transaction_read_only", "on", "transaction_read_only"),
        ("default_transaction_deferrable", "on", "transaction_deferrable"),
    ],
)
def test_no_transaction_begins_by_the_defaults_of_an_earlier_body(
    bank: Celery, deliveries: Deliveries, default: str, value: str, shown: str
) -> None:
    def body(self: IdempotentTask, spoil: bool = False) -> list[Any]:
        seen = [
            self.session.execute(text(query)).scalar_one() for query in ("SELECT pg_backend_pid()", f"SHOW {shown}")
        ]
        if spoil:
            self.session.execute(text(f"SET {default} = '{value}'"))
        return seen

    task = make_task(bank, body)
    before = deliveries.deliver(task, key="before").value
    deliveries.deliver(task, spoil=True, key="spoils")
    assert deliveries.deliver(task, key="after").value == before


def test_a_connection_on_which_nothing_can_begin_any_more_is_replaced(bank: Celery, deliveries: Deliveries) -> None:
    def body(self: IdempotentTask, spoil: bool = False) -> int:
        pid: int = self.session.execute(text("SELECT pg_backend_pid()")).scalar_one()
        if spoil:  # which ends the body's own transaction at once, and would end each later one's beginning
            self.session.connection().connection.driver_connection.begin = _cannot  # type: ignore[union-attr]
        return pid

    task = make_task(bank, body)
    before = deliveries.deliver(task, spoil=True, key="spoils").value
    assert deliveries.deliver(task, key="after").value not in (None, before)


def _cannot() -> None:
    raise psycopg.errors.QueryCanceled("canceling statement due to statement timeout")


@pytest.mark.parametrize("way", ["text", "streamed", "bytes", "composed"])
def test_an_end_is_written_whatever_role_a_body_has_taken_on(bank: Celery, deliveries: Deliveries, way: str) -> None:
    def body(self: IdempotentTask) -> None:
        take = "SELECT set_config('role', 'pg_monitor', true)"
        driver: Any = self.session.connection().connection
        match way:
            case "text":
                self.session.execute(text(take))
            case "streamed":
                self.session.execute(text(take), execution_options={"stream_results": True}).all()
            case "bytes":
                driver.cursor().execute(take.encode())
            case "composed":
                driver.cursor().execute(sql.SQL(take))

    assert deliveries.deliver(make_task(bank, body), key="k").state == "SUCCESS"


@pytest.mark.parametrize("way", ["copy", "stream", "session", "prepared"])
def test_a_body_commits_in_no_way(bank: Celery, deliveries: Deliveries, entries: Entries, way: str) -> None:
    def body(self: IdempotentTask) -> None:
        self.session.execute(ROW)
        cursor: Any = self.session.connection().connection.cursor()
        with suppress(SessionNotYours):
            match way:
                case "copy":
                    with cursor.copy("COMMIT"):
                        pass
                case "stream":
                    list(cursor.stream("COMMIT"))
                case "session":
                    self.session.execute(text("; COMMIT"))
                case "prepared":
                    cursor.execute("COMMIT", prepare=True)
        self.session.execute(ROW)
        raise PermanentError("no", "no")

    deliveries.deliver(make_task(bank, body), key="k")
    assert entries("row") == 0


@pytest.mark.parametrize("when", ["in use", "idle"])
def test_a_connection_whose_server_has_gone_is_replaced_in_silence(
    bank: Celery, engine: Engine, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    def terminate() -> None:
        with engine.connect() as other:
            other.execute(text("SELECT pg_terminate_backend(:pid, 5000)"), {"pid": gone})

    runtime = runtime_of(bank)
    with runtime.engine.connect() as connection:
        gone = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
        if when == "in use":
            connection.commit()
            terminate()
    if when == "idle":
        terminate()
    with runtime.engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one() != gone
    assert caplog.text == ""


def test_another_connection_of_the_attempts_engine_may_commit_each_statement(
    bank: Celery, deliveries: Deliveries, engine: Engine
) -> None:
    def body(self: IdempotentTask) -> int:
        self.session.execute(ROW)
        with self.session.get_bind().connect().execution_options(isolation_level="AUTOCOMMIT") as other:
            other.execute(text("INSERT INTO entries (account, amount) VALUES ('beside', 1)"))
        raise PermanentError("no", "no")

    task = make_task(bank, body)
    for key in ("opened", "taken from the pool"):
        deliveries.deliver(task, key=key)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT account FROM entries")).scalars().all() == ["beside", "beside"]


# ---------------------------------------------------------------- commits that a standby has not confirmed


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    """A Postgres whose synchronous standby is away, and whose waiting commits are cancelled: each ends in a WARNING."""
    server = Postgres(tmp_path_factory.mktemp("postgres") / "own")
    server.start()
    yield server
    server.discard()


@pytest.fixture
def unconfirmed(alone: Postgres, bank: Celery, environment: dict[str, str]) -> Iterator[Celery]:
    url = create_database(alone.url, f"alone_{uuid4().hex[:8]}")
    app_module.prepare(url)
    close_runtime(bank)
    app_module.configure(environment | {"DATABASE_URL": url})
    admin = create_engine(
        alone.superuser_url(), isolation_level="AUTOCOMMIT", connect_args={"options": "-c synchronous_commit=local"}
    )
    stop = threading.Event()

    def cancel() -> None:
        with admin.connect() as connection:
            while not stop.wait(0.01):
                connection.execute(
                    text("SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'")
                )

    def standby(name: str) -> None:
        with admin.connect() as connection:
            connection.execute(text(f"ALTER SYSTEM SET synchronous_standby_names = '{name}'"))
            connection.execute(text("SELECT pg_reload_conf()"))
        eventually(lambda: warned() == bool(name), what="Postgres asks its standby")

    def warned() -> bool:
        """Whether a commit waits for the standby: the checkpointer decides that, some time after the reload."""
        notices: list[object] = []
        with psycopg.connect(make_url(url).set(drivername="postgresql").render_as_string(False)) as connection:
            connection.add_notice_handler(notices.append)
            connection.execute("SELECT pg_logical_emit_message(true, 'a', 'b')")
            connection.commit()
        return bool(notices)

    thread = threading.Thread(target=cancel)
    thread.start()
    bank.standby = standby
    yield bank
    standby("")
    stop.set()
    thread.join()
    admin.dispose()
    close_runtime(bank)


WAYS: dict[str, Callable[[Runtime], None]] = {}


def way(commit: Callable[[Runtime], None]) -> Callable[[Runtime], None]:
    WAYS[commit.__name__] = commit
    return commit


@way
def a_claim(runtime: Runtime) -> None:
    with runtime.autocommit() as connection:
        op.started(connection)


@way
def a_count(runtime: Runtime) -> None:
    with runtime.autocommit() as connection:
        connection.exec_driver_sql("UPDATE idempotency.records SET duplicates = duplicates + 1")


@way
def a_person_s_change(runtime: Runtime) -> None:
    with runtime.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE idempotency.records SET duplicates = duplicates + 1")


@pytest.mark.few(1)
@pytest.mark.parametrize("commit", WAYS.values(), ids=WAYS.keys())
def test_a_commit_unconfirmed_by_a_synchronous_standby_is_not_believed(
    unconfirmed: Celery, commit: Callable[[Runtime], None]
) -> None:
    runtime = runtime_of(unconfirmed)
    with runtime.autocommit() as connection:
        op.started(connection)
    commit(runtime)
    unconfirmed.standby("away")
    with pytest.raises(OperationalError, match="not confirmed by a synchronous standby"):
        commit(runtime)
    unconfirmed.standby("")
    commit(runtime)


# ---------------------------------------------------------------- the heartbeat


@pytest.fixture
def proxied(environment: dict[str, str], database: str, bank: Celery) -> Iterator[Proxy]:
    url = make_url(database)
    assert url.host is not None
    assert url.port is not None
    proxy = Proxy(url.host, url.port)
    through = url.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
    app_module.configure(environment | {"DATABASE_URL": through, "LEASE": "2"})
    yield proxy
    close_runtime(bank)
    proxy.close()


@pytest.fixture
def held(bank: Celery) -> Iterator[Holding]:
    """Held by this process, and renewed only when the test says so."""
    runtime = runtime_of(bank)
    with runtime.autocommit() as connection:
        holding = Holding(op.started(connection, lease=2.0), op.FINGERPRINT, 2.0)
    runtime.heartbeat._holdings[holding.claim.token] = holding
    yield holding
    runtime.heartbeat.drop(holding.claim.token)


def test_the_heartbeat_keeps_its_connection(bank: Celery, held: Holding) -> None:
    runtime, opened = runtime_of(bank), []
    event.listen(runtime._heartbeat_engine, "connect", lambda *_: opened.append(1))
    for _ in range(3):
        before = held.renewed_at
        runtime.heartbeat.run_once()
        assert held.renewed_at > before
    assert len(opened) == 1


@pytest.mark.parametrize("direction", ["requests", "replies"])
def test_a_heartbeat_without_answers_renews_over_another_connection(
    bank: Celery, proxied: Proxy, direction: str, request: pytest.FixtureRequest
) -> None:
    held: Holding = request.getfixturevalue("held")
    heartbeat = runtime_of(bank).heartbeat
    heartbeat.run_once()
    begun = held.renewed_at
    proxied.black_hole(direction)  # type: ignore[arg-type]
    heartbeat.run_once()
    assert held.renewed_at == begun
    proxied.black_hole(None)
    assert proxied.swallowed > 0
    heartbeat.run_once()
    assert not held.lost
    assert begun < held.renewed_at < begun + 2.0


def test_a_claim_whose_answer_never_arrives_counts_as_lost(bank: Celery, proxied: Proxy) -> None:
    runtime = runtime_of(bank)
    with runtime.autocommit() as connection:
        driver: Any = connection.connection.driver_connection
        driver.patience = 0.2
        proxied.black_hole("replies")
        with pytest.raises(OperationalError, match=r"no answer within 0\.2 s"):
            op.started(connection)
        assert driver.closed


@pytest.mark.direct
def test_attempts_without_a_pooler_prepare_their_statements(bank: Celery, deliveries: Deliveries) -> None:
    for number in range(12):
        deliveries.deliver(app_module.deposit, str(number))
    with runtime_of(bank).autocommit() as connection:
        prepared = connection.exec_driver_sql("SELECT statement FROM pg_prepared_statements").scalars().all()
    assert any("INSERT INTO idempotency.records" in statement for statement in prepared)


def test_a_callers_transaction_that_is_interrupted_in_a_statement_of_ours_ends_with_the_interrupt(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ctrl-C does between sending the statement and waiting for its answer, which stays on the wire."""
    callers = create_engine(engine.url)

    def interrupted(generator: Any, *_: Any, **__: Any) -> None:
        monkeypatch.undo()
        next(generator)
        raise KeyboardInterrupt

    def look_up(*, interrupt: bool) -> object:
        with Session(callers) as session, session.begin():
            session.execute(text("SELECT 1"))
            driver: Any = session.connection().connection.driver_connection
            if interrupt:
                monkeypatch.setattr(driver, "wait", interrupted)
            return operations.lookup(session.connection(), OperationId("default", "a", "b"), "bank")

    with pytest.raises(KeyboardInterrupt):
        look_up(interrupt=True)
    assert look_up(interrupt=False) is None
    callers.dispose()


def test_statements_of_our_own_are_never_compiled(bank: Celery, engine: Engine) -> None:
    """A plan that has to use what is off has an enormous cost, for which a Postgres with LLVM would compile it."""
    with engine.connect() as connection:
        connection.execute(text(f"ALTER DATABASE {engine.url.database} SET jit = on"))
    close_runtime(bank)
    with runtime_of(bank).engine.connect() as connection:
        assert connection.exec_driver_sql("SHOW jit").scalar_one() == "on"  # of bodies, as the database has it
    with runtime_of(bank).autocommit("default") as connection:
        assert connection.exec_driver_sql("SHOW jit").scalar_one() == "off"
