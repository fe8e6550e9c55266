"""The audit trail of what people change, and the mark of a generation that Celery was told to revoke.

The trigger holds for the tables' owner and for a superuser too, also under `session_replication_role = replica`.
What is not promised: whoever may change tables can take the trigger away.
"""

from alembic import op

revision = "0002"
down_revision = "0001"

AUDIT = """
CREATE TABLE idempotency.audit (
    id           bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at           timestamptz NOT NULL DEFAULT clock_timestamp(),
    actor        text        NOT NULL CHECK (char_length(actor) BETWEEN 1 AND 255),
    action       text        NOT NULL CHECK (action <> ''),
    tenant       text,
    operation    text,
    key          text,
    generation   int,
    fence_before bigint,
    fence_after  bigint,
    reason       text        CHECK (char_length(reason) BETWEEN 1 AND 500),
    details      jsonb       NOT NULL DEFAULT '{}'
);
CREATE INDEX audit_operation ON idempotency.audit (tenant, operation, key);

CREATE FUNCTION idempotency.refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'idempotency.audit is append-only' USING ERRCODE = 'insufficient_privilege';
END $$;
CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON idempotency.audit
    FOR EACH STATEMENT EXECUTE FUNCTION idempotency.refuse_change();
ALTER TABLE idempotency.audit ENABLE ALWAYS TRIGGER append_only;

-- The number and not a flag: a replay opens a new generation, which nobody has revoked.
ALTER TABLE idempotency.records ADD COLUMN revoked_generation int;
"""


def upgrade() -> None:
    op.execute(AUDIT)


def downgrade() -> None:
    op.execute("ALTER TABLE idempotency.records DROP COLUMN revoked_generation")
    op.execute("DROP TABLE idempotency.audit")
    op.execute("DROP FUNCTION idempotency.refuse_change()")
