"""Ordering keys that cost nothing while blocked, and the markers by which a queue's loss is known.

A lane is one operation and ordering key that has something to publish: the relay leases lanes, not their rows. Its row
here repeats what the first unpublished row of the lane says, and whoever changes that row refreshes it.
"""

from alembic import op

from idempotency.store.migrations.indexes import create_index

revision = "0006"
down_revision = "0005"

# Constant defaults: no row is rewritten. Until the trigger is there every row gets place 0.
COLUMNS = """
ALTER TABLE idempotency.outbox
    ADD COLUMN IF NOT EXISTS place bigint DEFAULT 0,
    -- A message that a worker was seen to have taken is no longer looked for in its queue.
    ADD COLUMN IF NOT EXISTS taken boolean NOT NULL DEFAULT false
"""

# Those in BY_NAME take the place of others, once they are built.
INDEXES = (
    """CREATE INDEX CONCURRENTLY outbox_without_order ON idempotency.outbox (available_at, id)
       WHERE status = 'pending' AND ordering_key IS NULL""",
    """CREATE INDEX CONCURRENTLY outbox_placed ON idempotency.outbox (operation, ordering_key, place, id)
       WHERE status <> 'published' AND ordering_key IS NOT NULL AND place IS NOT NULL""",
    """CREATE INDEX CONCURRENTLY outbox_unplaced ON idempotency.outbox (id)
       WHERE status = 'pending' AND ordering_key IS NOT NULL AND place IS NULL""",
    """CREATE INDEX CONCURRENTLY outbox_looked_for ON idempotency.outbox (queue, published_at)
       WHERE settled_at IS NULL AND NOT taken""",
    """CREATE INDEX CONCURRENTLY outbox_stuck ON idempotency.outbox (id) WHERE status = 'pending' AND attempts >= 5""",
    """CREATE INDEX CONCURRENTLY records_ended ON idempotency.records (completed_at)
       WHERE completed_at IS NOT NULL""",
)
BY_NAME = {
    "outbox_pending": "outbox_without_order",
    "outbox_ordered": "outbox_placed",
    "outbox_unsettled": "outbox_looked_for",
}

LANES = r"""
CREATE TABLE idempotency.lanes (
    operation     text        NOT NULL,
    ordering_key  text        NOT NULL,
    available_at  timestamptz NOT NULL,
    relayed_until timestamptz,
    blocked       boolean     NOT NULL DEFAULT false,
    PRIMARY KEY (operation, ordering_key)
);
CREATE INDEX lanes_due ON idempotency.lanes (available_at) WHERE NOT blocked;

-- Rows of before have 0: their ids say their order. A row without a place is not committed yet, or was discarded.
CREATE SEQUENCE idempotency.place;
ALTER TABLE idempotency.outbox ALTER COLUMN place DROP DEFAULT;
UPDATE idempotency.outbox o SET place = NULL
WHERE status = 'failed' AND ordering_key IS NOT NULL AND place IS NOT NULL
  AND NOT EXISTS (SELECT FROM idempotency.dead_letters d WHERE d.outbox_id = o.id AND d.status = 'open');

INSERT INTO idempotency.lanes (operation, ordering_key, available_at, blocked)
SELECT DISTINCT ON (operation, ordering_key) operation, ordering_key, available_at, status = 'failed'
FROM idempotency.outbox WHERE status <> 'published' AND ordering_key IS NOT NULL AND place IS NOT NULL
ORDER BY operation, ordering_key, place, id;

-- So many locks and no more: a transaction that writes to 50,000 keys must not fill the server's table of locks.
CREATE FUNCTION idempotency.lane_lock(operation text, ordering_key text) RETURNS int LANGUAGE sql IMMUTABLE AS $$
    SELECT hashtext(operation || ' ' || ordering_key) & 1023
$$;

-- Runs at COMMIT, whatever wrote the rows: the lock is held for the length of a commit, so the order of places is the
-- order of commits; and all locks of a transaction are taken at once, sorted, so no two transactions deadlock.
CREATE FUNCTION idempotency.take_places() RETURNS trigger LANGUAGE plpgsql SET enable_seqscan TO off AS $$
DECLARE
    lock int;
    next bigint;
BEGIN
    IF NOT EXISTS (SELECT FROM idempotency.outbox WHERE id = NEW.id AND place IS NULL) THEN
        RETURN NULL;  -- the first row of this transaction has taken the places of all
    END IF;
    -- Other transactions' rows without a place are not visible: each commits with its own.
    FOR lock IN
        SELECT DISTINCT idempotency.lane_lock(operation, ordering_key) FROM idempotency.outbox
        WHERE id >= NEW.id AND status = 'pending' AND ordering_key IS NOT NULL AND place IS NULL
        ORDER BY 1
    LOOP
        PERFORM pg_advisory_xact_lock(122441, lock);
    END LOOP;
    next := nextval('idempotency.place');
    WITH placed AS (
        UPDATE idempotency.outbox SET place = next
        WHERE id >= NEW.id AND status = 'pending' AND ordering_key IS NOT NULL AND place IS NULL
        RETURNING operation, ordering_key, id, available_at
    )
    INSERT INTO idempotency.lanes (operation, ordering_key, available_at)
    -- in the order in which Python sorts, so that lanes too are locked in one order
    SELECT DISTINCT ON (operation COLLATE "C", ordering_key COLLATE "C") operation, ordering_key, available_at
    FROM placed ORDER BY operation COLLATE "C", ordering_key COLLATE "C", id
    ON CONFLICT DO NOTHING;
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER take_places AFTER INSERT ON idempotency.outbox DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW WHEN (NEW.ordering_key IS NOT NULL AND NEW.place IS NULL AND NEW.status = 'pending')
    EXECUTE FUNCTION idempotency.take_places();

-- A statement of its own for each look: each sees what was committed before the lock above it was granted.
CREATE FUNCTION idempotency.refresh_lane(lane_operation text, lane_key text) RETURNS void
LANGUAGE plpgsql SET enable_seqscan TO off AS $$
DECLARE
    head record;
BEGIN
    PERFORM FROM idempotency.lanes WHERE operation = lane_operation AND ordering_key = lane_key FOR UPDATE;
    FOR look IN 1..2 LOOP
        SELECT status, available_at INTO head FROM idempotency.outbox
        WHERE operation = lane_operation AND ordering_key = lane_key AND status <> 'published' AND place IS NOT NULL
        ORDER BY place, id LIMIT 1;
        IF FOUND THEN
            INSERT INTO idempotency.lanes (operation, ordering_key, available_at, blocked)
            VALUES (lane_operation, lane_key, head.available_at, head.status = 'failed')
            ON CONFLICT (operation, ordering_key) DO UPDATE
            SET available_at = excluded.available_at, blocked = excluded.blocked, relayed_until = NULL;
            RETURN;
        END IF;
        IF look = 1 AND NOT pg_try_advisory_xact_lock(122441, idempotency.lane_lock(lane_operation, lane_key)) THEN
            -- a row of this lane is being committed: the lane stays, to be looked at again
            UPDATE idempotency.lanes SET available_at = clock_timestamp(), relayed_until = NULL
            WHERE operation = lane_operation AND ordering_key = lane_key;
            RETURN;
        END IF;
    END LOOP;
    DELETE FROM idempotency.lanes WHERE operation = lane_operation AND ordering_key = lane_key;
END $$;
"""

MARKERS = r"""
CREATE TABLE idempotency.markers (
    id       text        PRIMARY KEY,
    queue    text        NOT NULL,
    priority int         NOT NULL,
    sent_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    taken_at timestamptz
);
CREATE INDEX markers_queue ON idempotency.markers (queue, priority, sent_at);

-- Up to which end of an operation the outbox has been settled.
CREATE TABLE idempotency.settled (until timestamptz NOT NULL);
INSERT INTO idempotency.settled VALUES ('epoch');
"""


def upgrade() -> None:
    op.execute(COLUMNS)
    for statement in INDEXES:
        create_index(statement)
    for name, new in BY_NAME.items():
        op.execute(f"DROP INDEX idempotency.{name}")
        op.execute(f"ALTER INDEX idempotency.{new} RENAME TO {name}")
    op.execute(LANES)
    op.execute(MARKERS)


def downgrade() -> None:
    op.execute("DROP INDEX idempotency.records_ended")
    op.execute("DROP TABLE idempotency.settled, idempotency.markers, idempotency.lanes")
    op.execute("DROP TRIGGER take_places ON idempotency.outbox")
    op.execute(
        "DROP FUNCTION idempotency.take_places(), idempotency.refresh_lane(text, text), "
        "idempotency.lane_lock(text, text)"
    )
    # with their columns go outbox_ordered, outbox_unplaced and outbox_unsettled
    op.execute("ALTER TABLE idempotency.outbox DROP COLUMN place, DROP COLUMN taken")
    op.execute("DROP INDEX idempotency.outbox_pending, idempotency.outbox_stuck")
    op.execute("DROP SEQUENCE idempotency.place")
    op.execute("""
        CREATE INDEX outbox_pending ON idempotency.outbox (available_at, id) WHERE status = 'pending';
        CREATE INDEX outbox_ordered ON idempotency.outbox (operation, ordering_key, id)
            WHERE status <> 'published' AND ordering_key IS NOT NULL;
        CREATE INDEX outbox_unsettled ON idempotency.outbox (published_at) WHERE settled_at IS NULL;
    """)
