"""API keys, which say who a tenant is; who waits for an operation's end; and which tenants a transaction is about.

Code of 0012 runs beside this. Row-level security begins with `idempotency migrate --roles`, not here.
"""

from alembic import op

from idempotency.store.migrations.indexes import create_index

revision = "0013"
down_revision = "0012"

# What nobody has asked for again: records of HTTP requests that have no message, and so nothing that delivers them.
UNASKED = """CREATE INDEX CONCURRENTLY records_unasked ON idempotency.records (service, updated_at)
    WHERE message = '' AND task = 'http' AND status IN ('started', 'released')"""

API_KEYS = """
-- A key is `ik_<id>_<secret>`; of the secret, 32 random bytes, only the SHA-256 of the whole text is here. It needs no
-- salt and no slow hash: nobody guesses 32 random bytes.
CREATE TABLE idempotency.api_keys (
    id          text        PRIMARY KEY CHECK (id ~ '^[a-z0-9]{1,32}$'),
    tenant      text        NOT NULL CHECK (char_length(tenant) BETWEEN 1 AND 255),
    name        text        NOT NULL CHECK (char_length(name) BETWEEN 1 AND 255),
    scopes      text[]      NOT NULL CHECK (cardinality(scopes) > 0),
    secret_hash bytea       NOT NULL UNIQUE CHECK (octet_length(secret_hash) = 32),
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at  timestamptz,
    revoked_at  timestamptz
);
CREATE INDEX api_keys_tenant ON idempotency.api_keys (tenant);

-- With the rights of its owner: who may ask whether a key is right need not be able to read the keys.
CREATE FUNCTION idempotency.authenticate(wanted_id text, wanted_hash bytea)
RETURNS TABLE (tenant text, name text, scopes text[])
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    SELECT k.tenant, k.name, k.scopes FROM idempotency.api_keys k
    WHERE k.id = wanted_id AND k.secret_hash = wanted_hash
      AND k.revoked_at IS NULL AND (k.expires_at IS NULL OR k.expires_at > clock_timestamp())
$$;
"""

WAITERS = """
-- Who waits for an operation's end. NOTIFY takes a lock that makes commits wait for each other, so an end notifies only
-- if somebody waits for it. A crash may empty this table: whoever waits also looks from time to time.
CREATE UNLOGGED TABLE idempotency.waiters (
    tenant text        NOT NULL,
    task   text        NOT NULL,
    key    text        NOT NULL,
    until  timestamptz NOT NULL,
    PRIMARY KEY (tenant, task, key)
);

-- An end that has begun before the waiter's row was committed does not see it, and notifies nobody.
CREATE FUNCTION idempotency.announce_end() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (
        SELECT FROM idempotency.waiters w
        WHERE w.tenant = NEW.tenant AND w.task = NEW.task AND w.key = NEW.key AND w.until > clock_timestamp()
    ) THEN
        PERFORM pg_notify('idempotency_ended', encode(
            sha256(convert_to(concat_ws(E'\\n', NEW.tenant, NEW.task, NEW.key), 'UTF8')), 'hex'));
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER announce_end AFTER INSERT OR UPDATE OF status ON idempotency.records
    FOR EACH ROW WHEN (NEW.status IN ('completed', 'failed')) EXECUTE FUNCTION idempotency.announce_end();
"""

TENANTS = """
-- The tenants that a transaction is about, for the policies. It raises where none is set: a forgotten tenant must not
-- look like a table without rows.
CREATE FUNCTION idempotency.tenants() RETURNS text[] LANGUAGE plpgsql STABLE AS $$
DECLARE
    named text := current_setting('idempotency.tenant', true);
BEGIN
    IF coalesce(named, '') = '' THEN
        RAISE EXCEPTION 'idempotency.tenant is not set, and row-level security is on' USING
            ERRCODE = 'insufficient_privilege',
            HINT = 'SET LOCAL idempotency.tenant to the tenant of the transaction, or use the role of a relay.';
    END IF;
    RETURN string_to_array(named, E'\\n');
END $$;

-- The tenant of a row that is about to be inserted; where row-level security is on, the transaction is about that tenant
-- too from then on. It is part of the INSERT, so that a caller's transaction pays no round trip for it.
CREATE FUNCTION idempotency.about(tenant text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    named text := coalesce(current_setting('idempotency.tenant', true), '');
BEGIN
    IF row_security_active('idempotency.outbox') AND tenant <> ALL (string_to_array(named, E'\\n')) THEN
        PERFORM set_config('idempotency.tenant', concat_ws(E'\\n', nullif(named, ''), tenant), true);
    END IF;
    RETURN tenant;
END $$;
"""

# A policy left behind would hide every row from older code, which names no tenant. The application's own tables may have
# the same ones (`roles.protect`), and others, which stay.
WITHOUT_POLICIES = """
DO $$
DECLARE
    found record;
BEGIN
    FOR found IN
        SELECT p.polname AS policy, p.polrelid AS id, p.polrelid::regclass::text AS name
        FROM pg_policy p JOIN pg_class c ON c.oid = p.polrelid
        WHERE c.relnamespace = 'idempotency'::regnamespace OR p.polrelid IN (
            SELECT ours.polrelid FROM pg_policy ours
            JOIN pg_depend d ON d.classid = 'pg_policy'::regclass AND d.objid = ours.oid
            WHERE d.refclassid = 'pg_proc'::regclass AND d.refobjid = 'idempotency.tenants()'::regprocedure
              AND (p.oid = ours.oid OR p.polname IN ('all_tenants', 'all_tenants_read')))
    LOOP
        EXECUTE format('DROP POLICY %I ON %s', found.policy, found.name);
        IF NOT EXISTS (SELECT FROM pg_policy WHERE polrelid = found.id) THEN
            EXECUTE format('ALTER TABLE %s NO FORCE ROW LEVEL SECURITY, DISABLE ROW LEVEL SECURITY', found.name);
        END IF;
    END LOOP;
END $$;
"""


def upgrade() -> None:
    create_index(UNASKED)  # first: what precedes it would be committed without the rest
    op.execute(API_KEYS)
    op.execute(WAITERS)
    op.execute(TENANTS)


def downgrade() -> None:
    op.execute(WITHOUT_POLICIES)
    op.execute("DROP FUNCTION idempotency.tenants(), idempotency.about(text)")
    op.execute("DROP TRIGGER announce_end ON idempotency.records")
    op.execute("DROP FUNCTION idempotency.announce_end()")
    op.execute("DROP TABLE idempotency.waiters")
    op.execute("DROP FUNCTION idempotency.authenticate(text, bytea)")
    op.execute("DROP TABLE idempotency.api_keys")
    op.execute("DROP INDEX idempotency.records_unasked")
