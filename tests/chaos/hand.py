"""Ledgers made by hand: what the library writes, by SQL, a transaction at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import text

from tests.chaos import ledgers
from tests.chaos.checker import Accepted, Evidence, check

OPERATION = "tests.support.bank.deposit"


class Hand:
    """Writes what the library writes, by SQL; every method is one transaction unless `with hand.together()`."""

    def __init__(self, engine: Any) -> None:
        self._connection = engine.connect()

    def sql(self, *statements: str, **values: Any) -> Any:
        """Run statements in one transaction; `:row` stands for the key's WHERE clause."""
        where = "tenant = :tenant AND task = :task AND key = :key"
        values = {"tenant": "shop", "task": OPERATION, "key": "a"} | values
        result = None
        self._connection.exec_driver_sql("BEGIN")
        try:
            for statement in statements:
                query = text(statement.replace(":row", where))
                known = {name: value for name, value in values.items() if f":{name}" in query.text}
                result = self._connection.execute(query, known)
        finally:
            self._connection.exec_driver_sql("COMMIT")
        return result

    def close(self) -> None:
        self._connection.close()


ENQUEUE = """INSERT INTO idempotency.outbox (message_id, tenant, task, key, fingerprint, message, queue, origin,
    ordering_key) VALUES (gen_random_uuid()::text, :tenant, :task, :key, 'f', '{}', 'q', 'enqueue', 'order')"""
PUBLISH = """UPDATE idempotency.outbox SET status = 'published', published_at = clock_timestamp()
    WHERE :row AND status = 'pending'"""
SETTLE = "UPDATE idempotency.outbox SET settled_at = clock_timestamp() WHERE :row AND status = 'published'"
# MERGE, because a table in partitions takes no ON CONFLICT
CLAIM = """MERGE INTO idempotency.records r USING (
        SELECT CAST(:tenant AS text), CAST(:task AS text), CAST(:key AS text), nextval('idempotency.fence'),
               gen_random_uuid()::text, clock_timestamp() + interval '1 min'
    ) claim (tenant, task, key, fence, token, until)
    ON (r.tenant, r.task, r.key) = (claim.tenant, claim.task, claim.key)
    WHEN MATCHED THEN UPDATE SET status = 'started', fence = claim.fence, token = claim.token,
        attempts = r.attempts + 1, locked_until = claim.until, locked_by = 'h|b|n|7|1', available_at = NULL,
        completed_at = NULL, expires_at = NULL, result = NULL
    WHEN NOT MATCHED THEN INSERT (tenant, task, key, status, fence, token, locked_until, locked_by, fingerprint, message)
        VALUES (claim.tenant, claim.task, claim.key, 'started', claim.fence, claim.token, claim.until, 'h|b|n|7|1', 'f',
                '{"m": 1}')"""
DEPOSIT = "INSERT INTO entries (account, amount) VALUES (:key, 1)"
COMPLETE = """UPDATE idempotency.records SET status = 'completed', result = '{"ok": 1}', response_code = 200,
    completed_at = clock_timestamp(), locked_until = NULL, available_at = NULL, token = 't', locked_by = 'h|b|n|7|1',
    expires_at = clock_timestamp() + interval '1 hour' WHERE :row"""
FAIL = """UPDATE idempotency.records SET status = 'failed', error_code = 'no_account', error = '{"code": "no_account", "message": "m"}',
    completed_at = clock_timestamp(), locked_until = NULL, expires_at = clock_timestamp() + interval '1 hour'
    WHERE :row"""
LETTER = """INSERT INTO idempotency.dead_letters (source, tenant, task, key, generation, fingerprint, reason,
    first_error, last_error, attempts, headers, payload) SELECT 'operation', tenant, task, key, generation, 'f',
    'no_account', 'e', 'e', attempts, '{}', '{}' FROM idempotency.records WHERE :row"""
FAILURE = "INSERT INTO failures (account, code) VALUES (:key, 'no_account')"
RELEASE = """UPDATE idempotency.records SET status = 'released', token = NULL, locked_until = NULL, locked_by = NULL,
    available_at = clock_timestamp() WHERE :row"""
NEXT = """INSERT INTO idempotency.outbox (message_id, tenant, task, key, fingerprint, message, queue, origin) VALUES
    (gen_random_uuid()::text, :tenant, :task, :key, 'f', '{}', 'q', 'retry')"""
RECOVER = NEXT.replace("'retry'", "'recover'")
REPLAYED = "UPDATE idempotency.dead_letters SET status = 'replayed', closed_at = clock_timestamp() WHERE :row"
REOPEN = """UPDATE idempotency.records SET status = 'released', generation = generation + 1, attempts = 0,
    token = NULL, locked_by = NULL, available_at = clock_timestamp(), completed_at = NULL, expires_at = NULL,
    error = NULL, error_code = NULL WHERE :row"""
REPLAY = NEXT.replace("'retry'", "'replay'")
OVER = "UPDATE idempotency.records SET locked_until = clock_timestamp() - interval '1 s' WHERE :row"
EFFECT = """UPDATE idempotency.records SET effects = jsonb_build_object('call',
    jsonb_build_object('kind', 'effect', 'state', 'done', 'key', cast(:gateway AS text), 'number', 1)) WHERE :row"""
PURGE = "DELETE FROM idempotency.records WHERE :row"
PURGE_ROWS = "DELETE FROM idempotency.outbox WHERE :row"
COMPLETE_BRIEFLY, FAIL_BRIEFLY = (end.replace("+ interval '1 hour'", "- interval '1 s'") for end in (COMPLETE, FAIL))


TABLES = "CREATE TABLE reversals (id bigserial PRIMARY KEY, account text, amount bigint)"


@contextmanager
def writing(engine: Any) -> Iterator[Hand]:
    """A hand over a database whose tables are watched from now on."""
    with engine.connect() as connection:
        connection.execute(text(TABLES))
        # The checker has to see what the table itself would refuse.
        connection.execute(text("ALTER TABLE idempotency.records DISABLE TRIGGER USER"))
        connection.commit()
    ledgers.install(engine, ("entries", "failures", "reversals"))
    hand = Hand(engine)
    try:
        yield hand
    finally:
        hand.close()


def deposited(key: str = "a", **more: Any) -> Accepted:
    return Accepted("shop", OPERATION, key, **({"rows": ((key, 1),), "result": '{"ok": 1}'} | more))


def reported(engine: Any, *accepted: Accepted, **evidence: Any) -> set[str]:
    """The invariants that the checker says are broken."""
    return {violation.invariant for violation in findings(engine, *accepted, **evidence).violations}


def findings(engine: Any, *accepted: Accepted, **evidence: Any) -> Any:
    return check(Evidence(engine, accepted, **({"tenants": frozenset({"shop", "other"})} | evidence)))


def enqueued_and_done(hand: Hand, key: str = "a", **more: Any) -> None:
    hand.sql(ENQUEUE, key=key, **more)
    hand.sql(PUBLISH, key=key, **more)
    hand.sql(CLAIM, key=key, **more)
    hand.sql(DEPOSIT, COMPLETE, key=key, **more)
    hand.sql(SETTLE, key=key, **more)
