"""The archive of dead letters, and the history of what people have corrected in one. Code of 0020 runs beside this.

To older code an archived letter is an open one, which it shows and may replay; the request that an edited operation was first made
with is to it another request under the key, which it refuses.
"""

from alembic import op

from idempotency.store.migrations.indexes import create_index

revision = "0021"
down_revision = "0020"

ARCHIVE = """
ALTER TABLE idempotency.dead_letters
    ADD COLUMN IF NOT EXISTS archived_at timestamptz,
    ADD COLUMN IF NOT EXISTS archived_by text,
    ADD COLUMN IF NOT EXISTS archived_because text
"""
# Whoever closes a letter, or makes it another one's (older code, too): what a person has archived it for is over.
UNARCHIVE = """
CREATE OR REPLACE FUNCTION idempotency.unarchive() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    NEW.archived_at := NULL;
    NEW.archived_by := NULL;
    NEW.archived_because := NULL;
    RETURN NEW;
END $$
"""
# Not by CREATE OR REPLACE, which Postgres 13 has not.
TRIGGERS = (
    "DROP TRIGGER IF EXISTS unarchive ON idempotency.dead_letters",
    """CREATE TRIGGER unarchive BEFORE UPDATE OF status, reason, generation ON idempotency.dead_letters FOR EACH ROW
WHEN (OLD.archived_at IS NOT NULL
      AND (OLD.status, OLD.reason, OLD.generation) IS DISTINCT FROM (NEW.status, NEW.reason, NEW.generation))
EXECUTE FUNCTION idempotency.unarchive()""",
)

EDITS = """
-- What people have corrected in a letter's message, or have asked for: gone with the letter.
CREATE TABLE IF NOT EXISTS idempotency.letter_edits (
    id          bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    letter      bigint      NOT NULL REFERENCES idempotency.dead_letters ON DELETE CASCADE,
    tenant      text        NOT NULL,
    task        text        NOT NULL,
    key         text        NOT NULL,
    edited_by   text        NOT NULL,
    -- what the person is known by; NULL: the database
    known_by    text,
    reason      text        NOT NULL,
    edited_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- of what moves money: by another person
    approved_by text,
    -- NULL: it waits for that person
    applied_at  timestamptz,
    before      text        NOT NULL,
    after       text        NOT NULL,
    fingerprint_before text,
    fingerprint_after  text NOT NULL,
    CHECK (approved_by IS DISTINCT FROM edited_by)
);
CREATE INDEX IF NOT EXISTS letter_edits_of_letter ON idempotency.letter_edits (letter);
CREATE UNIQUE INDEX IF NOT EXISTS letter_edits_waiting ON idempotency.letter_edits (letter) WHERE applied_at IS NULL;
CREATE INDEX IF NOT EXISTS letter_edits_of_operation ON idempotency.letter_edits (tenant, task, key);

-- Fingerprints that an operation had before an edit: a request with one is a duplicate. Kept as long as its record.
CREATE TABLE IF NOT EXISTS idempotency.former_fingerprints (
    tenant      text        NOT NULL,
    task        text        NOT NULL,
    key         text        NOT NULL,
    fingerprint text        NOT NULL,
    -- what the record's is since
    became      text        NOT NULL,
    PRIMARY KEY (tenant, task, key, fingerprint)
);
"""
# An erasure empties a letter's message, whichever code carries it out. Its history goes with it, which older code does not know.
EMPTY = """
CREATE OR REPLACE FUNCTION idempotency.empty_edits() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE idempotency.letter_edits SET before = '', after = '' WHERE letter = NEW.id;
    RETURN NULL;
END $$;
DROP TRIGGER IF EXISTS empty_edits ON idempotency.dead_letters;
CREATE TRIGGER empty_edits AFTER UPDATE OF payload ON idempotency.dead_letters FOR EACH ROW
WHEN (OLD.payload <> '' AND NEW.payload = '') EXECUTE FUNCTION idempotency.empty_edits();
"""
# As `dead_letters_groups`, of what is not archived: however many letters are, counting reads none of them. Code of 0020 counts those,
# too, and reads the letters for it.
LISTED = """CREATE INDEX CONCURRENTLY dead_letters_listed ON idempotency.dead_letters (consumer_service, id)
    INCLUDE (reason, task, header_task, code_version, tenant, failed_at) WHERE status = 'open' AND archived_at IS NULL"""
# Few: for their number and the oldest.
ARCHIVED = """CREATE INDEX CONCURRENTLY dead_letters_archived ON idempotency.dead_letters (consumer_service, archived_at)
    WHERE archived_at IS NOT NULL"""
GROUPS = """CREATE INDEX CONCURRENTLY dead_letters_groups ON idempotency.dead_letters (consumer_service, id)
    INCLUDE (reason, task, header_task, code_version, tenant, failed_at) WHERE status = 'open'"""


def upgrade() -> None:
    for statement in (ARCHIVE, UNARCHIVE, *TRIGGERS, EDITS, EMPTY):
        op.execute(statement)
    create_index(LISTED)  # these commit
    create_index(ARCHIVED)
    op.execute("DROP INDEX IF EXISTS idempotency.dead_letters_groups")


def downgrade() -> None:
    op.execute("DROP TRIGGER empty_edits ON idempotency.dead_letters")
    op.execute("DROP FUNCTION idempotency.empty_edits()")
    op.execute("DROP TABLE idempotency.letter_edits, idempotency.former_fingerprints")
    op.execute("DROP TRIGGER unarchive ON idempotency.dead_letters")
    op.execute("DROP FUNCTION idempotency.unarchive()")
    op.execute("DROP INDEX IF EXISTS idempotency.dead_letters_listed, idempotency.dead_letters_archived")
    op.execute(
        "ALTER TABLE idempotency.dead_letters DROP COLUMN archived_at, DROP COLUMN archived_by, DROP COLUMN archived_because"
    )
    create_index(GROUPS)
