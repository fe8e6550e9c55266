"""The record, the outbox and the dead letters.

Arguments, results and errors are text, never jsonb: jsonb would rewrite 1e16, reorder members and refuse \\u0000,
and a stored result is promised byte for byte. CHECKs, and one trigger, refuse what the code should never write.
"""

from alembic import op

revision = "0001"
down_revision = None

TABLES = r"""
CREATE SEQUENCE idempotency.fence;

CREATE TABLE idempotency.records (
    tenant        text        NOT NULL,
    operation     text        NOT NULL,
    key           text        NOT NULL,
    status        text        NOT NULL,
    generation    int         NOT NULL DEFAULT 1,
    fence         bigint      NOT NULL,
    token         text,
    attempts      int         NOT NULL DEFAULT 1,
    duplicates    int         NOT NULL DEFAULT 0,
    locked_until  timestamptz,
    locked_by     text,
    available_at  timestamptz,
    fingerprint   text        NOT NULL,
    message       text        NOT NULL,
    queue         text        NOT NULL DEFAULT '',
    effects       jsonb       NOT NULL DEFAULT '{}',
    result        text,
    response_code int,
    first_error   text,
    error         text,
    created_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    opened_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    completed_at  timestamptz,
    expires_at    timestamptz,
    PRIMARY KEY (tenant, operation, key)
);
-- What CHECKs would say, as a trigger: Postgres reads the text of every CHECK anew for every statement, but keeps the
-- plan of a function.
CREATE FUNCTION idempotency.check_record() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    broken text := CASE
        WHEN NEW.status NOT IN ('started', 'released', 'completed', 'failed') THEN 'records_status_check'
        WHEN char_length(NEW.key) NOT BETWEEN 1 AND 255 THEN 'records_key_check'
        WHEN NEW.generation < 1 THEN 'records_generation_check'
        WHEN NEW.attempts < 0 THEN 'records_attempts_check'
        WHEN (NEW.status = 'started') <> (NEW.locked_until IS NOT NULL)
            OR NEW.status = 'started' AND num_nulls(NEW.token, NEW.locked_by) > 0 THEN 'started_has_a_holder'
        WHEN (NEW.status = 'released') <> (NEW.available_at IS NOT NULL)
            OR NEW.status = 'released' AND num_nonnulls(NEW.token, NEW.locked_by) > 0 THEN 'released_has_no_holder'
        WHEN (NEW.status = 'completed') <> (NEW.result IS NOT NULL)
            OR NEW.status = 'completed' AND NEW.response_code IS NULL THEN 'completed_has_a_result'
        WHEN NEW.status = 'failed' AND NEW.error IS NULL THEN 'failed_has_an_error'
        WHEN num_nulls(NEW.completed_at, NEW.expires_at) <>
            CASE WHEN NEW.status IN ('completed', 'failed') THEN 0 ELSE 2 END THEN 'terminal_has_its_times'
    END;
BEGIN
    IF broken IS NOT NULL THEN
        RAISE EXCEPTION 'a record that breaks %', broken USING ERRCODE = 'check_violation', CONSTRAINT = broken;
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER check_record BEFORE INSERT OR UPDATE ON idempotency.records
    FOR EACH ROW EXECUTE FUNCTION idempotency.check_record();
-- Not "WHERE status = 'started'", which means the same: every guarded write says that, and the planner would look for
-- its row in this small index, among the dead entries of all that has ended, and not in the primary key.
CREATE INDEX records_held ON idempotency.records (locked_until) WHERE locked_until IS NOT NULL;
CREATE INDEX records_expiring ON idempotency.records (expires_at) WHERE status IN ('completed', 'failed');

CREATE TABLE idempotency.outbox (
    id            bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    event_id      text        NOT NULL UNIQUE,
    tenant        text        NOT NULL,
    operation     text        NOT NULL,
    key           text        NOT NULL,
    fingerprint   text        NOT NULL,
    message       text        NOT NULL,
    queue         text        NOT NULL DEFAULT '',
    ordering_key  text,
    origin        text        NOT NULL CHECK (origin IN ('enqueue', 'retry', 'recover', 'reconcile', 'replay')),
    status        text        NOT NULL DEFAULT 'pending' CHECK (status IN ('pending', 'published', 'failed')),
    attempts      int         NOT NULL DEFAULT 0,
    resends       int         NOT NULL DEFAULT 0,
    last_error    text,
    available_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    relayed_until timestamptz,
    created_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    published_at  timestamptz,
    settled_at    timestamptz,
    CONSTRAINT published_has_its_time CHECK ((status = 'published') <= (published_at IS NOT NULL)),
    CONSTRAINT failed_has_an_error CHECK ((status = 'failed') <= (last_error IS NOT NULL))
);
CREATE INDEX outbox_pending ON idempotency.outbox (available_at, id) WHERE status = 'pending';
CREATE INDEX outbox_ordered ON idempotency.outbox (operation, ordering_key, id)
    WHERE status <> 'published' AND ordering_key IS NOT NULL;
CREATE INDEX outbox_unsettled ON idempotency.outbox (published_at) WHERE settled_at IS NULL;
CREATE INDEX outbox_operation ON idempotency.outbox (tenant, operation, key);

-- A relay that sleeps says so for as long as it sleeps. NOTIFY takes a lock that makes commits wait for each other,
-- so nobody notifies while the relays are busy anyway.
CREATE TABLE idempotency.relay_sleep (until timestamptz NOT NULL);
INSERT INTO idempotency.relay_sleep VALUES ('-infinity');
CREATE FUNCTION idempotency.wake_relay() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM idempotency.relay_sleep WHERE until > clock_timestamp()) THEN
        PERFORM pg_notify('idempotency_outbox', '');
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER wake_relay AFTER INSERT ON idempotency.outbox
    FOR EACH STATEMENT EXECUTE FUNCTION idempotency.wake_relay();

CREATE TABLE idempotency.dead_letters (
    id               bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    source           text        NOT NULL CHECK (source IN ('operation', 'broker', 'relay')),
    outbox_id        bigint      UNIQUE,
    event_id         text,
    tenant           text,
    operation        text,
    key              text,
    generation       int,
    fingerprint      text,
    queue            text,
    task             text,
    consumer_service text,
    reason           text        NOT NULL,
    first_error      text,
    last_error       text,
    attempts         int,
    headers          text,
    payload          text        NOT NULL,
    status           text        NOT NULL DEFAULT 'open' CHECK (status IN ('open', 'replayed', 'discarded')),
    failed_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    settled_at       timestamptz,
    UNIQUE (tenant, operation, key, generation, reason, fingerprint),
    CONSTRAINT settled_has_its_time CHECK ((status = 'open') = (settled_at IS NULL))
);
CREATE INDEX dead_letters_open ON idempotency.dead_letters (operation, reason) WHERE status = 'open';
"""


def upgrade() -> None:
    op.execute(TABLES)


def downgrade() -> None:
    op.execute("DROP TABLE idempotency.dead_letters, idempotency.outbox, idempotency.records, idempotency.relay_sleep")
    op.execute("DROP FUNCTION idempotency.wake_relay(), idempotency.check_record()")
    op.execute("DROP SEQUENCE idempotency.fence")
