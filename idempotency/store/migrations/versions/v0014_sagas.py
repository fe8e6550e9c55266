"""Sagas: what each has recorded, what it waits for, and the events that are kept for it.

Code of 0013 runs beside this: it neither runs sagas nor publishes to them, and may not end one (`end_of_operation`).
"""

from alembic import op

revision = "0014"
down_revision = "0013"

TABLES = """
-- A saga is an operation. Its record is in `records`, with the same tenant, task and key; what an observer notes about a
-- process that no saga conducts has none. Locked before the record, by everybody.
CREATE TABLE idempotency.sagas (
    id         uuid        PRIMARY KEY DEFAULT gen_random_uuid(),
    tenant     text        NOT NULL,
    task       text        NOT NULL,
    key        text        NOT NULL,
    service    text        NOT NULL,  -- whose events it waits for
    -- noted by an observer, for people to read: an operation of its name and key goes its own way
    observed   boolean     NOT NULL DEFAULT false,
    generation int         NOT NULL DEFAULT 1,
    entity_id  text        NOT NULL CHECK (char_length(entity_id) BETWEEN 1 AND 255),
    status     text        NOT NULL DEFAULT 'RUNNING'
        CHECK (status IN ('RUNNING', 'COMPLETED', 'FAILED', 'COMPENSATING')),
    -- why it is undone
    error      text,
    -- why it goes no further without a deploy or a person, and how often it has tried since
    stopped    text,
    stops      int         NOT NULL DEFAULT 0,
    -- how far its code has come in these attempts, as far as that has been noted
    reached    int         NOT NULL DEFAULT 0,
    -- what has happened that it may have waited for, so that it does not wait for what came a moment ago
    signals    bigint      NOT NULL DEFAULT 0,
    -- how much of what it waits for has to happen yet; NULL: it does not wait
    waits_for  int,
    -- events from then on are for it: when the transaction began that asked for it first; infinity: none is
    accepted_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (tenant, task, key)
);
-- Lists for people begin with the newest. No column that a wait changes, so that it updates no index.
CREATE INDEX sagas_newest ON idempotency.sagas (created_at);
CREATE INDEX sagas_stopped ON idempotency.sagas (created_at) WHERE stopped IS NOT NULL;
-- for the purge, which must read none that waits, nor what goes with its record
CREATE INDEX sagas_over ON idempotency.sagas (updated_at) WHERE observed AND status <> 'RUNNING' OR status = 'COMPENSATING';
CREATE INDEX sagas_running ON idempotency.sagas (accepted_at) WHERE status = 'RUNNING';

CREATE TABLE idempotency.saga_steps (
    saga_id        uuid        NOT NULL REFERENCES idempotency.sagas ON DELETE CASCADE,
    generation     int         NOT NULL,
    position       int         NOT NULL,
    tenant         text        NOT NULL,
    name           text        NOT NULL,
    kind           text        NOT NULL
        CHECK (kind IN ('step', 'effect', 'call', 'wait', 'timer', 'value', 'version', 'undo', 'seen')),
    state          text        NOT NULL CHECK (state IN ('begun', 'done', 'failed', 'timed_out', 'not_happened')),
    args           text,
    result         text,
    error          text,
    -- of an effect, as the record of another operation has it
    entry          jsonb,
    -- the task that undoes it, and its arguments
    undo           text,
    undo_arguments text,
    -- of an undo: the position of what it undoes
    undoes         int,
    -- of a call or an undo: its operation
    call_task      text,
    call_key       text,
    -- of a wait: the event, or the end
    event_type     text,
    match          text,
    event_id       bigint,
    due_at         timestamptz,
    begun_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at       timestamptz,
    PRIMARY KEY (saga_id, generation, position)
);
CREATE INDEX saga_steps_calls ON idempotency.saga_steps (tenant, call_task, call_key) WHERE call_key IS NOT NULL;
CREATE INDEX saga_steps_waits ON idempotency.saga_steps (tenant, event_type, match)
    WHERE kind = 'wait' AND state = 'begun';
CREATE INDEX saga_steps_events ON idempotency.saga_steps (saga_id, event_id) WHERE event_id IS NOT NULL;

-- Events that sagas may wait for, whether one waits already or not.
CREATE TABLE idempotency.saga_events (
    id          bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant      text        NOT NULL,
    service     text        NOT NULL,  -- only its sagas wait for it
    event_type  text        NOT NULL,
    match       text        NOT NULL,
    event_id    text        NOT NULL,
    event       text        NOT NULL,
    -- of an event that a person has signalled: for this saga alone
    saga_id     uuid,
    -- whether those that wait for it have been told
    signalled   boolean     NOT NULL DEFAULT false,
    repeats     int         NOT NULL DEFAULT 0,
    received_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (tenant, service, event_type, match, event_id)
);
CREATE INDEX saga_events_in_order ON idempotency.saga_events (tenant, service, event_type, match, id);
CREATE INDEX saga_events_received ON idempotency.saga_events (received_at);
-- The ended saga that has gone on from the failure of a letter's operation, so that nobody may replay it; also after it is purged.
ALTER TABLE idempotency.dead_letters ADD COLUMN used_by text;
CREATE INDEX saga_events_unsignalled ON idempotency.saga_events (id) WHERE NOT signalled;
"""

FUNCTIONS = """
-- A row's transaction is what asks for its operation: what that published before the row counts as published after it.
ALTER TABLE idempotency.outbox ALTER COLUMN created_at SET DEFAULT now();

-- When an operation was asked for first. Without an outbox row, as `apply_async` sends it: when it was claimed first.
CREATE FUNCTION idempotency.accepted_at(of_tenant text, of_task text, of_key text) RETURNS timestamptz
LANGUAGE sql VOLATILE AS $$
    SELECT coalesce(
        least((SELECT min(o.created_at) FROM idempotency.outbox o
               WHERE o.tenant = of_tenant AND o.task = of_task AND o.key = of_key),
              (SELECT r.created_at FROM idempotency.records r
               WHERE r.tenant = of_tenant AND r.task = of_task AND r.key = of_key)),
        clock_timestamp())
$$;

-- A saga goes on: its next delivery, written when it began to wait, is due. Its budget of time begins anew.
CREATE FUNCTION idempotency.resume_saga(saga idempotency.sagas) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    -- If that was due before and has died, there is another. Letters are locked before their record, by everybody.
    WITH died AS (
        UPDATE idempotency.dead_letters d SET status = 'replayed', closed_at = clock_timestamp()
        FROM idempotency.records r
        WHERE d.tenant = saga.tenant AND d.task = saga.task AND d.key = saga.key AND d.status = 'open'
          AND d.source <> 'operation' AND d.reason NOT IN ('fingerprint_mismatch', 'service_mismatch')
          AND r.tenant = saga.tenant AND r.task = saga.task AND r.key = saga.key
          AND r.status = 'released' AND r.message <> ''
        RETURNING r.*
    )
    INSERT INTO idempotency.outbox (message_id, tenant, task, key, fingerprint, message, queue, origin, generation, service)
    SELECT gen_random_uuid()::text, tenant, task, key, fingerprint, message, queue, 'recover', generation, service
    FROM died LIMIT 1;
    IF saga.status = 'COMPENSATING' THEN  -- what has used up the attempts is over
        UPDATE idempotency.records r SET attempts = 0, spent_at = NULL
        WHERE r.tenant = saga.tenant AND r.task = saga.task AND r.key = saga.key AND r.status IN ('started', 'released');
    END IF;
    UPDATE idempotency.records r
    SET available_at = clock_timestamp(), opened_at = clock_timestamp(), updated_at = clock_timestamp()
    WHERE r.tenant = saga.tenant AND r.task = saga.task AND r.key = saga.key
      AND r.status = 'released' AND r.available_at > clock_timestamp();
    UPDATE idempotency.outbox o SET available_at = clock_timestamp()
    WHERE o.tenant = saga.tenant AND o.task = saga.task AND o.key = saga.key
      AND o.status = 'pending' AND o.available_at > clock_timestamp();
    IF FOUND AND EXISTS (SELECT FROM idempotency.relay_sleep WHERE until > clock_timestamp()) THEN
        PERFORM pg_notify('idempotency_outbox', '');
    END IF;
END $$;

-- One of the things that a saga may wait for has happened. The row's lock orders this and the beginning of a wait: either
-- the wait sees the signal, or the signal sees the wait.
CREATE FUNCTION idempotency.signal_saga(saga_id uuid) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    saga idempotency.sagas;
BEGIN
    SELECT * INTO saga FROM idempotency.sagas WHERE id = saga_id FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    PERFORM set_config('idempotency.signalling', 'on', true);  -- it holds a saga until it commits
    UPDATE idempotency.sagas
    SET signals = signals + 1, waits_for = CASE WHEN saga.waits_for > 1 THEN saga.waits_for - 1 END,
        updated_at = clock_timestamp()
    WHERE id = saga.id;
    IF saga.waits_for = 1 THEN
        PERFORM idempotency.resume_saga(saga);
    END IF;
END $$;

-- One of 1,024 locks for the events that match alike. One each, and a transaction that publishes many would need more locks than
-- Postgres has room for (`max_locks_per_transaction`). So one in 1,024 waits begins behind a publisher of something else.
CREATE FUNCTION idempotency.event_lock(tenant text, service text, event_type text, match text) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $$
    SELECT hashtextextended('idempotency.event', 0)
        # (hashtextextended(concat_ws(E'\\n', tenant, service, event_type, match), 0) & 1023)
$$;

-- An event, in its publisher's transaction. Publishers share the lock; who begins to wait takes it alone, and so finds the
-- event or is found by it. `of_saga`: only this one gets it.
CREATE FUNCTION idempotency.keep_event(
    of_tenant text, of_service text, of_type text, of_match text, of_id text, event text, of_saga uuid DEFAULT NULL
)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared(idempotency.event_lock(of_tenant, of_service, of_type, of_match));
    INSERT INTO idempotency.saga_events AS e (tenant, service, event_type, match, event_id, event, saga_id)
    VALUES (idempotency.about(of_tenant), of_service, of_type, of_match, of_id, event, of_saga)
    ON CONFLICT (tenant, service, event_type, match, event_id) DO UPDATE SET repeats = e.repeats + 1;
END $$;

-- Sagas that wait for events which have not signalled yet. Two publishers of several events lock the sagas in one order,
-- and so never wait for each other. One that holds a saga already (a call of it has ended in this transaction, or constraints
-- are checked at once) waits for no other; then recovery signals.
CREATE FUNCTION idempotency.signal_from(first bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    waiting uuid;
    holds_one boolean := coalesce(current_setting('idempotency.signalling', true), '') = 'on';
    events bigint[] := ARRAY(SELECT id FROM idempotency.saga_events WHERE id >= first AND NOT signalled);
BEGIN
    FOR waiting IN
        SELECT DISTINCT s.saga_id
        FROM idempotency.saga_events e JOIN idempotency.saga_steps s USING (tenant, event_type, match)
        JOIN idempotency.sagas g ON g.id = s.saga_id AND g.service = e.service
        WHERE e.id = ANY(events) AND s.kind = 'wait' AND s.state = 'begun' AND (e.saga_id IS NULL OR s.saga_id = e.saga_id)
        ORDER BY s.saga_id
    LOOP
        IF holds_one THEN
            PERFORM FROM idempotency.sagas WHERE id = waiting FOR NO KEY UPDATE SKIP LOCKED;
            IF NOT FOUND THEN
                RETURN;
            END IF;
        END IF;
        PERFORM idempotency.signal_saga(waiting);
    END LOOP;
    UPDATE idempotency.saga_events SET signalled = true WHERE id = ANY(events);
END $$;

-- A saga that is undone waits for no event any more.
CREATE FUNCTION idempotency.close_waits() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    UPDATE idempotency.saga_steps s SET state = 'not_happened', ended_at = clock_timestamp()
    WHERE s.saga_id = NEW.id AND s.generation = NEW.generation AND s.kind IN ('wait', 'timer') AND s.state = 'begun';
    RETURN NULL;
END $$;
CREATE TRIGGER close_waits AFTER UPDATE OF status ON idempotency.sagas
    FOR EACH ROW WHEN (NEW.status = 'COMPENSATING' AND OLD.status <> NEW.status)
    EXECUTE FUNCTION idempotency.close_waits();

-- When the publisher commits, the first of its events signals for all of them. At another isolation level than READ
-- COMMITTED it may not see who waits; then recovery signals.
CREATE FUNCTION idempotency.signal_waiting() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('transaction_isolation') = 'read committed'
        AND EXISTS (SELECT FROM idempotency.saga_events WHERE id = NEW.id AND NOT signalled)
    THEN
        PERFORM idempotency.signal_from(NEW.id);
    END IF;
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER signal_waiting AFTER INSERT ON idempotency.saga_events
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION idempotency.signal_waiting();

-- The end of an operation: whoever called it goes on, in the same commit. And nobody but its own code ends a saga: it has
-- to be undone first.
CREATE FUNCTION idempotency.end_of_operation() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    found record;
BEGIN
    IF EXISTS (
        SELECT FROM idempotency.sagas g
        WHERE g.tenant = NEW.tenant AND g.task = NEW.task AND g.key = NEW.key AND NOT g.observed
          AND g.status <> CASE NEW.status WHEN 'completed' THEN 'COMPLETED' ELSE 'FAILED' END
    ) THEN
        RAISE EXCEPTION 'a saga that has not ended' USING ERRCODE = 'check_violation', CONSTRAINT = 'saga_has_ended';
    END IF;
    FOR found IN
        SELECT s.saga_id, s.generation, s.position FROM idempotency.saga_steps s
        WHERE s.tenant = NEW.tenant AND s.call_task = NEW.task AND s.call_key = NEW.key
          AND (s.state = 'begun' OR s.kind = 'undo' AND s.state = 'failed' AND NEW.status = 'completed'
            -- a person has said what became of it
            OR s.kind = 'call' AND s.state = 'failed' AND NEW.status = 'failed')
        ORDER BY s.saga_id, s.generation, s.position
    LOOP
        PERFORM idempotency.signal_saga(found.saga_id);
        UPDATE idempotency.saga_steps s
        SET state = CASE NEW.status WHEN 'completed' THEN 'done' ELSE 'failed' END,
            result = NEW.result, error = CASE NEW.status WHEN 'failed' THEN NEW.error END, ended_at = clock_timestamp()
        WHERE (s.saga_id, s.generation, s.position) = (found.saga_id, found.generation, found.position);
    END LOOP;
    RETURN NULL;
END $$;
CREATE TRIGGER end_of_operation AFTER INSERT OR UPDATE OF status ON idempotency.records
    FOR EACH ROW WHEN (NEW.status IN ('completed', 'failed')) EXECUTE FUNCTION idempotency.end_of_operation();

-- A saga's rows go with its record.
CREATE FUNCTION idempotency.forget_saga() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (
        SELECT FROM idempotency.sagas g WHERE (g.tenant, g.task, g.key, g.observed) = (OLD.tenant, OLD.task, OLD.key, false)
    ) THEN  -- whoever deletes no saga needs no right to
        DELETE FROM idempotency.sagas g WHERE (g.tenant, g.task, g.key, g.observed) = (OLD.tenant, OLD.task, OLD.key, false);
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER forget_saga AFTER DELETE ON idempotency.records
    FOR EACH ROW EXECUTE FUNCTION idempotency.forget_saga();

-- Results are text, of which jsonb refuses some.
CREATE FUNCTION idempotency.as_jsonb(stored text) RETURNS jsonb LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RETURN stored::jsonb;
EXCEPTION WHEN OTHERS THEN
    RETURN to_jsonb(stored);
END $$;
"""

# Computed from the rows rather than stored, so that the thousandth step costs what the tenth does, and the two cannot
# disagree. `context` holds the first 16 MiB of a saga's results: Postgres makes no larger one, and refuses the whole list rather
# than the one saga. With the reader's own rights where Postgres can do that (15); before, only for roles that see all tenants.
VIEW = """
CREATE VIEW idempotency.saga_instances {options} AS
SELECT g.tenant, g.id AS saga_id, g.task AS saga_type, g.key, g.entity_id, last.name AS current_step, g.status,
       coalesce(data.context, '{{}}') AS context, g.created_at,
       greatest(g.updated_at, last.begun_at, last.ended_at) AS updated_at
FROM idempotency.sagas g
LEFT JOIN LATERAL (
    SELECT s.name, s.begun_at, s.ended_at FROM idempotency.saga_steps s
    WHERE s.saga_id = g.id AND s.generation = g.generation ORDER BY s.position DESC LIMIT 1
) last ON true
LEFT JOIN LATERAL (
    SELECT jsonb_object_agg(r.name, idempotency.as_jsonb(r.result)) AS context
    FROM (
        SELECT s.name, results.result, sum(octet_length(results.result)) OVER (ORDER BY s.position) AS size
        FROM idempotency.saga_steps s, coalesce(s.result, s.entry ->> 'result') AS results(result)
        WHERE s.saga_id = g.id AND s.generation = g.generation AND results.result IS NOT NULL
    ) r
    WHERE r.size <= 16 * 1024 * 1024
) data ON true
"""


def upgrade() -> None:
    op.execute(TABLES)
    op.execute(FUNCTIONS)
    version = op.get_bind().exec_driver_sql("SELECT current_setting('server_version_num')::int").scalar_one()
    op.execute(VIEW.format(options="WITH (security_invoker = true)" if version >= 150000 else ""))


def downgrade() -> None:
    op.execute("ALTER TABLE idempotency.outbox ALTER COLUMN created_at SET DEFAULT clock_timestamp()")
    op.execute("DROP FUNCTION idempotency.accepted_at(text, text, text)")
    op.execute("ALTER TABLE idempotency.dead_letters DROP COLUMN used_by")
    op.execute("DROP VIEW idempotency.saga_instances")
    for trigger in ("forget_saga", "end_of_operation"):
        op.execute(f"DROP TRIGGER {trigger} ON idempotency.records")
    op.execute("DROP FUNCTION idempotency.forget_saga(), idempotency.end_of_operation(), idempotency.as_jsonb(text)")
    op.execute("DROP TRIGGER signal_waiting ON idempotency.saga_events")
    op.execute("DROP FUNCTION idempotency.signal_waiting(), idempotency.signal_from(bigint)")
    op.execute("DROP FUNCTION idempotency.keep_event(text, text, text, text, text, text, uuid)")
    op.execute("DROP FUNCTION idempotency.event_lock(text, text, text, text), idempotency.signal_saga(uuid)")
    op.execute("DROP FUNCTION idempotency.resume_saga(idempotency.sagas)")
    op.execute("DROP TABLE idempotency.saga_events, idempotency.saga_steps, idempotency.sagas")
    op.execute("DROP FUNCTION idempotency.close_waits()")
