"""Statements of the library as code of schema 0011 runs them, for tests of that code beside newer code."""

from __future__ import annotations

INSERT = """
INSERT INTO idempotency.outbox
    (message_id, tenant, task, key, fingerprint, message, queue, ordering_key, origin, available_at, settled_at,
     generation)
VALUES (%(message_id)s, %(tenant)s, %(task)s, %(key)s, %(fingerprint)s, %(message)s, %(queue)s, %(ordering_key)s,
        %(origin)s,
        greatest(cast(%(eta)s AS timestamptz), clock_timestamp() + make_interval(secs => %(countdown)s)),
        CASE WHEN %(settled)s THEN clock_timestamp() END, %(generation)s)
"""

RESERVE_ROWS = """
WITH due AS MATERIALIZED (
    SELECT id FROM idempotency.outbox
    WHERE status = 'pending' AND available_at <= (SELECT clock_timestamp()) AND ordering_key IS NULL
      AND (relayed_until IS NULL OR relayed_until < clock_timestamp())
    ORDER BY available_at, id LIMIT %(batch)s
    FOR UPDATE SKIP LOCKED
)
UPDATE idempotency.outbox o
SET relayed_until = clock_timestamp() + make_interval(secs => %(seconds)s)
FROM due WHERE o.id = due.id
RETURNING o.id, o.message_id, o.message, o.origin, o.generation, o.refusals, o.resends, o.attempts, o.queue,
    NULL AS task, NULL AS ordering_key, set_config('synchronous_commit', 'off', true)
"""

RESERVE_LANES = """
WITH due AS MATERIALIZED (
    SELECT task, ordering_key FROM idempotency.lanes
    WHERE NOT blocked AND available_at <= (SELECT clock_timestamp())
      AND (relayed_until IS NULL OR relayed_until < clock_timestamp())
    ORDER BY available_at LIMIT %(batch)s
    FOR UPDATE SKIP LOCKED
), lane AS (
    UPDATE idempotency.lanes l
    SET relayed_until = clock_timestamp() + make_interval(secs => %(seconds)s)
    FROM due WHERE (l.task, l.ordering_key) = (due.task, due.ordering_key)
    RETURNING l.task, l.ordering_key, set_config('synchronous_commit', 'off', true)
)
SELECT lane.task, lane.ordering_key, o.id, o.message_id, o.message, o.origin, o.generation, o.refusals, o.resends,
       o.attempts, o.queue, o.status = 'pending' AND o.available_at <= clock_timestamp() AS goes
FROM lane LEFT JOIN LATERAL (
    SELECT * FROM idempotency.outbox r
    WHERE r.task = lane.task AND r.ordering_key = lane.ordering_key
      AND r.status <> 'published' AND r.place IS NOT NULL
    ORDER BY r.place, r.id LIMIT greatest(%(batch)s / (SELECT count(*) FROM due), 1)
) o ON true
ORDER BY lane.task, lane.ordering_key, o.place, o.id
"""

MARK_PUBLISHED = """
UPDATE idempotency.outbox o
SET status = 'published', published_at = clock_timestamp(), relayed_until = NULL, last_error = NULL

FROM unnest(%(ids)s::text[], %(generations)s::int[], %(refusals)s::int[], %(resends)s::int[], %(attempts)s::int[])
    AS sent(id, generation, refusals, resends, attempts)
WHERE o.message_id = sent.id
  AND (o.generation, o.refusals, o.resends, o.attempts)
    = (sent.generation, sent.refusals, sent.resends, sent.attempts)
  AND o.status NOT IN ('published', 'failed')

RETURNING set_config('synchronous_commit', 'off', true)
"""

CLAIM = """
WITH claimed AS (
    INSERT INTO idempotency.records AS r
        (tenant, task, key, status, fence, token, locked_until, locked_by, fingerprint, message, queue)
    VALUES (%(tenant)s, %(task)s, %(key)s, 'started', nextval('idempotency.fence'), %(token)s,
            clock_timestamp() + make_interval(secs => %(lease)s), %(holder)s, %(fingerprint)s, %(message)s,
            %(queue)s)
    ON CONFLICT (tenant, task, key) DO UPDATE SET
        status = 'started',
        fence = nextval('idempotency.fence'),
        token = excluded.token,
        -- the same token again is the same attempt, whose commit was in doubt
        attempts = r.attempts + (r.token IS DISTINCT FROM excluded.token)::int,
        locked_until = clock_timestamp() + make_interval(secs => %(lease)s),
        locked_by = excluded.locked_by,
        taken_over = r.status = 'started' AND r.token IS DISTINCT FROM excluded.token,
        available_at = NULL,
        -- one that began without a message gets the first that comes
        message = CASE WHEN r.message = '' THEN excluded.message ELSE r.message END,
        queue = CASE WHEN r.message = '' THEN excluded.queue ELSE r.queue END,
        updated_at = clock_timestamp()
    WHERE r.fingerprint = ANY(%(fingerprints)s)
      AND (r.status = 'started' AND (r.token = excluded.token OR r.locked_until < clock_timestamp())
        OR r.status = 'released' AND r.available_at <= clock_timestamp())
    RETURNING fence, attempts, generation, nullif(effects, '{}') AS effects, opened_at, revoked_generation, fingerprint,
        taken_over, spent_at,
        -- xmax is 0 for an inserted row
        CASE WHEN NOT %(synchronous)s AND xmax = 0 THEN set_config('synchronous_commit', 'off', true) END
)
SELECT 'claimed' AS answer, fence, attempts, generation, effects,
       extract(epoch FROM clock_timestamp() - opened_at)::float8 AS age, NULL AS result, NULL AS error,
       revoked_generation IS NOT DISTINCT FROM generation AS revoked, fingerprint, taken_over, spent_at
FROM claimed
UNION ALL
SELECT CASE
           WHEN fingerprint <> ALL(%(fingerprints)s) THEN 'mismatch'
           WHEN status IN ('completed', 'failed') THEN status
           WHEN status = 'started' AND locked_until >= clock_timestamp() THEN 'busy'
           WHEN status = 'released' AND available_at > clock_timestamp() THEN 'busy'
           ELSE 'changed'
       END, NULL, NULL, generation, NULL, NULL, result, error, NULL, fingerprint, NULL, NULL
FROM idempotency.records
WHERE tenant = %(tenant)s AND task = %(task)s AND key = %(key)s AND NOT EXISTS (SELECT FROM claimed)
"""

COMPLETE = """
WITH settings AS (
    SELECT set_config('idle_in_transaction_session_timeout', %(idle_ms)s, true),
           set_config('synchronous_commit', 'on', true)
), finished AS (
    UPDATE idempotency.records SET status = 'completed', result = %(result)s, response_code = 200,
        completed_at = clock_timestamp(), locked_until = NULL,
        expires_at = clock_timestamp() + make_interval(secs => %(retention)s), updated_at = clock_timestamp()
    FROM settings WHERE tenant = %(tenant)s AND task = %(task)s AND key = %(key)s AND status = 'started'
      AND fence = %(fence)s AND token = %(token)s RETURNING 1
)
SELECT 1 / count(*) FROM finished
"""

RELEASE = """
WITH released AS (
    UPDATE idempotency.records
    SET status = 'released', token = NULL, locked_until = NULL, locked_by = NULL,
        available_at = clock_timestamp() + make_interval(secs => %(delay)s),
        attempts = attempts - %(given_back)s,
        error = coalesce(%(error)s, error), first_error = coalesce(first_error, %(error)s),
        updated_at = clock_timestamp()
    WHERE tenant = %(tenant)s AND task = %(task)s AND key = %(key)s AND status = 'started' AND fence = %(fence)s
      AND token = %(token)s
    RETURNING tenant, task, key, fingerprint, message, queue, available_at, generation
), next_delivery AS (
    INSERT INTO idempotency.outbox
        (message_id, tenant, task, key, fingerprint, message, queue, origin, available_at, generation)
    SELECT gen_random_uuid()::text, tenant, task, key, fingerprint, message, queue, 'retry',
           available_at + make_interval(secs => %(after_due)s), generation
    FROM released WHERE message <> '' AND %(deliver)s
), superseded AS (
    -- replaced by the next delivery, so that an operation that defers for hours keeps one row, not thousands
    DELETE FROM idempotency.outbox o USING released r
    WHERE o.tenant = r.tenant AND o.task = r.task AND o.key = r.key AND o.fingerprint = r.fingerprint
      AND o.origin IN ('retry', 'recover') AND o.status = 'published' AND r.message <> '' AND %(deliver)s
)
SELECT count(*) FROM released
"""

RECOVER = """
WITH due AS MATERIALIZED (SELECT r.tenant, r.task, r.key, md5(ARRAY[r.tenant, r.task, r.key]::text) AS row_id,
      r.attempts FROM idempotency.records r WHERE r.locked_until IS NOT NULL AND r.status = 'started'
      AND (r.locked_until < clock_timestamp() OR r.locked_by = ANY(%(dead)s)) AND NOT (coalesce(
          (SELECT true FROM unnest(%(known)s::text[]) known(task) WHERE known.task = r.task), false)
      AND r.attempts > coalesce(
          (SELECT bound.attempts FROM unnest(%(tasks)s::text[], %(attempts)s::int[]) bound(task, attempts)
           WHERE bound.task = r.task), %(otherwise)s)
      AND r.attempts >= coalesce(r.spent_at + %(spare)s - 1, coalesce(
          (SELECT bound.attempts FROM unnest(%(tasks)s::text[], %(attempts)s::int[]) bound(task, attempts)
           WHERE bound.task = r.task), %(otherwise)s) + 2 * %(spare)s)) AND (SELECT true FROM idempotency.set_aside a
       WHERE a.sweep = 'recover' AND a.id = md5(ARRAY[r.tenant, r.task, r.key]::text)
      AND a.until > clock_timestamp() LIMIT 1) IS NULL
      ORDER BY r.locked_until LIMIT %(batch)s FOR UPDATE OF r SKIP LOCKED)
, released AS (
    UPDATE idempotency.records r
    SET status = 'released', token = NULL, locked_until = NULL, locked_by = NULL,
        available_at = clock_timestamp(), updated_at = clock_timestamp()
    FROM due o WHERE (r.tenant, r.task, r.key) = (o.tenant, o.task, o.key)
    RETURNING r.tenant, r.task, r.key, r.fingerprint, r.message, r.queue, r.generation
), next_delivery AS (
    INSERT INTO idempotency.outbox (message_id, tenant, task, key, fingerprint, message, queue, origin, generation)
    SELECT gen_random_uuid()::text, tenant, task, key, fingerprint, message, queue, 'recover', generation
    FROM released WHERE message <> ''
)
SELECT (SELECT count(*) FROM released), (SELECT count(*) FROM due) AS seen
"""

PURGE = """
WITH due AS MATERIALIZED (SELECT r.tenant, r.task, r.key, md5(ARRAY[r.tenant, r.task, r.key]::text) AS row_id, greatest(
        (SELECT clock_timestamp() + make_interval(secs => %(keep)s) FROM idempotency.outbox o
         WHERE o.tenant = r.tenant AND o.task = r.task AND o.key = r.key
           AND (o.status = 'pending' OR o.settled_at IS NULL
      AND (o.status <> 'published' OR o.fingerprint <> r.fingerprint))
         LIMIT 1),
        (SELECT clock_timestamp() + make_interval(secs => %(keep)s) FROM idempotency.dead_letters d
         WHERE d.tenant = r.tenant AND d.task = r.task AND d.key = r.key AND d.status = 'open' LIMIT 1),
        (SELECT max(o.published_at) + make_interval(secs => %(horizon)s) FROM idempotency.outbox o
         WHERE o.tenant = r.tenant AND o.task = r.task AND o.key = r.key)) AS stays_until
      FROM idempotency.records r WHERE r.status IN ('completed', 'failed')
      AND greatest(r.expires_at, r.kept_until) < (SELECT clock_timestamp()) AND (SELECT true
      FROM idempotency.set_aside a
       WHERE a.sweep = 'purge' AND a.id = md5(ARRAY[r.tenant, r.task, r.key]::text)
      AND a.until > clock_timestamp() LIMIT 1) IS NULL
      ORDER BY greatest(r.expires_at, r.kept_until) LIMIT %(batch)s FOR UPDATE OF r SKIP LOCKED)
, judged AS MATERIALIZED (
    SELECT tenant, task, key, stays_until, coalesce(stays_until > clock_timestamp(), false) AS stays FROM due
), kept AS (
    UPDATE idempotency.records r SET kept_until = j.stays_until
    FROM judged j WHERE j.stays AND (r.tenant, r.task, r.key) = (j.tenant, j.task, j.key)
), rows AS (
    DELETE FROM idempotency.outbox o USING judged j
    WHERE NOT j.stays AND (o.tenant, o.task, o.key) = (j.tenant, j.task, j.key)
), purged AS (
    DELETE FROM idempotency.records r USING judged j
    WHERE NOT j.stays AND (r.tenant, r.task, r.key) = (j.tenant, j.task, j.key)
    RETURNING 1
)
SELECT (SELECT count(*) FROM purged), (SELECT count(*) FROM due) AS seen
"""
