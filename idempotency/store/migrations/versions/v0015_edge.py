"""The edge: what is new for webhooks and for the audit. Code of 0014 runs beside this: it takes no notice of a wake."""

from alembic import op

from idempotency.store.migrations.indexes import create_index
from idempotency.store.migrations.saga_functions import END_OF_OPERATION, RESUME_SAGA

revision = "0015"
down_revision = "0014"

WEBHOOKS = """
-- Where a customer gets webhooks.
CREATE TABLE idempotency.webhook_endpoints (
    id          text        PRIMARY KEY,
    tenant      text        NOT NULL,
    service     text        NOT NULL,
    url         text        NOT NULL,
    -- patterns of types
    events      text[]      NOT NULL,
    status      text        NOT NULL DEFAULT 'unverified' CHECK (status IN ('unverified', 'enabled', 'disabled')),
    disabled_because text   CHECK (disabled_because IN ('gone', 'failing', 'person')),
    -- since when it has accepted nothing, and how many deliveries were given up since
    failing_since timestamptz,
    given_up    int         NOT NULL DEFAULT 0,
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    changed_at  timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX webhook_endpoints_enabled ON idempotency.webhook_endpoints (tenant, service) WHERE status = 'enabled';
CREATE INDEX webhook_endpoints_disabled ON idempotency.webhook_endpoints (service, id) WHERE status = 'disabled';

-- Apart from the endpoints, so that roles that read those do not read these.
CREATE TABLE idempotency.webhook_secrets (
    id          bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    endpoint_id text        NOT NULL REFERENCES idempotency.webhook_endpoints ON DELETE CASCADE,
    tenant      text        NOT NULL,
    secret      text        NOT NULL,
    expires_at  timestamptz
);
CREATE INDEX webhook_secrets_of_endpoint ON idempotency.webhook_secrets (endpoint_id);

-- One event for one endpoint.
CREATE TABLE idempotency.webhook_deliveries (
    id          text        PRIMARY KEY,
    tenant      text        NOT NULL,
    service     text        NOT NULL,
    endpoint_id text        NOT NULL REFERENCES idempotency.webhook_endpoints ON DELETE CASCADE,
    -- what delivers it
    task        text        NOT NULL,
    event_type  text        NOT NULL,
    body        text        NOT NULL,
    status      text        NOT NULL DEFAULT 'waiting' CHECK (status IN ('waiting', 'delivered', 'given_up')),
    given_up_because text,
    -- how often a person has asked for it again
    redelivery  int         NOT NULL DEFAULT 0,
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at    timestamptz
);
CREATE INDEX webhook_deliveries_newest ON idempotency.webhook_deliveries (endpoint_id, created_at);
CREATE INDEX webhook_deliveries_ended ON idempotency.webhook_deliveries (service, ended_at) WHERE ended_at IS NOT NULL;

-- Written before the POST: without an end, the process died, or the attempt is under way.
CREATE TABLE idempotency.webhook_attempts (
    id          bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    delivery_id text        NOT NULL REFERENCES idempotency.webhook_deliveries ON DELETE CASCADE,
    endpoint_id text        NOT NULL,
    tenant      text        NOT NULL,
    redelivery  int         NOT NULL,
    begun_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at    timestamptz,
    status      int,
    -- why there is no status
    error       text,
    milliseconds int
);
CREATE INDEX webhook_attempts_of_delivery ON idempotency.webhook_attempts (delivery_id, redelivery);
CREATE INDEX webhook_attempts_of_endpoint ON idempotency.webhook_attempts (endpoint_id, id);
CREATE INDEX webhook_attempts_under_way ON idempotency.webhook_attempts (endpoint_id) WHERE ended_at IS NULL;
"""

# The hash of an audit row covers the row and the hash before it. At the commit, so that what a transaction locks afterwards
# cannot wait for another one that waits for the head of the chain; the head's row is what writers wait for. With the rights of
# the owner: who may add an audit row may not write the chain. Times in UTC, whatever the session's zone is.
_ENTRY = """jsonb_build_array({0}.id, {0}.at AT TIME ZONE 'UTC', {0}.actor, {0}.action, {0}.tenant, {0}.task, {0}.key,
        {0}.generation, {0}.fence_before, {0}.fence_after, {0}.reason, {0}.details, {0}.request_id)::text"""
AUDIT_CHAIN = f"""
CREATE TABLE idempotency.audit_chain (
    position bigint PRIMARY KEY,
    audit_id bigint NOT NULL UNIQUE,
    hash     bytea  NOT NULL CHECK (octet_length(hash) = 32)
);
CREATE TABLE idempotency.audit_head (
    is_only  boolean PRIMARY KEY DEFAULT true CHECK (is_only),
    position bigint  NOT NULL,
    hash     bytea   NOT NULL
);
INSERT INTO idempotency.audit_head (position, hash) VALUES (0, '');

CREATE FUNCTION idempotency.chain_audit() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    head idempotency.audit_head;
BEGIN
    -- runs with its owner's rights, so it refuses triggers on any other table
    IF TG_RELID <> 'idempotency.audit'::regclass THEN
        RAISE EXCEPTION 'idempotency.chain_audit() is for idempotency.audit alone' USING ERRCODE = 'insufficient_privilege';
    END IF;
    UPDATE idempotency.audit_head SET position = position + 1,
        hash = sha256(hash || convert_to({_ENTRY.format("NEW")}, 'UTF8'))
    RETURNING * INTO STRICT head;
    INSERT INTO idempotency.audit_chain VALUES (head.position, NEW.id, head.hash);
    RETURN NULL;
END $$;
REVOKE EXECUTE ON FUNCTION idempotency.chain_audit() FROM PUBLIC;
CREATE CONSTRAINT TRIGGER chain AFTER INSERT ON idempotency.audit DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION idempotency.chain_audit();
ALTER TABLE idempotency.audit ENABLE ALWAYS TRIGGER chain;

-- the rows of before
DO $$
DECLARE
    entry idempotency.audit;
    head bytea := '';
    number bigint := 0;
BEGIN
    FOR entry IN SELECT * FROM idempotency.audit ORDER BY id LOOP
        number := number + 1;
        head := sha256(head || convert_to({_ENTRY.format("entry")}, 'UTF8'));
        INSERT INTO idempotency.audit_chain VALUES (number, entry.id, head);
    END LOOP;
    UPDATE idempotency.audit_head SET position = number, hash = head;
END $$;

CREATE OR REPLACE FUNCTION idempotency.refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'idempotency.% is append-only', TG_TABLE_NAME USING ERRCODE = 'insufficient_privilege';
END $$;
CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON idempotency.audit_chain
    FOR EACH STATEMENT EXECUTE FUNCTION idempotency.refuse_change();
ALTER TABLE idempotency.audit_chain ENABLE ALWAYS TRIGGER append_only;
"""

# What has ended is changed by people's commands and by relays, each with its own role; the application has no need to. Where no
# roles were made, one does everything. Of a closed letter the application notes which saga has used it, and a delivery that was
# given up is delivered by a replay of its operation.
KEEP_ENDED = """
CREATE FUNCTION idempotency.keep_ended() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'idempotency_application' AND pg_has_role(oid, 'USAGE'))
        OR EXISTS (
            SELECT FROM pg_roles WHERE pg_has_role(oid, 'USAGE')
              AND rolname IN ('idempotency_owner', 'idempotency_relay', 'idempotency_operator'))
    THEN
        RETURN NULL;
    END IF;
    IF TG_TABLE_NAME = 'sagas' THEN  -- a replay, by a person, has opened its record under the next generation
        IF NEW.generation > OLD.generation AND EXISTS (
            SELECT FROM idempotency.records r
            WHERE (r.tenant, r.task, r.key) = (NEW.tenant, NEW.task, NEW.key) AND r.generation >= NEW.generation)
        THEN
            RETURN NULL;
        END IF;
    END IF;
    RAISE EXCEPTION 'idempotency.%: %', TG_TABLE_NAME, TG_ARGV[0] USING ERRCODE = 'insufficient_privilege';
END $$;
CREATE TRIGGER keep_ended AFTER UPDATE ON idempotency.records
    FOR EACH ROW WHEN (OLD.status IN ('completed', 'failed'))
    EXECUTE FUNCTION idempotency.keep_ended('the application changes nothing that has ended');
CREATE TRIGGER keep_ended AFTER UPDATE ON idempotency.sagas
    FOR EACH ROW WHEN (OLD.status IN ('COMPLETED', 'FAILED') AND NOT OLD.observed AND
        (NEW.tenant, NEW.task, NEW.key, NEW.generation, NEW.observed, NEW.status, NEW.error)
        IS DISTINCT FROM (OLD.tenant, OLD.task, OLD.key, OLD.generation, OLD.observed, OLD.status, OLD.error))
    EXECUTE FUNCTION idempotency.keep_ended('the application changes nothing that has ended');
CREATE TRIGGER keep_ended AFTER UPDATE ON idempotency.dead_letters
    FOR EACH ROW WHEN (OLD.status = 'open' AND NEW.status = 'discarded' AND NEW.used_by IS NULL OR OLD.status <> 'open' AND
        (NEW.tenant, NEW.task, NEW.key, NEW.generation, NEW.fingerprint, NEW.status, NEW.closed_at, NEW.reason, NEW.payload)
        IS DISTINCT FROM (OLD.tenant, OLD.task, OLD.key, OLD.generation, OLD.fingerprint, OLD.status, OLD.closed_at, OLD.reason,
            OLD.payload))
    EXECUTE FUNCTION idempotency.keep_ended('the application changes no closed letter, and discards only what a saga has used');
CREATE TRIGGER keep_ended AFTER UPDATE ON idempotency.webhook_deliveries
    FOR EACH ROW WHEN (OLD.status <> NEW.status AND (OLD.status = 'delivered' OR NEW.status = 'waiting') OR
        (NEW.id, NEW.tenant, NEW.service, NEW.endpoint_id, NEW.task, NEW.event_type, NEW.body, NEW.redelivery) IS DISTINCT FROM
        (OLD.id, OLD.tenant, OLD.service, OLD.endpoint_id, OLD.task, OLD.event_type, OLD.body, OLD.redelivery))
    EXECUTE FUNCTION idempotency.keep_ended('the application opens no delivery again, and changes nothing that is sent');
CREATE TRIGGER keep_endpoint AFTER UPDATE ON idempotency.webhook_endpoints
    FOR EACH ROW WHEN (
        (NEW.id, NEW.tenant, NEW.service, NEW.url, NEW.events) IS DISTINCT FROM
        (OLD.id, OLD.tenant, OLD.service, OLD.url, OLD.events)
        OR (NEW.status, NEW.disabled_because) IS DISTINCT FROM (OLD.status, OLD.disabled_because)
            AND NOT (OLD.status = 'enabled' AND NEW.status = 'disabled'))
    EXECUTE FUNCTION idempotency.keep_ended('the application changes no endpoint but to disable it');
"""

# Identities are made by the owner of the tables, also where one role was granted everything else.
PEOPLE = """
CREATE FUNCTION idempotency.only_owner() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NOT (SELECT pg_has_role(relowner, 'USAGE') FROM pg_class WHERE oid = TG_RELID) THEN
        RAISE EXCEPTION 'idempotency.%: only the owner of the tables adds or changes people', TG_TABLE_NAME
            USING ERRCODE = 'insufficient_privilege';
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER only_owner BEFORE INSERT OR UPDATE ON idempotency.operators
    FOR EACH STATEMENT EXECUTE FUNCTION idempotency.only_owner();
ALTER TABLE idempotency.operators ENABLE ALWAYS TRIGGER only_owner;

-- What a name belongs to: the same one may be another person's elsewhere. NULL: the table of operators.
ALTER TABLE idempotency.discards ADD COLUMN known_by text;
-- What the letter was when it was asked for: a message's letter becomes that of its operation.
ALTER TABLE idempotency.discards ADD COLUMN letter_reason text, ADD COLUMN letter_generation int;
UPDATE idempotency.discards d SET letter_reason = l.reason, letter_generation = l.generation
FROM idempotency.dead_letters l WHERE l.id = d.letter;
"""

# The data of an ended operation can be erased; then it stays as it is, whatever code or person would open it again.
ERASURE = """
ALTER TABLE idempotency.records ADD COLUMN erased_at timestamptz;
CREATE FUNCTION idempotency.keep_erased() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'idempotency.records: the data of % was erased, so it never runs again', OLD.task
        USING ERRCODE = 'check_violation', CONSTRAINT = 'erased_stays_erased';
END $$;
CREATE TRIGGER keep_erased BEFORE UPDATE ON idempotency.records
    FOR EACH ROW WHEN (OLD.erased_at IS NOT NULL AND (
        NEW.status <> OLD.status OR NEW.generation <> OLD.generation OR NEW.message <> OLD.message OR NEW.effects <> OLD.effects
        OR NEW.result IS DISTINCT FROM OLD.result OR NEW.erased_at IS DISTINCT FROM OLD.erased_at))
    EXECUTE FUNCTION idempotency.keep_erased();
"""

# Log and webhook are told of a letter independently, by whichever process can. What is there has been logged.
ALERTS = """
ALTER TABLE idempotency.dead_letters ADD COLUMN IF NOT EXISTS alert_logged_at timestamptz DEFAULT 'epoch';
ALTER TABLE idempotency.dead_letters ALTER COLUMN alert_logged_at DROP DEFAULT;
ALTER TABLE idempotency.outbox ADD COLUMN IF NOT EXISTS alert_logged_at timestamptz DEFAULT 'epoch';
ALTER TABLE idempotency.outbox ALTER COLUMN alert_logged_at DROP DEFAULT;
"""
# Where nothing has the webhook's address, every letter stays without `alerted_at`. By reason: many of one, as forged messages
# are, must not be read in front of another.
UNLOGGED = """
CREATE INDEX CONCURRENTLY dead_letters_unlogged ON idempotency.dead_letters (consumer_service, reason, id)
    WHERE alerted_at IS NULL AND alert_logged_at IS NULL
"""
UNSENT = """
CREATE INDEX CONCURRENTLY dead_letters_unsent ON idempotency.dead_letters (consumer_service, reason, id)
    WHERE alerted_at IS NULL AND alert_logged_at IS NOT NULL AND status = 'open'
"""
# Closed letters, too, say what a saga has made of an operation. Takes the place of `dead_letters_operation`.
OF_OPERATION = """
CREATE INDEX CONCURRENTLY dead_letters_of_operation ON idempotency.dead_letters (tenant, task, key)
"""
# As 0014 makes it by now: it had another condition at first, which the purge does not ask for.
SAGAS_OVER = """
CREATE INDEX CONCURRENTLY sagas_over ON idempotency.sagas (service, updated_at) WHERE observed OR status = 'COMPENSATING'
"""

# Relays and people run these functions, too, with their own rights. Without this, a function that the application has made in
# another schema of the path, for arguments that fit better than those of Postgres' own, would be run by them.
# CREATE OR REPLACE forgets it.
OWN_PATH = """
DO $$
DECLARE
    ours regprocedure;
BEGIN
    FOR ours IN SELECT oid FROM pg_proc WHERE pronamespace = 'idempotency'::regnamespace LOOP
        EXECUTE format('ALTER FUNCTION %s SET search_path = pg_catalog, pg_temp', ours);
    END LOOP;
END $$
"""


def upgrade() -> None:
    op.execute(ALERTS)
    for index in (UNLOGGED, UNSENT, OF_OPERATION, SAGAS_OVER):
        create_index(index.strip())  # commits what precedes it, which may be run again
    op.execute("DROP INDEX idempotency.dead_letters_operation")
    op.execute(WEBHOOKS)
    # a running operation was told that what it waits for is known
    op.execute("ALTER TABLE idempotency.records ADD COLUMN woken boolean NOT NULL DEFAULT false")
    # a person has undone by hand what the letter's operation, called by a saga, has done or may have done
    op.execute("ALTER TABLE idempotency.dead_letters ADD COLUMN is_undone boolean NOT NULL DEFAULT false")
    # as they were, an end that is corrected in its transaction was lost; code of 0014 works with these, too
    op.execute(RESUME_SAGA + END_OF_OPERATION)
    op.execute(AUDIT_CHAIN)
    op.execute(KEEP_ENDED)
    op.execute(PEOPLE)
    op.execute(ERASURE)
    op.execute(OWN_PATH)


def downgrade() -> None:
    op.execute("""
        DROP TRIGGER keep_erased ON idempotency.records;
        DROP FUNCTION idempotency.keep_erased();
        ALTER TABLE idempotency.records DROP COLUMN erased_at;
        ALTER TABLE idempotency.discards DROP COLUMN known_by, DROP COLUMN letter_reason, DROP COLUMN letter_generation;
        DROP TRIGGER only_owner ON idempotency.operators;
        DROP FUNCTION idempotency.only_owner();
        DROP FUNCTION idempotency.keep_ended() CASCADE;
        DROP TRIGGER chain ON idempotency.audit;
        DROP FUNCTION idempotency.chain_audit();
        DROP TABLE idempotency.audit_chain, idempotency.audit_head;
        DROP TABLE idempotency.webhook_attempts, idempotency.webhook_deliveries, idempotency.webhook_secrets,
            idempotency.webhook_endpoints
    """)
    op.execute("ALTER TABLE idempotency.dead_letters DROP COLUMN is_undone")
    op.execute("ALTER TABLE idempotency.records DROP COLUMN woken")
    op.execute("""
        DROP INDEX idempotency.dead_letters_unlogged, idempotency.dead_letters_unsent, idempotency.dead_letters_of_operation;
        CREATE INDEX dead_letters_operation ON idempotency.dead_letters (tenant, task, key) WHERE status = 'open'
    """)
    op.execute("ALTER TABLE idempotency.dead_letters DROP COLUMN alert_logged_at")
    op.execute("ALTER TABLE idempotency.outbox DROP COLUMN alert_logged_at")
