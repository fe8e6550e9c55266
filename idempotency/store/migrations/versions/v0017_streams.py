"""Streams: where each consumer of one is, and who may move that on. Code of 0016 runs beside this."""

from alembic import op

from idempotency.store.migrations.indexes import create_index

revision = "0017"
down_revision = "0016"

# `position`: the offset of the next message; NULL before the first. `end_position`: the stream's end as its owner has last seen it.
# Half empty, so that the new version of a row, which every commit of a batch writes, finds room beside the old one.
POSITIONS = """
CREATE TABLE idempotency.stream_positions (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    service      text   NOT NULL,
    consumer     text   NOT NULL,
    topic        text   NOT NULL,
    partition    int    NOT NULL CHECK (partition >= 0),
    position     bigint CHECK (position >= 0),
    fence        bigint NOT NULL,
    owner        text,
    locked_until timestamptz,
    end_position bigint,
    stopped      text,
    advanced_at  timestamptz,
    UNIQUE (service, consumer, topic, partition),
    CONSTRAINT owned_for_a_time CHECK ((owner IS NULL) = (locked_until IS NULL))
) WITH (fillfactor = 50)
"""

# The processes among which a consumer's partitions are divided, where the broker has no groups.
MEMBERS = """
CREATE TABLE idempotency.stream_members (
    service      text        NOT NULL,
    consumer     text        NOT NULL,
    member       text        NOT NULL,
    locked_until timestamptz NOT NULL,
    PRIMARY KEY (service, consumer, member)
)
"""

# Of a message without a key, its letter is found by where the message is, also once it is closed.
LETTERS = """CREATE INDEX CONCURRENTLY dead_letters_of_streams ON idempotency.dead_letters (digest)
    WHERE starts_with(queue, 'stream.')"""

KINDS = "ALTER TABLE idempotency.processes ADD CONSTRAINT processes_kind_check CHECK (kind IN ({})) NOT VALID"
DROP_KINDS = "ALTER TABLE idempotency.processes DROP CONSTRAINT processes_kind_check"


def upgrade() -> None:
    create_index(LETTERS)  # first, because it commits
    op.execute(POSITIONS)
    op.execute(MEMBERS)
    op.execute(DROP_KINDS)
    op.execute(KINDS.format("'worker', 'relay', 'beat', 'stream'"))
    op.execute("ALTER TABLE idempotency.processes VALIDATE CONSTRAINT processes_kind_check")


def downgrade() -> None:
    op.execute("DELETE FROM idempotency.processes WHERE kind = 'stream'")
    op.execute(DROP_KINDS)
    op.execute(KINDS.format("'worker', 'relay', 'beat'"))
    op.execute("ALTER TABLE idempotency.processes VALIDATE CONSTRAINT processes_kind_check")
    op.execute("DROP INDEX idempotency.dead_letters_of_streams")
    op.execute("DROP TABLE idempotency.stream_members, idempotency.stream_positions")
