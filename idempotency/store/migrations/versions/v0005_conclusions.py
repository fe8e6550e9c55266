"""What an end may conclude: the code of a failure beside its effects, and commands that change nothing twice.

A plain failure over an effect that is open, or that happened, is refused by the table itself: whatever ends an
operation, the record says `effect_unknown` or `unfinished` then.
"""

from alembic import op

from idempotency.store.migrations.indexes import create_index

revision = "0005"
down_revision = "0004"

_KNOWN = """
        WHEN NEW.status NOT IN ('started', 'released', 'completed', 'failed') THEN 'records_status_check'
        WHEN char_length(NEW.key) NOT BETWEEN 1 AND 255 THEN 'records_key_check'
        WHEN NEW.generation < 1 THEN 'records_generation_check'
        WHEN NEW.attempts < 0 THEN 'records_attempts_check'
        WHEN (NEW.status = 'started') <> (NEW.locked_until IS NOT NULL)
            OR NEW.status = 'started' AND num_nulls(NEW.token, NEW.locked_by) > 0 THEN 'started_has_a_holder'
        WHEN (NEW.status = 'released') <> (NEW.available_at IS NOT NULL)
            OR NEW.status = 'released' AND num_nonnulls(NEW.token, NEW.locked_by) > 0 THEN 'released_has_no_holder'
        WHEN (NEW.status = 'completed') <> (NEW.result IS NOT NULL)
            OR NEW.status = 'completed' AND NEW.response_code IS NULL THEN 'completed_has_a_result'
        WHEN NEW.status = 'failed' AND NEW.error IS NULL THEN 'failed_has_an_error'
        WHEN num_nulls(NEW.completed_at, NEW.expires_at) <>
            CASE WHEN NEW.status IN ('completed', 'failed') THEN 0 ELSE 2 END THEN 'terminal_has_its_times'
"""

_CONCLUSIONS = """
        WHEN (NEW.status = 'failed') <> (NEW.error_code IS NOT NULL) THEN 'failed_has_a_code'
        WHEN NEW.status = 'failed' AND NEW.error_code <> 'effect_unknown'
            AND jsonb_path_exists(NEW.effects, '$.* ? (@.state == "begun")') THEN 'failed_over_an_open_effect'
        WHEN NEW.status = 'failed' AND NEW.error_code NOT IN ('effect_unknown', 'unfinished')
            AND jsonb_path_exists(NEW.effects, '$.* ? (@.kind == "effect" && @.state == "done")')
            THEN 'failed_over_an_effect_that_happened'
"""

_FUNCTION = """
CREATE OR REPLACE FUNCTION idempotency.check_record() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    broken text := CASE {cases} END;
BEGIN
    IF broken IS NOT NULL THEN
        RAISE EXCEPTION 'a record that breaks %', broken USING ERRCODE = 'check_violation', CONSTRAINT = broken;
    END IF;
    RETURN NEW;
END $$;
"""


def upgrade() -> None:
    op.execute("ALTER TABLE idempotency.records ADD COLUMN IF NOT EXISTS error_code text")
    # Before the trigger knows codes; the text is read here once, and by nothing afterwards.
    op.execute("""
        UPDATE idempotency.records SET error_code = CASE
            WHEN jsonb_path_exists(effects, '$.* ? (@.state == "begun")') THEN 'effect_unknown'
            ELSE coalesce(substring(error from '"code": "([^"]*)"'), 'permanent_error') END
        WHERE status = 'failed'
    """)
    op.execute(_FUNCTION.format(cases=_KNOWN + _CONCLUSIONS))
    op.execute("ALTER TABLE idempotency.audit ADD COLUMN IF NOT EXISTS request_id text")
    create_index(
        "CREATE UNIQUE INDEX CONCURRENTLY audit_request ON idempotency.audit (request_id) WHERE request_id IS NOT NULL"
    )


def downgrade() -> None:
    op.execute("DROP INDEX idempotency.audit_request")
    op.execute("ALTER TABLE idempotency.audit DROP COLUMN request_id")
    op.execute(_FUNCTION.format(cases=_KNOWN))
    op.execute("ALTER TABLE idempotency.records DROP COLUMN error_code")
