"""Renamed columns: a task's name is `task`, an outbox row's id `message_id`, and dead letters are closed, not settled.

Older code cannot run on this schema. Stop workers, relays and beats, migrate, then start the new ones.
"""

from alembic import op

revision = "0011"
down_revision = "0010"

# By table: old and new names of columns. The order matters only for dead_letters.
COLUMNS = {
    "records": [("operation", "task")],
    "outbox": [("operation", "task"), ("event_id", "message_id")],
    "lanes": [("operation", "task")],
    "dead_letters": [
        ("task", "header_task"),
        ("operation", "task"),
        ("event_id", "message_id"),
        ("settled_at", "closed_at"),
    ],
    "audit": [("operation", "task")],
    "set_aside": [("operation", "task")],
}
INDEXES = {
    "outbox_event_id_key": "outbox_message_id_key",
    "dead_letters_settled": "dead_letters_closed",
}

ORIGINS = """
ALTER TABLE idempotency.outbox DROP CONSTRAINT outbox_origin_check;
UPDATE idempotency.outbox SET origin = '{new}' WHERE origin = '{old}';
ALTER TABLE idempotency.outbox ADD CONSTRAINT outbox_origin_check
    CHECK (origin IN ('enqueue', 'retry', 'recover', '{new}', 'replay'));
UPDATE idempotency.set_aside SET sweep = '{new}' WHERE sweep = '{old}';
"""

# As in 0006, which explains them; renaming a column does not change the text of functions.
FUNCTIONS = """
CREATE OR REPLACE FUNCTION idempotency.take_places() RETURNS trigger LANGUAGE plpgsql SET enable_seqscan TO off AS $$
DECLARE
    lock int;
    next bigint;
BEGIN
    IF NOT EXISTS (SELECT FROM idempotency.outbox WHERE id = NEW.id AND place IS NULL) THEN
        RETURN NULL;
    END IF;
    FOR lock IN
        SELECT DISTINCT idempotency.lane_lock({task}, ordering_key) FROM idempotency.outbox
        WHERE id >= NEW.id AND status = 'pending' AND ordering_key IS NOT NULL AND place IS NULL
        ORDER BY 1
    LOOP
        PERFORM pg_advisory_xact_lock(122441, lock);
    END LOOP;
    next := nextval('idempotency.place');
    WITH placed AS (
        UPDATE idempotency.outbox SET place = next
        WHERE id >= NEW.id AND status = 'pending' AND ordering_key IS NOT NULL AND place IS NULL
        RETURNING {task}, ordering_key, id, available_at
    )
    INSERT INTO idempotency.lanes ({task}, ordering_key, available_at)
    SELECT DISTINCT ON ({task} COLLATE "C", ordering_key COLLATE "C") {task}, ordering_key, available_at
    FROM placed ORDER BY {task} COLLATE "C", ordering_key COLLATE "C", id
    ON CONFLICT DO NOTHING;
    RETURN NULL;
END $$;

DROP FUNCTION idempotency.refresh_lane(text, text);
CREATE FUNCTION idempotency.refresh_lane(lane_{task} text, lane_key text) RETURNS void
LANGUAGE plpgsql SET enable_seqscan TO off AS $$
DECLARE
    head record;
BEGIN
    PERFORM FROM idempotency.lanes WHERE {task} = lane_{task} AND ordering_key = lane_key FOR UPDATE;
    FOR look IN 1..2 LOOP
        SELECT status, available_at INTO head FROM idempotency.outbox
        WHERE {task} = lane_{task} AND ordering_key = lane_key AND status <> 'published' AND place IS NOT NULL
        ORDER BY place, id LIMIT 1;
        IF FOUND THEN
            INSERT INTO idempotency.lanes ({task}, ordering_key, available_at, blocked)
            VALUES (lane_{task}, lane_key, head.available_at, head.status = 'failed')
            ON CONFLICT ({task}, ordering_key) DO UPDATE
            SET available_at = excluded.available_at, blocked = excluded.blocked, relayed_until = NULL;
            RETURN;
        END IF;
        IF look = 1 AND NOT pg_try_advisory_xact_lock(122441, idempotency.lane_lock(lane_{task}, lane_key)) THEN
            UPDATE idempotency.lanes SET available_at = clock_timestamp(), relayed_until = NULL
            WHERE {task} = lane_{task} AND ordering_key = lane_key;
            RETURN;
        END IF;
    END LOOP;
    DELETE FROM idempotency.lanes WHERE {task} = lane_{task} AND ordering_key = lane_key;
END $$;

DROP FUNCTION idempotency.lane_lock(text, text);
CREATE FUNCTION idempotency.lane_lock({task} text, ordering_key text) RETURNS int LANGUAGE sql IMMUTABLE AS $$
    SELECT hashtext({task} || ' ' || ordering_key) & 1023
$$;
"""


def upgrade() -> None:
    for table, columns in COLUMNS.items():
        for old, new in columns:
            op.execute(f"ALTER TABLE idempotency.{table} RENAME COLUMN {old} TO {new}")
    for old, new in INDEXES.items():
        op.execute(f"ALTER INDEX idempotency.{old} RENAME TO {new}")
    op.execute("ALTER TABLE idempotency.dead_letters RENAME CONSTRAINT settled_has_its_time TO closed_has_its_time")
    op.execute(ORIGINS.format(old="reconcile", new="resend"))
    op.execute(FUNCTIONS.format(task="task"))
    op.execute("UPDATE idempotency.compatibility SET compatible_from = '0011'")


def downgrade() -> None:
    op.execute("UPDATE idempotency.compatibility SET compatible_from = '0009'")
    for table, columns in COLUMNS.items():
        for old, new in reversed(columns):
            op.execute(f"ALTER TABLE idempotency.{table} RENAME COLUMN {new} TO {old}")
    for old, new in INDEXES.items():
        op.execute(f"ALTER INDEX idempotency.{new} RENAME TO {old}")
    op.execute("ALTER TABLE idempotency.dead_letters RENAME CONSTRAINT closed_has_its_time TO settled_has_its_time")
    op.execute(ORIGINS.format(old="resend", new="reconcile"))
    op.execute(FUNCTIONS.format(task="operation"))
