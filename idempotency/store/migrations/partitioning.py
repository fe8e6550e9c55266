"""The functions that keep a partitioned table of records: made by `store/partitioning.py`, called by `store/partitions.py`.

They run with their owner's rights, since only an owner makes and drops tables, and are for those who purge: nobody else has a
right to their schema.
"""

from ..inserting import LOCKED, lock_of, moving_lock_of
from ..rights import APPLICATION, OPERATOR, OWNER, RELAY
from ..schema import MIGRATION_LOCK

PARTITIONS = "idempotency_partitions"
# The revision from which on code knows partitions.
COMPATIBLE_FROM = "0016"
# The partition of rows for which there is no other.
DEFAULT = "records_otherwise"
# Raised with each change of what follows, so that `migrate` and the doctor know functions of an earlier checkout.
VERSION = 3
# When all rows there were placed: a time that belongs to no other partition ever. So Postgres knows, by a CHECK, that none of
# them belongs to a partition that is made, and reads none of them while claims wait. (Not 'infinity', which psycopg does not
# read.)
OTHERWISE = "9000-01-01 00:00:00+00"
# Any constant not used elsewhere: two relays do not make the same partition.
MAKING_LOCK = 0x1DE4907F

_AS_OWNER = "SECURITY DEFINER SET search_path = pg_catalog, pg_temp"
# Whatever needs a lock of the whole table waits for it no longer than a sweep would: all claims queue behind it.
_LOCKING = f"{_AS_OWNER} SET lock_timeout = '200ms'"
# Times as text are read as they were written: not by a DateStyle or the name of a time zone ("IST") that means another one.
_UNAMBIGUOUS = "SET datestyle = 'ISO, YMD' SET timezone = 'UTC'"

# Of `%1$s`, a partition: what has not ended, is not past its retention, or is another application's, by small indexes.
# $1 service, $2 now.
_LIVING = """
    SELECT r.tenant, r.task, r.key FROM %1$s r WHERE r.locked_until IS NOT NULL
    UNION ALL
    SELECT r.tenant, r.task, r.key FROM %1$s r WHERE r.available_at IS NOT NULL
    UNION ALL
    SELECT r.tenant, r.task, r.key FROM %1$s r
    WHERE r.service = $1 AND r.status IN ('completed', 'failed') AND greatest(r.expires_at, r.kept_until) >= $2
    UNION ALL
    SELECT r.tenant, r.task, r.key FROM %1$s r
    WHERE r.service IS NULL AND r.status IN ('completed', 'failed') AND greatest(r.expires_at, r.kept_until) >= $2
    UNION ALL
    SELECT r.tenant, r.task, r.key FROM %1$s r WHERE r.service < $1 AND r.status IN ('completed', 'failed')
    UNION ALL
    SELECT r.tenant, r.task, r.key FROM %1$s r WHERE r.service > $1 AND r.status IN ('completed', 'failed')
"""

# What keeps an operation that is past its retention, as the columns of `purge.OPERATIONS` say it: joins, because here all rows of
# a partition are asked about at once. $3 horizon.
_NEEDED = """
    SELECT r.tenant, r.task, r.key FROM %1$s r JOIN idempotency.outbox o USING (tenant, task, key)
    WHERE o.status = 'pending'
    UNION ALL
    SELECT r.tenant, r.task, r.key FROM %1$s r JOIN idempotency.outbox o USING (tenant, task, key)
    WHERE o.settled_at IS NULL AND (o.status <> 'published' OR o.fingerprint <> r.fingerprint OR o.service <> r.service)
    UNION ALL
    SELECT r.tenant, r.task, r.key FROM %1$s r JOIN idempotency.outbox o USING (tenant, task, key)
    WHERE o.published_at > $2 - $3
    UNION ALL
    SELECT r.tenant, r.task, r.key FROM %1$s r JOIN idempotency.dead_letters d USING (tenant, task, key)
    WHERE d.status = 'open'
    UNION ALL
    SELECT r.tenant, r.task, r.key FROM %1$s r
    JOIN idempotency.saga_steps s ON s.tenant = r.tenant AND s.call_task = r.task AND s.call_key = r.key
    JOIN idempotency.sagas g ON g.id = s.saga_id
    WHERE g.status IN ('RUNNING', 'COMPENSATING')
"""

# What is deleted with its record, in one transaction: a saga's rows, and deliveries, which would run it again.
_LADEN = """
    SELECT r.tenant, r.task, r.key FROM %1$s r JOIN idempotency.outbox o USING (tenant, task, key)
    UNION ALL
    SELECT r.tenant, r.task, r.key FROM %1$s r JOIN idempotency.sagas g USING (tenant, task, key)
    WHERE NOT g.observed
"""


def _keys(name: str, rows: str) -> str:
    """A function that returns keys of a partition's rows, at most `most`."""
    return f"""
CREATE OR REPLACE FUNCTION {PARTITIONS}.{name}(of_partition text, of_service text, horizon interval, most bigint)
RETURNS TABLE (tenant text, task text, key text) LANGUAGE plpgsql {_AS_OWNER} SET enable_seqscan = on AS $$
BEGIN
    RETURN QUERY EXECUTE format($sql$SELECT f.tenant, f.task, f.key FROM ({rows}) f LIMIT $4$sql$,
        {PARTITIONS}.named(of_partition)) USING of_service, clock_timestamp(), horizon, most;
END $$;
"""


NO_OLDER_CODE = f"""
UPDATE idempotency.compatibility SET compatible_from = '{COMPATIBLE_FROM}' WHERE compatible_from < '{COMPATIBLE_FROM}'
"""

FUNCTIONS = f"""
CREATE OR REPLACE FUNCTION {PARTITIONS}.version() RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT {VERSION}';

-- Before a row is inserted, by anybody: its key is locked, and looked for in all partitions.
CREATE OR REPLACE FUNCTION {PARTITIONS}.insert_once() RETURNS trigger LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
BEGIN
    IF current_setting('idempotency.keys_locked', true) IS DISTINCT FROM '{LOCKED}' THEN
        PERFORM pg_advisory_xact_lock({lock_of("NEW.tenant", "NEW.task", "NEW.key")});
    END IF;
    -- With a snapshot of its own, which shows what was committed while the lock was waited for.
    IF EXISTS (
        SELECT FROM idempotency.records r WHERE r.tenant = NEW.tenant AND r.task = NEW.task AND r.key = NEW.key
    ) THEN
        RETURN NULL;
    END IF;
    IF TG_TABLE_NAME = '{DEFAULT}' THEN
        NEW.placed_at := '{OTHERWISE}';
    END IF;
    RETURN NEW;
END $$;

-- Before a row's place is changed: `keep_ended` is not asked then, since for Postgres it is a DELETE and an INSERT.
CREATE OR REPLACE FUNCTION {PARTITIONS}.keep_place() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = '{APPLICATION}' AND pg_has_role(oid, 'USAGE'))
        AND NOT EXISTS (
            SELECT FROM pg_roles WHERE pg_has_role(oid, 'USAGE') AND rolname IN ('{OWNER}', '{RELAY}', '{OPERATOR}'))
    THEN
        RAISE EXCEPTION 'idempotency.records: the application moves nothing' USING ERRCODE = 'insufficient_privilege';
    END IF;
    RETURN NEW;
END $$;

CREATE OR REPLACE FUNCTION {PARTITIONS}.bounds()
RETURNS TABLE (name text, begins_at timestamptz, ends_at timestamptz, is_default boolean, estimated float8)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp {_UNAMBIGUOUS} AS $$
    SELECT c.relname::text, substring(b.bounds FROM $re$FROM \\('([^']+)'\\)$re$)::timestamptz,
           substring(b.bounds FROM $re$TO \\('([^']+)'\\)$re$)::timestamptz, b.bounds = 'DEFAULT', c.reltuples::float8
    FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid, pg_get_expr(c.relpartbound, c.oid) b(bounds)
    WHERE i.inhparent = 'idempotency.records'::regclass
    ORDER BY 3
$$;

-- A partition by its name, and no other table.
CREATE OR REPLACE FUNCTION {PARTITIONS}.named(of_partition text) RETURNS regclass
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    found regclass;
BEGIN
    SELECT c.oid::regclass INTO STRICT found FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
    WHERE i.inhparent = 'idempotency.records'::regclass AND c.relname = of_partition;
    RETURN found;
END $$;

-- A partition for rows that are still to come. False: another process is making one, or has made it, or tables are migrated.
CREATE OR REPLACE FUNCTION {PARTITIONS}.make(of_partition text, begins timestamptz, ends timestamptz) RETURNS boolean
LANGUAGE plpgsql {_LOCKING} {_UNAMBIGUOUS} AS $$
DECLARE
    options text;
BEGIN
    IF NOT pg_try_advisory_xact_lock({MAKING_LOCK}::bigint) OR NOT pg_try_advisory_xact_lock_shared({MIGRATION_LOCK}::bigint)
        OR EXISTS (SELECT FROM {PARTITIONS}.bounds() b WHERE b.ends_at > begins AND coalesce(b.begins_at < ends, true))
    THEN
        RETURN false;
    END IF;
    IF begins <= clock_timestamp() THEN
        RAISE EXCEPTION 'begins: must be in the future, got %', begins USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- autovacuum's, say: a partitioned table has none itself
    SELECT 'WITH (' || array_to_string(c.reloptions, ', ') || ')' INTO options FROM pg_class c
    WHERE c.oid = '{PARTITIONS}.{DEFAULT}'::regclass;
    -- CHECKs, too, as of a tenant that has moved to another cell: without them, it could not be attached
    EXECUTE format('CREATE TABLE {PARTITIONS}.%I
        (LIKE idempotency.records INCLUDING CONSTRAINTS INCLUDING DEFAULTS INCLUDING STORAGE) %s', of_partition, options);
    -- PARTITION OF would lock out all claims for as long as this takes. What follows takes a moment, however full the default one is.
    EXECUTE format('ALTER TABLE idempotency.records ATTACH PARTITION {PARTITIONS}.%I FOR VALUES FROM (%L) TO (%L)',
        of_partition, begins, ends);
    RETURN true;
END $$;

-- These rows, but not those that are running or locked, go to the partition of today. By an UPDATE, so that who waits for a row
-- gets an error (40001) instead of none, and looks again; a DELETE would tell them that there is no such operation. Triggers do
-- not fire: nothing is new, and nothing has ended or is gone.
CREATE OR REPLACE FUNCTION {PARTITIONS}.move(of_partition text, tenants text[], tasks text[], keys text[]) RETURNS bigint
LANGUAGE plpgsql {_LOCKING} AS $$
DECLARE
    moved bigint;
    wanted bigint;
BEGIN
    PERFORM set_config('idempotency.moving', 'on', true), set_config('idempotency.keys_locked', '{LOCKED}', true);
    EXECUTE format($sql$
        WITH wanted AS MATERIALIZED (
            SELECT DISTINCT w.* FROM unnest($1, $2, $3) w(tenant, task, key)
        ), locked AS MATERIALIZED (  -- before the rows, as an insert and a wake do
            SELECT w.* FROM wanted w
            WHERE pg_try_advisory_xact_lock({lock_of("w.tenant", "w.task", "w.key")})
              AND pg_try_advisory_xact_lock({moving_lock_of("w.tenant", "w.task", "w.key")})
        ), asleep AS MATERIALIZED (  -- what wakes a saga locks its row first, and then meets no record that moves
            SELECT g.tenant, g.task, g.key FROM idempotency.sagas g JOIN locked USING (tenant, task, key)
            FOR NO KEY UPDATE OF g SKIP LOCKED
        ), free AS MATERIALIZED (
            SELECT l.* FROM locked l LEFT JOIN asleep a USING (tenant, task, key)
            WHERE a.key IS NOT NULL OR NOT EXISTS (
                SELECT FROM idempotency.sagas g WHERE g.tenant = l.tenant AND g.task = l.task AND g.key = l.key)
        ), held AS MATERIALIZED (
            SELECT r.tenant, r.task, r.key, r.placed_at FROM %1$s r JOIN free USING (tenant, task, key)
            WHERE r.status <> 'started' FOR UPDATE OF r SKIP LOCKED
        ), come AS (
            UPDATE idempotency.records r SET placed_at = clock_timestamp() FROM held h
            WHERE (r.tenant, r.task, r.key, r.placed_at) = (h.tenant, h.task, h.key, h.placed_at) RETURNING 1
        )
        SELECT (SELECT count(*) FROM come), (SELECT count(*) FROM held)$sql$,
        {PARTITIONS}.named(of_partition)) INTO moved, wanted USING tenants, tasks, keys;
    IF moved <> wanted THEN  -- of what is in two partitions, which cannot be, `insert_once` would leave none
        RAISE EXCEPTION 'of % operations only % could be moved', wanted, moved USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    PERFORM set_config('idempotency.moving', 'off', true), set_config('idempotency.keys_locked', 'off', true);
    RETURN moved;
END $$;

-- A partition goes, if nothing in it is needed. NULL: something is. `survivors` has looked at outbox rows and dead letters up to
-- these ids; returns how many operations went.
CREATE OR REPLACE FUNCTION {PARTITIONS}.remove(
    of_partition text, of_service text, newest_row bigint, newest_letter bigint
) RETURNS bigint LANGUAGE plpgsql {_LOCKING} SET enable_seqscan = off AS $$
DECLARE
    source regclass := {PARTITIONS}.named(of_partition);
    is_needed boolean;
    removed bigint;
BEGIN
    IF NOT pg_try_advisory_xact_lock_shared({MIGRATION_LOCK}::bigint) THEN
        RETURN NULL;
    END IF;
    IF NOT EXISTS (
        SELECT FROM {PARTITIONS}.bounds() b WHERE b.name = of_partition AND b.ends_at < clock_timestamp())
    THEN
        RAISE EXCEPTION 'of_partition: must have ended, got %', of_partition USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM set_config('enable_seqscan', 'on', true);
    EXECUTE format('SELECT count(*) FROM %s', source) INTO removed;
    PERFORM set_config('enable_seqscan', 'off', true);  -- what is asked while claims wait is found by indexes
    -- the whole before its part, as a claim does
    LOCK TABLE ONLY idempotency.records IN ACCESS EXCLUSIVE MODE;
    EXECUTE format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE', source);
    EXECUTE format($sql$
        SELECT EXISTS ({_LIVING}
            UNION ALL
            SELECT r.tenant, r.task, r.key FROM %1$s r JOIN idempotency.outbox o USING (tenant, task, key) WHERE o.id > $3
            UNION ALL
            SELECT r.tenant, r.task, r.key FROM %1$s r JOIN idempotency.dead_letters d USING (tenant, task, key)
            WHERE d.id > $4 AND d.status = 'open')$sql$, source)
        INTO is_needed USING of_service, clock_timestamp(), newest_row, newest_letter;
    IF is_needed THEN
        RETURN NULL;
    END IF;
    EXECUTE format('DROP TABLE %s', source);
    RETURN removed;
END $$;
{_keys("living", _LIVING)}
{_keys("survivors", _LIVING + "UNION ALL" + _NEEDED)}
{_keys("laden", _LADEN)}
{_keys("waiting", "SELECT r.tenant, r.task, r.key FROM %1$s r WHERE r.locked_until IS NULL")}
"""
