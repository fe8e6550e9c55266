"""The audit's chain: what is changed, deleted or moved in it is found, by whoever it was done."""

from __future__ import annotations

from uuid import uuid4

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, create_engine, make_url, text
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.pool import NullPool

import services
from idempotency.application import close_runtime, settings_of
from idempotency.checks import postgres
from idempotency.checks.findings import Level
from idempotency.operate.change import Change, audit
from idempotency.store import audit as audits
from idempotency.store import roles, schema
from idempotency.store.rights import APPLICATION, OPERATOR, RELAY
from tests.support.commands import Run, runner
from tests.support.operations import at_once
from tests.support.roles import PASSWORDS, url_of


@pytest.fixture
def run(bank: Celery, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(monkeypatch, capsys)


def note(connection: Connection, *reasons: str) -> None:
    for reason in reasons:
        audit(connection, Change("ann", reason), "cancel", None, None, details={"a": 1})


# As who owns the tables would: none of it is the work of a role that an application has.
ATTACKS = {
    "a row is changed": ("UPDATE idempotency.audit SET actor = 'ben' WHERE id = 2", "audit row 2: was changed"),
    "a row is deleted": ("DELETE FROM idempotency.audit WHERE id = 2", "audit row 2: was deleted"),
    "and its place": (
        "DELETE FROM idempotency.audit WHERE id = 2; DELETE FROM idempotency.audit_chain WHERE audit_id = 2",
        "audit row 3: rows before it are gone",
    ),
    "and its number": (
        "DELETE FROM idempotency.audit WHERE id = 2; DELETE FROM idempotency.audit_chain WHERE audit_id = 2;"
        "UPDATE idempotency.audit_chain SET position = 2 WHERE audit_id = 3",
        "audit row 3: was changed",
    ),
    "the first is deleted": (
        "DELETE FROM idempotency.audit WHERE id = 1; DELETE FROM idempotency.audit_chain WHERE audit_id = 1",
        "audit row 2: rows before it are gone",
    ),
    "the last is deleted": (
        "DELETE FROM idempotency.audit WHERE id = 3; DELETE FROM idempotency.audit_chain WHERE audit_id = 3",
        "audit: the last rows are gone",
    ),
    "all are deleted": ("TRUNCATE idempotency.audit, idempotency.audit_chain", "audit: the last rows are gone"),
    "two are exchanged": (
        "UPDATE idempotency.audit_chain SET position = 9 WHERE audit_id = 1;"
        "UPDATE idempotency.audit_chain SET position = 1 WHERE audit_id = 2;"
        "UPDATE idempotency.audit_chain SET position = 2 WHERE audit_id = 1",
        "audit row 2: was changed",
    ),
    "one is added beside the chain": (
        "ALTER TABLE idempotency.audit DISABLE TRIGGER chain;"
        "INSERT INTO idempotency.audit (actor, action) VALUES ('ben', 'cancel')",
        "audit row 4: is not in the chain",
    ),
    "the head is moved": (
        "UPDATE idempotency.audit_head SET hash = sha256('x')",
        "audit: the last rows are gone: the chain ends before its head",
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_was_done_to_the_audit_is_found(run: Run, superuser: Engine, attack: str) -> None:
    statements, found = ATTACKS[attack]
    with superuser.connect() as connection:
        note(connection, "one", "two", "three")
        assert run("audit", "verify", "--json").document["intact"]
        for table in ("audit", "audit_chain"):
            connection.exec_driver_sql(f"ALTER TABLE idempotency.{table} DISABLE TRIGGER append_only")
        for statement in statements.split(";"):
            connection.exec_driver_sql(statement)
    answer = run("audit", "verify")
    assert (answer.status, found in answer.error) == (1, True), answer


def test_a_head_that_was_kept_shows_what_only_the_owner_can_do(run: Run, superuser: Engine) -> None:
    empty = run("audit", "verify", "--json").document["head"]
    with superuser.connect() as connection:
        note(connection, "one", "two")
        kept = run("audit", "verify", "--json").document["head"]
        assert (empty, kept.partition(":")[0]) == ("0:", "2")
        note(connection, "three")
        for head in (empty, kept):
            assert run("audit", "verify", "--expect", head).status == 0
        for table in ("audit", "audit_chain"):
            connection.exec_driver_sql(f"ALTER TABLE idempotency.{table} DISABLE TRIGGER append_only")
        connection.exec_driver_sql("TRUNCATE idempotency.audit, idempotency.audit_chain")
        connection.exec_driver_sql("UPDATE idempotency.audit_head SET position = 0, hash = ''")
        note(connection, "one", "two", "another")  # a chain that fits, and is not the one of before
    answer = run("audit", "verify", "--expect", kept, "--json")
    assert (answer.status, answer.document["intact"]) == (1, False)
    assert f"the head that was kept is not in the chain: {kept}" in answer.error
    assert run("audit", "verify").status == 0
    assert run("audit", "verify", "--expect", "2").status == 2


def test_writers_at_once_make_one_chain_and_what_is_rolled_back_leaves_no_gap(engine: Engine, database: str) -> None:
    own = create_engine(database, poolclass=NullPool)

    def write(number: int) -> None:
        for turn in range(5):
            with own.connect() as connection, connection.begin() as transaction:
                note(connection, f"{number}.{turn}", "again")
                if turn == 2:
                    transaction.rollback()

    at_once(4, write)
    with engine.connect() as connection:
        found = audits.verify(connection)
        assert (found.rows, found.why) == (4 * 4 * 2, None)


def test_a_change_that_goes_on_after_its_audit_row_makes_no_other_wait(database: str) -> None:
    own = create_engine(database, poolclass=NullPool)
    with own.connect() as slow, own.connect() as quick:
        note(slow, "slow")
        quick.exec_driver_sql("SET lock_timeout = '2s'")
        note(quick, "quick")
        quick.commit()
        slow.commit()
        assert audits.verify(slow).why is None


@pytest.mark.long
def test_rows_of_before_are_chained_by_the_migration(servers: services.Services) -> None:
    name = f"chained_{uuid4().hex[:8]}"
    engine = create_engine(servers.create_database(name), poolclass=NullPool)
    schema.migrate(engine, "0014")
    with engine.begin() as connection:
        note(connection, "one", "two")
    schema.migrate(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("SET TimeZone = 'Asia/Kathmandu'")
        note(connection, "three")
    with engine.connect() as connection:
        connection.exec_driver_sql("SET TimeZone = 'America/Caracas'")
        found = audits.verify(connection)
        assert (found.rows, found.why) == (3, None)
    servers.drop_database(name)


@pytest.fixture
def walled(database: str, engine: Engine) -> str:
    roles.create(engine.execution_options(isolation_level="READ COMMITTED"), PASSWORDS)
    with engine.connect() as connection:
        note(connection, "one", "two")
    return database


# Reproduced by a review: with the SQL rights of the application, the audit was emptied.
EMPTYING = [
    "TRUNCATE idempotency.{}",
    "DELETE FROM idempotency.{}",
    "DROP TABLE idempotency.{} CASCADE",
    "ALTER TABLE idempotency.{} DISABLE TRIGGER ALL",
    "ALTER TABLE idempotency.{} DISABLE TRIGGER append_only; DELETE FROM idempotency.{}",
    "DROP TRIGGER append_only ON idempotency.{}",
    "CREATE OR REPLACE FUNCTION idempotency.refuse_change() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
    "CREATE OR REPLACE FUNCTION idempotency.chain_audit() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
    "SET session_replication_role = replica; DELETE FROM idempotency.{}",
    "SET ROLE idempotency_owner; TRUNCATE idempotency.{}",
    "ALTER TABLE idempotency.{} OWNER TO CURRENT_USER",
    "UPDATE idempotency.audit_head SET position = 0, hash = ''",
    "INSERT INTO idempotency.audit_chain VALUES (3, 3, sha256('x'))",
    "ALTER FUNCTION idempotency.chain_audit() SECURITY INVOKER",
]


@pytest.mark.few(1)
@pytest.mark.parametrize("role", [APPLICATION, RELAY, OPERATOR])
def test_no_role_of_an_application_empties_the_audit(walled: str, engine: Engine, role: str) -> None:
    login = create_engine(url_of(role, walled), poolclass=NullPool)
    for statement in EMPTYING:
        for table in ("audit", "audit_chain"):
            with login.connect() as connection, pytest.raises(ProgrammingError):
                connection.exec_driver_sql(statement.format(table, table))
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT count(*) FROM idempotency.audit_chain")).scalar_one()
        assert rows == 2


# The trigger's function runs with the owner's rights: made a trigger of another table, it would chain rows that are no audit.
OF_ANOTHER = """
CREATE TEMP TABLE mine (id bigint, at timestamptz, actor text, action text);
CREATE TRIGGER mine AFTER INSERT ON mine FOR EACH ROW EXECUTE FUNCTION idempotency.chain_audit();
INSERT INTO mine (id, at, actor, action) VALUES (3, now(), 'ann', 'cancel')
"""


@pytest.mark.long
@pytest.mark.parametrize("role", [APPLICATION, RELAY, OPERATOR])
def test_no_role_chains_rows_of_a_table_that_it_has_made(walled: str, superuser: Engine, role: str) -> None:
    login = create_engine(url_of(role, walled), poolclass=NullPool)
    with (
        login.begin() as connection,
        pytest.raises(ProgrammingError, match=r"permission denied for function .*chain_audit"),
    ):
        connection.exec_driver_sql(OF_ANOTHER)
    # nor one who may run every function
    with superuser.begin() as connection, pytest.raises(ProgrammingError, match=r"for idempotency\.audit alone"):
        connection.exec_driver_sql(OF_ANOTHER)
    with superuser.connect() as connection:
        found = audits.verify(connection)
        assert (found.rows, found.why) == (2, None)


def test_an_operators_rows_are_chained_with_the_owners_rights(walled: str) -> None:
    login = create_engine(url_of(OPERATOR, walled), poolclass=NullPool)
    with login.begin() as connection:
        note(connection, "three")
    with login.connect() as connection:
        found = audits.verify(connection)
        assert (found.rows, found.why) == (3, None)


def test_the_doctor_names_a_login_that_could_empty_the_audit(
    configured: Celery, walled: str, superuser: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found() -> list[tuple[Level, str]]:
        close_runtime(configured)
        each = [one for one in postgres.check_database(settings_of(configured)) if one.subject == "database role"]
        return [(one.level, one.found) for one in each]

    here = "; the database listens on this machine"
    owner = make_url(walled).username
    assert found() == [(Level.OK, f"{owner!r} owns the tables{here}")]
    monkeypatch.setattr(postgres, "is_loopback", lambda host: False)
    assert found() == [(Level.WARNING, f"{owner!r} owns the tables")]
    configured.conf.idempotency_database_url = superuser.url.render_as_string(hide_password=False)
    assert found() == [(Level.WARNING, f"{superuser.url.username!r} is a superuser")]
    configured.conf.idempotency_database_url = url_of(APPLICATION, walled)
    assert found() == []


@pytest.mark.parametrize("command", [("saga", "list"), ("show", "a"), ("dead-letters", "list")])
def test_a_command_under_the_applications_role_names_the_role_that_it_needs(
    run: Run, configured: Celery, walled: str, command: tuple[str, ...]
) -> None:
    close_runtime(configured)
    configured.conf.idempotency_database_url = url_of(APPLICATION, walled)
    answer = run(*command)
    assert answer.status == 1
    assert "idempotency_operator" in answer.error
