"""Sagas: what each has recorded, what it waits for, and the events that are kept for it.

Code of 0013 runs beside this: it neither runs sagas nor publishes to them, and may not end one (`end_of_operation`).
"""

from alembic import op

from idempotency.store.migrations.saga_functions import FUNCTIONS

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
CREATE INDEX sagas_over ON idempotency.sagas (service, updated_at)
    WHERE observed OR status = 'COMPENSATING';
CREATE INDEX sagas_running ON idempotency.sagas (service, accepted_at) WHERE status = 'RUNNING';

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
CREATE INDEX saga_events_received ON idempotency.saga_events (service, received_at);
-- The ended saga that has gone on from the failure of a letter's operation, so that nobody may replay it; also after it is purged.
ALTER TABLE idempotency.dead_letters ADD COLUMN used_by text;
CREATE INDEX saga_events_unsignalled ON idempotency.saga_events (id) WHERE NOT signalled;
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
    op.execute("""
        ALTER TABLE idempotency.outbox ALTER COLUMN created_at SET DEFAULT clock_timestamp();
        ALTER TABLE idempotency.dead_letters DROP COLUMN used_by;
        DROP VIEW idempotency.saga_instances;
        DROP TRIGGER forget_saga ON idempotency.records;
        DROP TRIGGER end_of_operation ON idempotency.records;
        DROP TRIGGER signal_waiting ON idempotency.saga_events;
        DROP FUNCTION idempotency.forget_saga, idempotency.end_of_operation, idempotency.as_jsonb, idempotency.accepted_at,
            idempotency.signal_waiting, idempotency.signal_from, idempotency.keep_event, idempotency.event_lock,
            idempotency.signal_saga, idempotency.resume_saga;
        DROP TABLE idempotency.saga_events, idempotency.saga_steps, idempotency.sagas;
        DROP FUNCTION idempotency.close_waits
    """)
