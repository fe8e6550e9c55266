"""The functions and triggers of migration 0014, which are most of what a saga's waiting is."""

RESUME_SAGA = """
-- A saga goes on: its next delivery, written when it began to wait, is due. Its budget of time begins anew.
CREATE OR REPLACE FUNCTION idempotency.resume_saga(saga idempotency.sagas) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    -- the record before its letters, by everybody; one that is running has its own delivery
    PERFORM FROM idempotency.records r
    WHERE r.tenant = saga.tenant AND r.task = saga.task AND r.key = saga.key AND r.status = 'released' FOR NO KEY UPDATE;
    -- If that was due before and has died, there is another.
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
"""

END_OF_OPERATION = """
-- When an operation ends, the sagas that called it go on, in the same commit. A record of a saga ends only once the saga has.
CREATE OR REPLACE FUNCTION idempotency.end_of_operation() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    found record;
    saga idempotency.sagas;
    is_seen boolean;
    mark text;
    -- Calls that this transaction has failed. It may correct that before anyone has seen it.
    failed_here text := coalesce(current_setting('idempotency.failed_here', true), '');
BEGIN
    IF EXISTS (
        SELECT FROM idempotency.sagas g
        WHERE g.tenant = NEW.tenant AND g.task = NEW.task AND g.key = NEW.key AND NOT g.observed
          AND g.status <> CASE NEW.status WHEN 'completed' THEN 'COMPLETED' ELSE 'FAILED' END
    ) THEN
        RAISE EXCEPTION 'a saga that has not ended' USING ERRCODE = 'check_violation', CONSTRAINT = 'saga_has_ended';
    END IF;
    FOR found IN
        SELECT s.saga_id, s.generation, s.position, s.state, s.kind, s.ended_at FROM idempotency.saga_steps s
        WHERE s.tenant = NEW.tenant AND s.call_task = NEW.task AND s.call_key = NEW.key
          AND (s.state = 'begun' OR s.state = 'failed' AND (s.kind = 'call' OR NEW.status = 'completed'))
        ORDER BY s.saga_id, s.generation, s.position
    LOOP
        -- what it records from here on, it records after this
        SELECT * INTO saga FROM idempotency.sagas g WHERE g.id = found.saga_id FOR NO KEY UPDATE;
        mark := format('[%s %s %s]', found.saga_id, found.generation, found.position);
        -- A person has said what became of it. Code that has seen the failure gets the same one again.
        IF found.kind = 'call' AND found.state = 'failed' THEN
            CONTINUE WHEN saga.generation <> found.generation OR saga.status NOT IN ('RUNNING', 'COMPENSATING');
            is_seen := position(mark IN failed_here) = 0 AND (
                saga.waits_for IS NULL OR saga.stopped IS NOT NULL OR EXISTS (
                    SELECT FROM idempotency.saga_steps s
                    WHERE s.saga_id = saga.id AND s.generation = saga.generation AND s.begun_at > found.ended_at));
            CONTINUE WHEN saga.status = 'RUNNING' AND is_seen;
        END IF;
        IF found.state = 'begun' OR saga.status = 'COMPENSATING' THEN
            PERFORM idempotency.signal_saga(found.saga_id);
        END IF;
        UPDATE idempotency.saga_steps s
        SET state = CASE NEW.status WHEN 'completed' THEN 'done' ELSE 'failed' END,
            result = NEW.result, error = CASE NEW.status WHEN 'failed' THEN NEW.error END,
            -- after all that is recorded by now, also if the clock has gone back: a failover leads to another server's
            ended_at = greatest(clock_timestamp(), (
                SELECT l.begun_at FROM idempotency.saga_steps l
                WHERE l.saga_id = found.saga_id AND l.generation = found.generation ORDER BY l.position DESC LIMIT 1))
        WHERE (s.saga_id, s.generation, s.position) = (found.saga_id, found.generation, found.position);
        IF NEW.status = 'failed' THEN
            failed_here := failed_here || mark;
            PERFORM set_config('idempotency.failed_here', failed_here, true);
        END IF;
    END LOOP;
    RETURN NULL;
END $$;
"""

FUNCTIONS = (
    """
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

"""
    + RESUME_SAGA
    + """
-- One of the things that a saga may wait for has happened. By the row's lock, this or the beginning of a wait sees the other.
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
) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock_shared(idempotency.event_lock(of_tenant, of_service, of_type, of_match));
    INSERT INTO idempotency.saga_events AS e (tenant, service, event_type, match, event_id, event, saga_id)
    VALUES (idempotency.about(of_tenant), of_service, of_type, of_match, of_id, event, of_saga)
    ON CONFLICT (tenant, service, event_type, match, event_id) DO UPDATE SET repeats = e.repeats + 1;
END $$;

-- Sagas that wait for events which have not signalled yet. Two publishers of several events lock the sagas in one order,
-- and so never wait for each other. One that holds a saga already (a call of it has ended in this transaction, or constraints
-- are checked at once) waits for no other; then recovery signals. So it does if one of them cannot be woken.
CREATE FUNCTION idempotency.signal_from(first bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    waiting uuid;
    holds_one boolean := coalesce(current_setting('idempotency.signalling', true), '') = 'on';
    events bigint[] := ARRAY(SELECT id FROM idempotency.saga_events WHERE id >= first AND NOT signalled);
BEGIN
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
    EXCEPTION WHEN OTHERS THEN  -- a saga that cannot be woken is not its publisher's fault
        IF SQLSTATE LIKE '40%' THEN  -- a deadlock is, which the publisher repeats
            RAISE;
        END IF;
    END;
END $$;

-- A saga that is undone waits for no event any more, and takes its failed calls for what people have found of them since.
CREATE FUNCTION idempotency.close_waits() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    UPDATE idempotency.saga_steps s SET state = 'not_happened', ended_at = clock_timestamp()
    WHERE s.saga_id = NEW.id AND s.generation = NEW.generation AND s.kind IN ('wait', 'timer') AND s.state = 'begun';
    UPDATE idempotency.saga_steps s
    SET state = CASE r.status WHEN 'completed' THEN 'done' ELSE 'failed' END, result = r.result, error = r.error
    FROM idempotency.records r
    WHERE s.saga_id = NEW.id AND s.generation = NEW.generation AND s.kind = 'call' AND s.state = 'failed'
      AND (r.tenant, r.task, r.key) = (s.tenant, s.call_task, s.call_key) AND r.status IN ('completed', 'failed');
    RETURN NULL;
END $$;
CREATE TRIGGER close_waits AFTER UPDATE OF status ON idempotency.sagas
    FOR EACH ROW WHEN (NEW.status = 'COMPENSATING' AND OLD.status <> NEW.status) EXECUTE FUNCTION idempotency.close_waits();

-- When the publisher commits, the first of its events signals for all of them. At another isolation level than READ
-- COMMITTED it may not see who waits; then recovery signals.
CREATE FUNCTION idempotency.signal_waiting() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('transaction_isolation') = 'read committed'
        AND EXISTS (SELECT FROM idempotency.saga_events WHERE id = NEW.id AND NOT signalled) THEN
        PERFORM idempotency.signal_from(NEW.id);
    END IF;
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER signal_waiting AFTER INSERT ON idempotency.saga_events
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION idempotency.signal_waiting();

"""
    + END_OF_OPERATION
    + """CREATE TRIGGER end_of_operation AFTER INSERT OR UPDATE OF status ON idempotency.records
    FOR EACH ROW WHEN (NEW.status IN ('completed', 'failed')) EXECUTE FUNCTION idempotency.end_of_operation();

-- A saga's rows go with its record.
CREATE FUNCTION idempotency.forget_saga() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM idempotency.sagas g WHERE (g.tenant, g.task, g.key, g.observed) = (OLD.tenant, OLD.task, OLD.key, false))
    THEN  -- whoever deletes no saga needs no right to
        DELETE FROM idempotency.sagas g WHERE (g.tenant, g.task, g.key, g.observed) = (OLD.tenant, OLD.task, OLD.key, false);
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER forget_saga AFTER DELETE ON idempotency.records FOR EACH ROW EXECUTE FUNCTION idempotency.forget_saga();

-- Results are text, of which jsonb refuses some.
CREATE FUNCTION idempotency.as_jsonb(stored text) RETURNS jsonb LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RETURN stored::jsonb;
EXCEPTION WHEN OTHERS THEN
    RETURN to_jsonb(stored);
END $$;
"""
)
