"""The roles of `migrate --roles`, made by a login that is no superuser, and the wall between tenants: tested by trying."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest
from psycopg import errors
from pydantic import SecretStr
from sqlalchemy import Engine, create_engine, event, make_url, text
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.pool import NullPool

import services
from idempotency.checks.findings import Level
from idempotency.checks.postgres import check_database
from idempotency.operate import api_keys
from idempotency.operate.change import Change
from idempotency.settings import Settings
from idempotency.store import audit, roles, schema, webhooks
from idempotency.store.overview import monitoring_connection, take_snapshot
from idempotency.store.rights import APPLICATION, OPERATOR, OWNER, READ_ONLY, RELAY
from idempotency.store.tenants import authenticate
from idempotency.wire.keys import OperationId
from tests.support import operations as op
from tests.support.documents import blocks, python_blocks
from tests.support.roles import PASSWORDS, url_of

As = Callable[[str], Engine]


@pytest.fixture(scope="module")
def walled(servers: services.Services) -> Iterator[str]:
    """A database whose roles were made by its owner, with rows of the tenants `a` and `b` in every table that has one."""
    name = f"roles_{uuid4().hex[:8]}"
    url = servers.create_database(name)
    owner = create_engine(url, poolclass=NullPool)
    schema.migrate(owner)
    roles.create(owner, PASSWORDS)
    with owner.begin() as connection:
        for tenant in ("a", "b"):
            id = OperationId(tenant, "t", "k")
            op.failed(connection, id)
            connection.exec_driver_sql(ROWS.replace(":tenant", f"'{tenant}'"))
            api_keys.create_api_key(connection, Change("ann", "test"), tenant, name="n", scopes=["*"])
    yield url
    servers.drop_database(name)


ROWS = """
INSERT INTO idempotency.waiters VALUES (:tenant, 't', 'k', now());
INSERT INTO idempotency.outbox (message_id, tenant, task, key, fingerprint, message, origin)
VALUES (:tenant, :tenant, 't', 'k', 'f', '', 'enqueue');
INSERT INTO idempotency.dead_letters (source, tenant, task, key, reason, payload)
VALUES ('operation', :tenant, 't', 'k', 'r', '');
INSERT INTO idempotency.audit (actor, action, tenant) VALUES ('ann', 'x', :tenant);
INSERT INTO idempotency.set_aside (sweep, id, tenant, error, until) VALUES ('s', :tenant, :tenant, 'e', now());
INSERT INTO idempotency.dead_letters (source, tenant, task, key, reason, payload, status, closed_at)
VALUES ('operation', :tenant, 't', 'closed', 'r', '', 'discarded', now());
INSERT INTO idempotency.sagas (id, tenant, task, key, service, status, entity_id)
VALUES (gen_random_uuid(), :tenant, 't', 'k', 's', 'FAILED', 'e');
INSERT INTO idempotency.webhook_endpoints (id, tenant, service, url, events, status)
SELECT 'ep_' || status || :tenant, :tenant, 'shop', 'https://x.example/', '{*}', status
FROM unnest('{unverified,enabled,disabled}'::text[]) status;
INSERT INTO idempotency.webhook_deliveries (id, tenant, service, endpoint_id, task, event_type, body, status, ended_at)
SELECT status || :tenant, :tenant, 'shop', 'ep_enabled' || :tenant, 't', 'e', '{}', status,
    CASE WHEN status <> 'waiting' THEN now() END
FROM unnest('{waiting,delivered,given_up}'::text[]) status;
"""


@pytest.fixture(scope="module")
def as_role(walled: str) -> Iterator[As]:
    """An engine of a role of this database, made once for each."""
    engines: dict[str, Engine] = {}

    def of(role: str) -> Engine:
        return engines.setdefault(role, create_engine(url_of(role, walled)))

    yield of
    for engine in engines.values():
        engine.dispose()


def trying(engine: Engine, statement: str, tenant: str | None = None) -> Any:
    """What becomes of a statement, which is then rolled back: its rows or number of rows, or the refusal."""
    with engine.connect() as connection:
        if tenant is not None:
            connection.execute(text("SELECT set_config('idempotency.tenant', :tenant, true)"), {"tenant": tenant})
        try:
            done = connection.execute(text(statement))
            return done.scalars().all() if done.returns_rows else done.rowcount
        except ProgrammingError as error:
            return type(error.orig)
        finally:
            connection.rollback()


def test_the_tests_own_login_is_no_superuser(walled: str) -> None:
    owner = create_engine(walled, poolclass=NullPool)
    with owner.connect() as connection:
        query = "SELECT rolsuper OR rolbypassrls FROM pg_roles WHERE rolname = current_user"
        assert connection.execute(text(query)).scalar_one() is False


# ---------------------------------------------------------------- the wall

# How the tables with a tenant are written to by an application that tries: the column to change, and an insert.
OF_THE_APPLICATION = {
    "records": "INSERT INTO idempotency.records (tenant, task, key, status, fence, fingerprint, message, locked_until, "
    "token, locked_by) VALUES ('b', 't', 'new', 'started', 1, 'f', '', now(), 't', 'h')",
    "outbox": "INSERT INTO idempotency.outbox (message_id, tenant, task, key, fingerprint, message, origin) "
    "VALUES ('new', 'b', 't', 'k', 'f', '', 'enqueue')",
    "dead_letters": "INSERT INTO idempotency.dead_letters (source, tenant, task, key, reason, payload) "
    "VALUES ('operation', 'b', 't', 'k', 'new', '')",
    "waiters": "INSERT INTO idempotency.waiters VALUES ('b', 't', 'new', now())",
}


EDITS = ("letter_edits", "former_fingerprints")
SAGAS = ("sagas", "saga_steps", "saga_events")
WEBHOOKS = ("webhook_endpoints", "webhook_secrets", "webhook_deliveries", "webhook_attempts")


@pytest.mark.parametrize("table", OF_THE_APPLICATION)
def test_a_tenant_reaches_no_row_of_another_by_any_statement(as_role: As, table: str) -> None:
    application, name = as_role(APPLICATION), f"idempotency.{table}"
    assert set(trying(application, f"SELECT tenant FROM {name}", "a")) == {"a"}
    assert trying(application, f"SELECT tenant FROM {name} WHERE tenant = 'b'", "a") == []
    assert trying(application, f"SELECT tenant FROM {name} WHERE tenant = 'b' FOR UPDATE", "a") == []
    assert trying(application, f"UPDATE {name} SET task = 'x' WHERE tenant = 'b'", "a") == 0
    assert trying(application, f"UPDATE {name} SET tenant = 'b'", "a") is errors.InsufficientPrivilege
    assert trying(application, OF_THE_APPLICATION[table], "a") is errors.InsufficientPrivilege
    assert trying(application, OF_THE_APPLICATION[table], "b") == 1
    deleted = trying(application, f"DELETE FROM {name} WHERE tenant = 'b'", "a")
    assert deleted is errors.InsufficientPrivilege if table == "dead_letters" else deleted == 0
    assert set(trying(application, f"SELECT tenant FROM {name}", "a\nb")) == {"a", "b"}


@pytest.mark.parametrize("table", OF_THE_APPLICATION)
@pytest.mark.parametrize("tenant", [None, ""], ids=["never set", "empty"])
def test_a_forgotten_tenant_is_an_error_and_not_an_empty_table(as_role: As, table: str, tenant: str | None) -> None:
    application = as_role(APPLICATION)
    for statement in (f"SELECT * FROM idempotency.{table}", OF_THE_APPLICATION[table]):
        assert trying(application, statement, tenant) is errors.InsufficientPrivilege


def test_every_table_with_a_tenant_is_behind_the_wall(walled: str) -> None:
    owner = create_engine(walled, poolclass=NullPool)
    query = """
        SELECT c.relname, c.relrowsecurity AND c.relforcerowsecurity FROM pg_class c
        JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = 'tenant'
        WHERE c.relnamespace = 'idempotency'::regnamespace AND c.relkind IN ('r', 'p')
    """
    with owner.connect() as connection:
        found = {row[0]: row[1] for row in connection.execute(text(query))}
    assert found == dict.fromkeys(
        [*OF_THE_APPLICATION, *SAGAS, *WEBHOOKS, "api_keys", "audit", "set_aside", *EDITS], True
    )


def test_row_security_holds_for_roles_that_no_policy_names(walled: str) -> None:
    """One with rights to the tables, from before `--roles`, say: it sees what it sets, and not silently nothing."""
    owner, name = create_engine(walled, poolclass=NullPool), f"older_{uuid4().hex[:8]}"
    older = create_engine(make_url(walled).set(username=name, password="p"), poolclass=NullPool)
    with owner.begin() as connection:
        connection.execute(text(f"CREATE ROLE {name} LOGIN PASSWORD 'p'"))
        connection.execute(text(f"GRANT USAGE ON SCHEMA idempotency TO {name}"))
        connection.execute(text(f"GRANT SELECT ON idempotency.records TO {name}"))
        connection.execute(text(f"GRANT EXECUTE ON FUNCTION idempotency.tenants() TO {name}"))
    try:
        assert trying(older, "SELECT tenant FROM idempotency.records", "a") == ["a"]
        assert trying(older, "SELECT tenant FROM idempotency.records") is errors.InsufficientPrivilege
    finally:
        with owner.begin() as connection:
            connection.execute(text(f"REVOKE ALL ON SCHEMA idempotency FROM {name}"))
            connection.execute(text(f"REVOKE ALL ON ALL TABLES IN SCHEMA idempotency FROM {name}"))
            connection.execute(text(f"REVOKE ALL ON ALL FUNCTIONS IN SCHEMA idempotency FROM {name}"))
            connection.execute(text(f"DROP ROLE {name}"))


# ---------------------------------------------------------------- what each role may and may not do

BOTH = ["a", "b"]
UNENDED = (
    "status = 'released', token = NULL, locked_by = NULL, error_code = NULL, completed_at = NULL, expires_at = NULL"
)
BEGUN_ANEW = OF_THE_APPLICATION["records"].replace("'b', 't', 'new'", "'a', 't', 'k'")
REFUSED = errors.InsufficientPrivilege
DISCARD = (
    "UPDATE idempotency.dead_letters SET status = 'discarded', closed_at = now() WHERE key = 'k' AND status = 'open'"
)
DELIVERY = "UPDATE idempotency.webhook_deliveries SET"
ENDPOINT = "UPDATE idempotency.webhook_endpoints SET"
TRIED = [
    (OWNER, "SELECT tenant FROM idempotency.records ORDER BY 1", BOTH),
    (OWNER, "DELETE FROM idempotency.audit", REFUSED),  # append-only for everybody
    (RELAY, "SELECT tenant FROM idempotency.outbox ORDER BY 1", BOTH),
    (RELAY, "UPDATE idempotency.outbox SET taken = true", 2),
    (RELAY, "SELECT tenant FROM idempotency.api_keys", REFUSED),
    (RELAY, "INSERT INTO idempotency.operators VALUES ('x', 'admin', 'h', now(), now())", REFUSED),
    (RELAY, "INSERT INTO idempotency.audit (actor, action) VALUES ('x', 'y')", REFUSED),
    (RELAY, "UPDATE idempotency.schema_version SET version_num = '0001'", REFUSED),
    (RELAY, "CREATE TABLE idempotency.mine (a int)", REFUSED),
    (OPERATOR, "SELECT tenant FROM idempotency.records ORDER BY 1", BOTH),
    (OPERATOR, "SELECT tenant FROM idempotency.api_keys ORDER BY 1", BOTH),
    (OPERATOR, "INSERT INTO idempotency.audit (actor, action) VALUES ('x', 'y')", 1),
    (OPERATOR, "UPDATE idempotency.audit SET actor = 'somebody else'", REFUSED),
    (OPERATOR, "ALTER TABLE idempotency.audit DISABLE TRIGGER append_only", REFUSED),
    (OPERATOR, "INSERT INTO idempotency.operators VALUES ('x', 'admin', 'h', now(), now())", REFUSED),
    (OPERATOR, "UPDATE idempotency.operators SET role = 'admin'", REFUSED),
    (OPERATOR, "DELETE FROM idempotency.operators", 0),
    (OPERATOR, "TRUNCATE idempotency.records", REFUSED),
    (READ_ONLY, "SELECT tenant FROM idempotency.records ORDER BY 1", BOTH),
    (READ_ONLY, "UPDATE idempotency.records SET task = 'x'", REFUSED),
    (READ_ONLY, "SELECT token_hash FROM idempotency.operators", REFUSED),
    (READ_ONLY, "SELECT secret_hash FROM idempotency.api_keys", REFUSED),
    (READ_ONLY, "SELECT secret FROM idempotency.webhook_secrets", REFUSED),
    (RELAY, "SELECT secret FROM idempotency.webhook_secrets", REFUSED),
    (APPLICATION, "UPDATE idempotency.webhook_secrets SET expires_at = now()", REFUSED),
    (READ_ONLY, "SELECT * FROM idempotency.authenticate('x', 'y')", REFUSED),
    (APPLICATION, "SELECT secret_hash FROM idempotency.api_keys", REFUSED),
    (APPLICATION, "SELECT * FROM idempotency.audit", REFUSED),
    (APPLICATION, "SELECT * FROM idempotency.operators", REFUSED),
    (APPLICATION, "DELETE FROM idempotency.records", 0),  # neither what has ended nor what is recorded
    (APPLICATION, "UPDATE idempotency.records SET error = 'x'", REFUSED),  # they have ended
    (APPLICATION, f"UPDATE idempotency.records SET {UNENDED}, available_at = now()", REFUSED),
    (APPLICATION, "UPDATE idempotency.records SET key = 'another'", REFUSED),
    (APPLICATION, "UPDATE idempotency.records SET expires_at = now()", REFUSED),
    (APPLICATION, f"{BEGUN_ANEW} ON CONFLICT (tenant, task, key) DO UPDATE SET updated_at = now()", REFUSED),
    (APPLICATION, "TRUNCATE idempotency.records", REFUSED),
    (APPLICATION, "ALTER TABLE idempotency.records DISABLE TRIGGER keep_ended", REFUSED),
    (APPLICATION, "UPDATE idempotency.records SET message = '', erased_at = now()", REFUSED),
    (RELAY, "UPDATE idempotency.records SET kept_until = now()", 2),
    (OPERATOR, "UPDATE idempotency.records SET updated_at = now()", 2),
    (
        APPLICATION,
        "UPDATE idempotency.dead_letters SET status = 'open', closed_at = NULL WHERE key = 'closed'",
        REFUSED,
    ),
    (APPLICATION, "UPDATE idempotency.dead_letters SET payload = 'another' WHERE key = 'closed'", REFUSED),
    (
        APPLICATION,
        "UPDATE idempotency.dead_letters SET used_by = 's k' WHERE key = 'closed'",
        1,
    ),  # as a saga's end does
    (APPLICATION, DISCARD, REFUSED),
    (APPLICATION, DISCARD.replace("SET", "SET used_by = 's k',"), 1),  # as a saga's end does
    (OPERATOR, f"{DISCARD} AND tenant = 'a'", 1),
    (APPLICATION, "UPDATE idempotency.sagas SET status = 'RUNNING'", REFUSED),
    (APPLICATION, "UPDATE idempotency.sagas SET error = 'x'", REFUSED),
    (APPLICATION, "UPDATE idempotency.sagas SET status = 'RUNNING', generation = 9", REFUSED),
    (APPLICATION, "UPDATE idempotency.sagas SET signals = signals + 1", 1),  # a late end of a call
    (APPLICATION, f"{DELIVERY} status = 'waiting', ended_at = NULL WHERE id = 'delivereda'", REFUSED),
    (APPLICATION, f"{DELIVERY} status = 'waiting', ended_at = NULL WHERE id = 'given_upa'", REFUSED),
    (APPLICATION, f"{DELIVERY} redelivery = 1 WHERE id = 'delivereda'", REFUSED),
    (APPLICATION, f"{DELIVERY} body = '[]' WHERE id = 'waitinga'", REFUSED),
    (APPLICATION, f"{DELIVERY} status = 'delivered' WHERE id = 'given_upa'", 1),  # a replay of its operation does
    (OPERATOR, f"{DELIVERY} status = 'waiting', ended_at = NULL, redelivery = 1 WHERE id = 'delivereda'", 1),
    (APPLICATION, f"{ENDPOINT} url = 'https://y.example/' WHERE id = 'ep_enableda'", REFUSED),
    (APPLICATION, f"{ENDPOINT} events = '{{x}}' WHERE id = 'ep_enableda'", REFUSED),
    (APPLICATION, f"{ENDPOINT} status = 'enabled' WHERE id = 'ep_unverifieda'", REFUSED),
    (APPLICATION, f"{ENDPOINT} status = 'enabled' WHERE id = 'ep_disableda'", REFUSED),
    (APPLICATION, f"{ENDPOINT} status = 'disabled', disabled_because = 'gone' WHERE id = 'ep_enableda'", 1),
    (APPLICATION, "DELETE FROM idempotency.outbox", 1),  # its own; a retry's row is replaced by the next one
    (APPLICATION, "INSERT INTO idempotency.api_keys VALUES ('x', 'a', 'n', '{*}', sha256(''))", REFUSED),
    (APPLICATION, "ALTER TABLE idempotency.records DISABLE ROW LEVEL SECURITY", REFUSED),
    (APPLICATION, "DROP POLICY of_tenant ON idempotency.records", REFUSED),
    (APPLICATION, f"SET ROLE {RELAY}", REFUSED),
    (APPLICATION, "SET SESSION AUTHORIZATION postgres", REFUSED),
]


@pytest.mark.parametrize(("role", "statement", "expected"), TRIED, ids=[f"{r}: {s[:50]}" for r, s, _ in TRIED])
def test_each_role_may_do_what_it_needs_and_nothing_else(
    as_role: As, role: str, statement: str, expected: object
) -> None:
    assert trying(as_role(role), statement, "a" if role == APPLICATION else None) == expected


def test_a_dashboard_reads_the_whole_backlog(walled: str) -> None:
    given = Settings(database_url=SecretStr(url_of(READ_ONLY, walled)), service="shop")
    with monitoring_connection(given) as connection:
        found = take_snapshot(connection, given)
    assert found.takes_writes
    assert sum(letter.letters for letter in found.letters) == 2, "one of each tenant"


def test_a_saga_that_a_person_replays_begins_anew(as_role: As) -> None:
    with as_role(OPERATOR).begin() as connection:
        connection.execute(text("UPDATE idempotency.records SET generation = 2 WHERE tenant = 'a' AND key = 'k'"))
    assert trying(as_role(APPLICATION), "UPDATE idempotency.sagas SET status = 'RUNNING', generation = 2", "a") == 1


def test_the_application_can_ask_whose_key_it_is_without_reading_the_keys(walled: str, as_role: As) -> None:
    with as_role(OPERATOR).begin() as connection:
        key = api_keys.create_api_key(connection, Change("ann", "test"), "a", name="shop", scopes=["orders:write"])
    with as_role(APPLICATION).connect() as connection:
        caller = authenticate(connection, key.text)
        assert caller is not None
        assert (caller.tenant, caller.scopes) == ("a", ("orders:write",))


def test_the_application_delivers_webhooks_of_its_tenant_alone(walled: str, as_role: As) -> None:
    for tenant in ("a", "b"):
        with as_role(OPERATOR).begin() as connection:
            webhooks.add_endpoint(
                connection, tenant, tenant=tenant, service="s", url="https://x.example/", events=["*"], secret="whsec_"
            )
            assert webhooks.enable(connection, "s", tenant, seen=datetime.now(UTC))
    with as_role(APPLICATION).connect() as connection:
        connection.execute(text("SELECT set_config('idempotency.tenant', 'a', true)"))
        assert [row.id for row in webhooks.open_endpoints(connection, "s", "a")] == ["a"]
        assert webhooks.open_endpoints(connection, "s", "b") == []
        assert (webhooks.secrets_of(connection, "a"), webhooks.secrets_of(connection, "b")) == (["whsec_"], [])
        webhooks.add_delivery(
            connection, "m", tenant="a", service="s", endpoint="a", task="t", event_type="e", body="{}"
        )
        due = webhooks.begin_attempt(connection, "m", 0, most=1, longest=1.0)
        assert isinstance(due, webhooks.Begun)
        webhooks.end_attempt(connection, due.attempt, status=500, error=None, milliseconds=1, is_accepted=False)
        webhooks.give_up(connection, "m", 0, webhooks.GONE)
        webhooks.delivered(connection, "m", 0)
        found = webhooks.count_given_up(connection, "m", is_gone=True, most=1, failing_for=0.0)
        assert found is not None
        assert found.disabled_because == webhooks.GONE


# ---------------------------------------------------------------- whose functions run

# Calls of ours, of the schema's functions and of the library's statements, for whose arguments the application makes a function
# that fits better.
TRAPS = ("concat_ws(text, text, text, text)", "num_nulls(text, text)", "hashtextextended(text, integer)")
BEGUN_BY = OF_THE_APPLICATION["records"].replace("'b', 't', 'new'", "'a', 't', 'trap'")
ENDED_BY = """
UPDATE idempotency.records SET status = 'completed', result = '1', response_code = 200, locked_until = NULL,
    completed_at = now(), expires_at = now() WHERE key = 'trap'
"""


def test_every_function_has_its_own_path(walled: str) -> None:
    query = """
        SELECT oid::regprocedure FROM pg_proc WHERE pronamespace = 'idempotency'::regnamespace
        AND 'search_path=pg_catalog, pg_temp' <> ALL (coalesce(proconfig, '{}'))
    """
    with create_engine(walled, poolclass=NullPool).connect() as connection:
        assert connection.execute(text(query)).all() == []


@pytest.fixture
def public_for_all(walled: str, as_role: As) -> Iterator[Engine]:
    """As Postgres 13 and 14 have it, and a database that was restored from them: each role may create in `public`."""
    owner, application = create_engine(walled, poolclass=NullPool), as_role(APPLICATION)
    with owner.begin() as connection:
        connection.execute(text("GRANT CREATE ON SCHEMA public TO PUBLIC"))
    with application.begin() as connection:
        connection.execute(text("CREATE TABLE public.seen (who text, what text); GRANT ALL ON public.seen TO PUBLIC"))
        for trap in TRAPS:
            returned = "bigint" if trap.startswith("hash") else "integer" if trap.startswith("num") else "text"
            connection.execute(
                text(f"""CREATE FUNCTION public.{trap} RETURNS {returned} LANGUAGE plpgsql AS $$ BEGIN
                INSERT INTO public.seen VALUES (current_user, '{trap}'); RETURN 0; END $$""")
            )
    yield owner
    with application.begin() as connection:
        connection.execute(text("DROP TABLE public.seen"))
        for trap in TRAPS:
            connection.execute(text(f"DROP FUNCTION public.{trap}"))
    roles.create(owner, {})


@pytest.mark.parametrize("role", [RELAY, OPERATOR])
def test_no_function_of_the_application_is_run_by_another_role(public_for_all: Engine, as_role: As, role: str) -> None:
    with as_role(role).connect() as connection:
        connection.execute(text("INSERT INTO idempotency.waiters VALUES ('a', 't', 'trap', now() + interval '1 day')"))
        connection.execute(text(BEGUN_BY))
        connection.execute(text(ENDED_BY))
        connection.execute(text("SELECT idempotency.event_lock('a', 's', 'e', 'm')"))
        connection.execute(text("SET CONSTRAINTS ALL IMMEDIATE"))
        if role == OPERATOR:
            audit.of_request(connection, "r-1")
        assert connection.execute(text("SELECT * FROM public.seen")).all() == []
        connection.rollback()


def test_a_schema_in_which_the_application_may_create_is_refused_and_closed(
    public_for_all: Engine, walled: str, as_role: As
) -> None:
    refused = f"database schema public: {APPLICATION} may create in it;"
    for role in (RELAY, APPLICATION):
        assert any(each.startswith(refused) for each in refusals(role, walled))
    with public_for_all.begin() as connection:
        (database,) = connection.execute(text("SELECT quote_ident(current_database())")).one()
        connection.execute(text(f"GRANT CREATE ON DATABASE {database} TO {APPLICATION}"))
        connection.execute(text(f"CREATE SCHEMA {RELAY}; GRANT USAGE ON SCHEMA {RELAY} TO {RELAY}"))
        connection.execute(text(f"GRANT CREATE ON SCHEMA {RELAY} TO {APPLICATION}"))
    roles.create(public_for_all, {})
    places = [each.partition(": ")[0] for each in refusals(RELAY, walled)]
    assert places == [f"database database {database}", f"database schema {RELAY}"]
    with public_for_all.begin() as connection:
        connection.execute(text(f"REVOKE CREATE ON DATABASE {database} FROM {APPLICATION}"))
        connection.execute(text(f"DROP SCHEMA {RELAY}"))
    assert refusals(RELAY, walled) == refusals(APPLICATION, walled) == []
    assert trying(as_role(APPLICATION), "CREATE TABLE public.mine (a int)") is REFUSED
    assert trying(public_for_all, "CREATE TABLE public.mine (a int)") == -1


def refusals(role: str, url: str) -> list[str]:
    found = check_database(Settings.read({"database_url": url_of(role, url)}))
    return [str(each) for each in found if each.level is Level.REFUSAL]


def test_making_the_roles_again_changes_no_table_and_takes_no_lock_on_one(walled: str, as_role: As) -> None:
    owner = create_engine(walled, poolclass=NullPool)
    with as_role(RELAY).begin() as busy:
        busy.execute(text("SELECT count(*) FROM idempotency.records")).scalar_one()
        done = roles.create(owner, {})
    assert not [statement for statement in done if not statement.startswith(("GRANT", "REVOKE", "ALTER FUNCTION"))]


@pytest.mark.long
def test_several_deploys_make_the_roles_at_once(walled: str) -> None:
    """Roles belong to the server, so a lock in one database keeps nobody away."""
    engines = [create_engine(walled, poolclass=NullPool) for _ in range(4)]
    with ThreadPoolExecutor(4) as deploys:
        assert all(deploys.map(lambda engine: roles.create(engine, PASSWORDS), engines))


def test_a_password_is_sent_and_reported_only_as_its_verifier(walled: str) -> None:
    owner = create_engine(walled, poolclass=NullPool)
    sent: list[str] = []
    event.listen(owner, "before_cursor_execute", lambda *args: sent.append(args[2]))
    done = roles.create(owner, {READ_ONLY: PASSWORDS[READ_ONLY]})
    assert f"ALTER ROLE {READ_ONLY} LOGIN PASSWORD …" in done
    assert any("SCRAM-SHA-256$" in statement for statement in sent)
    assert not [statement for statement in sent + done if "of the" in statement]


def test_a_table_of_the_application_gets_the_same_wall(walled: str, as_role: As) -> None:
    owner = create_engine(walled, poolclass=NullPool)
    with owner.begin() as connection:
        connection.execute(text("CREATE TABLE things (tenant text NOT NULL, id int); CREATE TABLE plain (id int)"))
        connection.execute(text("INSERT INTO things VALUES ('a', 1), ('b', 2)"))
        connection.execute(text(f"GRANT SELECT, INSERT ON things TO {APPLICATION}"))
        roles.protect(connection, "things")
        roles.protect(connection, "things")
        for wrong in ("plain", "nothing"):
            with pytest.raises(ValueError, match=f"'{wrong}': there is none"):
                roles.protect(connection, wrong)
    application = as_role(APPLICATION)
    assert trying(application, "SELECT id FROM things", "a") == [1]
    assert trying(application, "INSERT INTO things VALUES ('b', 3)", "a") is REFUSED
    assert trying(application, "SELECT id FROM things") is REFUSED


def test_the_examples_of_the_page_run_as_they_are(walled: str, as_role: As) -> None:
    keys: dict[str, Any] = {}
    wall: dict[str, Any] = {}
    for source, names in zip(python_blocks("docs/tenants.md"), (keys, wall), strict=True):
        exec(source, names)
    with as_role(OPERATOR).begin() as connection:
        key = api_keys.create_api_key(connection, Change("ann", "test"), "a", name="n", scopes=["payments:write"]).text
    with as_role(APPLICATION).connect() as connection:
        assert keys["caller_of"](connection, f"Bearer {key}").tenant == "a"
        assert keys["caller_of"](connection, f"Basic {key}") is None
    owner = create_engine(walled, poolclass=NullPool)
    wall["protect_orders"](owner)
    with owner.begin() as connection:
        connection.execute(text("INSERT INTO orders VALUES ('a', '1'), ('b', '2')"))
        connection.execute(text(f"GRANT SELECT ON orders TO {APPLICATION}"))
    assert wall["orders_of"](as_role(APPLICATION), "b") == ["2"]


def test_the_grants_of_the_page_let_each_role_use_the_applications_tables(walled: str, as_role: As) -> None:
    (grants,) = blocks("docs/tenants.md", "sql")
    owner = create_engine(walled, poolclass=NullPool)
    with owner.begin() as connection:
        connection.execute(text("CREATE TABLE bought (id bigserial PRIMARY KEY)"))
    for role in (APPLICATION, RELAY, OPERATOR):
        assert trying(as_role(role), "INSERT INTO bought DEFAULT VALUES") is REFUSED
    with owner.begin() as connection:
        connection.execute(text(grants))
    for role in (APPLICATION, RELAY, OPERATOR):
        assert trying(as_role(role), "INSERT INTO bought DEFAULT VALUES") is not REFUSED


def test_an_application_takes_back_a_claim_in_which_nothing_is_recorded(as_role: As) -> None:
    begin = OF_THE_APPLICATION["records"]
    delete = "DELETE FROM idempotency.records WHERE key = 'new'"
    for changed, deleted in ((begin, 1), (begin.replace("'f', ''", "'f', 'message'"), 0)):
        with as_role(APPLICATION).connect() as connection:
            connection.execute(text("SELECT set_config('idempotency.tenant', 'b', true)"))
            connection.execute(text(changed))
            assert connection.execute(text(delete)).rowcount == deleted
            connection.rollback()
