"""The rights of the role that workers run as: the page that lists the grants, and the check that names what is missing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.pool import NullPool

from idempotency.application import close_runtime, settings_of
from idempotency.checks.findings import Level
from idempotency.checks.postgres import _tables, check_database
from idempotency.relay.relay import Relay
from idempotency.settings import Settings
from idempotency.store.rights import FOR_PEOPLE
from tests.support import bank as b
from tests.support.deliveries import Deliveries
from tests.support.tasks import enqueued

PAGE = Path(__file__).parents[2] / "docs" / "rights.md"
# Every right of the page's table, by the kind and name of its object. Other tables, functions and sequences are found.
EXCEPT = {
    "schema_version": ["SELECT"],
    "audit": ["SELECT", "INSERT"],
    "audit_chain": ["SELECT"],
    "audit_head": ["SELECT"],
    "operators": ["SELECT", "DELETE"],
}
OBJECTS = text("""
SELECT 'TABLE' AS kind, relname::text AS name, relname::text AS shown
FROM pg_class WHERE relnamespace = 'idempotency'::regnamespace AND relkind IN ('r', 'p')
UNION ALL SELECT 'SEQUENCE', relname, relname FROM pg_class c
WHERE relnamespace = 'idempotency'::regnamespace AND relkind = 'S'
  AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.objid = c.oid AND d.deptype = 'i')
UNION ALL SELECT 'FUNCTION', oid::regprocedure::text, proname FROM pg_proc
WHERE pronamespace = 'idempotency'::regnamespace AND prorettype <> 'trigger'::regtype
""")


@pytest.fixture
def role(engine: Engine) -> Iterator[str]:
    """A role that the page's statements were run for, and nothing else but the bank's own tables."""
    (grants,) = re.findall(r"^```sql\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    name = f"role_{uuid4().hex[:8]}"
    with engine.connect() as connection:
        connection.execute(text(f"CREATE ROLE {name} LOGIN PASSWORD 'p'"))
        connection.execute(text(f"GRANT {name} TO CURRENT_USER"))  # to drop what it owns
        for statement in re.sub(r"\bapp\b", name, grants).split(";\n"):
            if statement.strip():
                connection.execute(text(statement))
        connection.execute(text(f"GRANT ALL ON entries, failures TO {name}"))
        connection.execute(text(f"GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO {name}"))
        yield name
        connection.execute(text(f"DROP OWNED BY {name}"))
        connection.execute(text(f"DROP ROLE {name}"))


@pytest.fixture
def poor(role: str, database: str, configured: Celery) -> Iterator[Celery]:
    url = make_url(database).set(username=role, password="p").render_as_string(hide_password=False)
    configured.conf.idempotency_database_url = url
    close_runtime(configured)
    yield configured
    close_runtime(configured)


@pytest.mark.plain  # of partitions, the grants are on a page of their own
def test_the_grants_of_the_page_are_all_that_work_needs(
    poor: Celery, connection: Connection, deliveries: Deliveries
) -> None:
    found = check_database(settings_of(poor))
    assert [str(each) for each in found if each.level is not Level.OK] == []
    enqueued(connection, b.deposit, "a1", ordering_key="k")
    relay = Relay(poor)
    assert relay.run_once().published == 1
    relay.close()
    assert deliveries.deliver(b.deposit, "a1").state == "SUCCESS"
    assert deliveries.deliver(b.failing, "a2", "permanent").state == "FAILURE"


def test_every_right_that_is_missing_is_named(poor: Celery, role: str, connection: Connection) -> None:
    own = create_engine(settings_of(poor).database_url.get_secret_value(), poolclass=NullPool)
    objects = connection.execute(OBJECTS).all()
    connection.execute(text("REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA idempotency FROM PUBLIC"))
    connection.execute(text(f"GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA idempotency TO {role}"))
    of_kind = {"SEQUENCE": ["USAGE"], "FUNCTION": ["EXECUTE"], "TABLE": ["SELECT", "INSERT", "UPDATE", "DELETE"]}
    all_rights = [
        (each.kind, each.name, each.shown, right)
        for each in objects
        for right in EXCEPT.get(each.shown, of_kind[each.kind])
    ]
    assert {"records", "outbox", "fence", "refresh_lane"} < {shown for _, _, shown, _ in all_rights}
    with own.connect().execution_options(isolation_level="AUTOCOMMIT") as session:
        for kind, name, shown, right in all_rights:
            name = name if name.startswith("idempotency.") else f"idempotency.{name}"
            connection.execute(text(f"REVOKE {right} ON {kind} {name} FROM {role}"))
            (found,) = [each for each in _tables(session) if each.level is not Level.OK]
            assert str(found).startswith(f"database rights on {kind.lower()} {shown}: no {right};")
            is_for_people = shown in FOR_PEOPLE
            assert found.level is (Level.WARNING if is_for_people else Level.REFUSAL)
            connection.execute(text(f"GRANT {right} ON {kind} {name} TO {role}"))
        connection.execute(text(f"REVOKE USAGE ON SCHEMA idempotency FROM {role}"))
        assert "database rights on schema idempotency: no USAGE" in str(_tables(session)[0])
    # nothing is asked of a schema that may not be used, so that this is what a start is refused with
    refused = check_database(Settings.read({"database_url": own.url.render_as_string(hide_password=False)}))
    assert "database rights on schema idempotency" in [each.subject for each in refused if each.level is Level.REFUSAL]
    own.dispose()
