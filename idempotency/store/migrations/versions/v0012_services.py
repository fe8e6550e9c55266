"""The application that a record, a row of the outbox and a lane belong to: its `service`.

Code of 0011 runs beside this: it writes rows without a service, which are adopted by the application that knows their
task (`store/outbox.py`), and finds its own with the new indexes, if more slowly.
"""

from alembic import op

from idempotency.store.migrations.indexes import create_index
from idempotency.store.migrations.versions.v0011_words import FUNCTIONS as FUNCTIONS_OF_0011

revision = "0012"
down_revision = "0011"

# NULL: written by code of 0011.
COLUMNS = """
ALTER TABLE idempotency.records ADD COLUMN IF NOT EXISTS service text;
ALTER TABLE idempotency.outbox ADD COLUMN IF NOT EXISTS service text;
-- that of the lane's first row
ALTER TABLE idempotency.lanes ADD COLUMN IF NOT EXISTS service text;
"""

UNNAMED = """CREATE INDEX CONCURRENTLY outbox_unnamed ON idempotency.outbox (task)
    WHERE service IS NULL AND (status = 'pending' OR settled_at IS NULL)"""

# Each takes the place of another one once it is built.
INDEXES = {
    "outbox_pending": """CREATE INDEX CONCURRENTLY {name} ON idempotency.outbox ({service}available_at, id)
        WHERE status = 'pending' AND ordering_key IS NULL""",
    "outbox_settled": """CREATE INDEX CONCURRENTLY {name} ON idempotency.outbox ({service}status,
        greatest(settled_at, kept_at)) WHERE settled_at IS NOT NULL""",
    "records_purgeable": """CREATE INDEX CONCURRENTLY {name} ON idempotency.records (
        {service}greatest(expires_at, kept_until)) WHERE status IN ('completed', 'failed')""",
    "lanes_due": """CREATE INDEX CONCURRENTLY {name} ON idempotency.lanes ({service}available_at) WHERE NOT blocked""",
}
# One that is refused because of another application's record must not hide a third one's.
ONE_OPEN = """CREATE UNIQUE INDEX CONCURRENTLY {name} ON idempotency.dead_letters (tenant, task, key, generation, reason,
    fingerprint{service}) WHERE status = 'open'"""

# As in 0011, with the service of each lane's first row.
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
        SELECT DISTINCT idempotency.lane_lock(task, ordering_key) FROM idempotency.outbox
        WHERE id >= NEW.id AND status = 'pending' AND ordering_key IS NOT NULL AND place IS NULL
        ORDER BY 1
    LOOP
        PERFORM pg_advisory_xact_lock(122441, lock);
    END LOOP;
    next := nextval('idempotency.place');
    WITH placed AS (
        UPDATE idempotency.outbox SET place = next
        WHERE id >= NEW.id AND status = 'pending' AND ordering_key IS NOT NULL AND place IS NULL
        RETURNING task, ordering_key, id, available_at, service
    )
    INSERT INTO idempotency.lanes (task, ordering_key, available_at, service)
    SELECT DISTINCT ON (task COLLATE "C", ordering_key COLLATE "C") task, ordering_key, available_at, service
    FROM placed ORDER BY task COLLATE "C", ordering_key COLLATE "C", id
    ON CONFLICT DO NOTHING;
    RETURN NULL;
END $$;

CREATE OR REPLACE FUNCTION idempotency.refresh_lane(lane_task text, lane_key text) RETURNS void
LANGUAGE plpgsql SET enable_seqscan TO off AS $$
DECLARE
    head record;
BEGIN
    PERFORM FROM idempotency.lanes WHERE task = lane_task AND ordering_key = lane_key FOR UPDATE;
    FOR look IN 1..2 LOOP
        SELECT status, available_at, service INTO head FROM idempotency.outbox
        WHERE task = lane_task AND ordering_key = lane_key AND status <> 'published' AND place IS NOT NULL
        ORDER BY place, id LIMIT 1;
        IF FOUND THEN
            INSERT INTO idempotency.lanes (task, ordering_key, available_at, blocked, service)
            VALUES (lane_task, lane_key, head.available_at, head.status = 'failed', head.service)
            ON CONFLICT (task, ordering_key) DO UPDATE
            SET available_at = excluded.available_at, blocked = excluded.blocked, service = excluded.service,
                relayed_until = NULL;
            RETURN;
        END IF;
        IF look = 1 AND NOT pg_try_advisory_xact_lock(122441, idempotency.lane_lock(lane_task, lane_key)) THEN
            UPDATE idempotency.lanes SET available_at = clock_timestamp(), relayed_until = NULL
            WHERE task = lane_task AND ordering_key = lane_key;
            RETURN;
        END IF;
    END LOOP;
    DELETE FROM idempotency.lanes WHERE task = lane_task AND ordering_key = lane_key;
END $$;
"""


def upgrade() -> None:
    op.execute(COLUMNS)
    create_index(UNNAMED)
    _replace_indexes("service, ", ", coalesce(consumer_service, '')")
    op.execute(FUNCTIONS)


def downgrade() -> None:
    # of the refusals of one request that several applications have, the newest stays open
    op.execute("""
        UPDATE idempotency.dead_letters d SET status = 'discarded', closed_at = clock_timestamp()
        WHERE d.status = 'open' AND EXISTS (
            SELECT FROM idempotency.dead_letters newer WHERE newer.status = 'open' AND newer.id > d.id
              AND (newer.tenant, newer.task, newer.key, newer.generation, newer.reason, newer.fingerprint)
                = (d.tenant, d.task, d.key, d.generation, d.reason, d.fingerprint))
    """)
    _replace_indexes("", "")
    op.execute("DROP INDEX IF EXISTS idempotency.outbox_unnamed")
    op.execute(FUNCTIONS_OF_0011.format(task="task"))
    for table in ("lanes", "outbox", "records"):
        op.execute(f"ALTER TABLE idempotency.{table} DROP COLUMN IF EXISTS service")


def _replace_indexes(first: str, last: str) -> None:
    statements = {name: (statement, first) for name, statement in INDEXES.items()}
    statements["dead_letters_one_open"] = (ONE_OPEN, last)
    for name, (statement, service) in statements.items():
        create_index(statement.format(name=f"{name}_new", service=service))
    for name in statements:
        op.execute(f"DROP INDEX IF EXISTS idempotency.{name}")
        op.execute(f"ALTER INDEX idempotency.{name}_new RENAME TO {name}")
