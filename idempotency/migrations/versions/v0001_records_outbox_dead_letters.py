"""The record, the outbox and the dead letters.

Arguments, results and errors are text, never jsonb: jsonb would rewrite 1e16, reorder members and refuse \\u0000,
and a stored result is promised byte for byte. The CHECKs refuse what the code should never write.
"""

from alembic import op

revision = "0001"
down_revision = None

TABLES = r"""
CREATE SEQUENCE idempotency.fence;

CREATE TABLE idempotency.records (
    tenant        text        NOT NULL,
    operation     text        NOT NULL,
    key           text        NOT NULL CHECK (char_length(key) BETWEEN 1 AND 255),
    status        text        NOT NULL CHECK (status IN ('started', 'released', 'completed', 'failed')),
    generation    int         NOT NULL DEFAULT 1 CHECK (generation >= 1),
    fence         bigint      NOT NULL,
    token         text,
    attempts      int         NOT NULL DEFAULT 1 CHECK (attempts >= 0),
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
    PRIMARY KEY (tenant, operation, key),
    CONSTRAINT started_has_a_holder CHECK (
        (status = 'started') <= (token IS NOT NULL AND locked_by IS NOT NULL)
        AND (status = 'started') = (locked_until IS NOT NULL)),
    CONSTRAINT released_has_no_holder CHECK (
        (status = 'released') <= (token IS NULL AND locked_by IS NULL)
        AND (status = 'released') = (available_at IS NOT NULL)),
    CONSTRAINT completed_has_a_result CHECK (
        (status = 'completed') = (result IS NOT NULL)
        AND (status = 'completed') <= (response_code IS NOT NULL)),
    CONSTRAINT failed_has_an_error CHECK ((status = 'failed') <= (error IS NOT NULL)),
    CONSTRAINT terminal_has_its_times CHECK (
        (status IN ('completed', 'failed')) = (completed_at IS NOT NULL)
        AND (status IN ('completed', 'failed')) = (expires_at IS NOT NULL))
);
CREATE INDEX records_started ON idempotency.records (locked_until) WHERE status = 'started';
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
    op.execute("DROP FUNCTION idempotency.wake_relay()")
    op.execute("DROP SEQUENCE idempotency.fence")
