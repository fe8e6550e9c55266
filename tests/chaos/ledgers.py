"""Ledgers: append-only copies of everything that commits, from which a checker recomputes what happened.

    ledgers.install(engine)              # after the tables are there
    …                                    # the run
    changes = ledgers.read(engine)       # in the order in which each row was written

Triggers write one line for every row that is inserted, changed or deleted, in the transaction of the change: what was
rolled back leaves no line. Nothing here is unique, so what happened twice is there twice.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Engine, text

# Long texts are kept as their SHA-256: enough to compare, and a ledger of a long run stays small.
HASHED: Mapping[str, Sequence[str]] = {
    "records": ("message", "result"),
    "outbox": ("message",),
    "dead_letters": ("payload", "headers"),
    "audit": (),
}

_TABLES = """
CREATE SCHEMA ledger;

CREATE TABLE ledger.changes (
    -- rises in the order of writing, which for one row is also the order of commits: its writers wait for each other
    seq    bigint      GENERATED ALWAYS AS IDENTITY,
    at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    began  timestamptz NOT NULL DEFAULT now(),                         -- of the writing transaction
    txid   bigint      NOT NULL DEFAULT pg_current_xact_id()::text::bigint,
    pid    int         NOT NULL DEFAULT pg_backend_pid(),              -- of the server process
    writer text        NOT NULL DEFAULT current_setting('application_name'),
    book   text        NOT NULL,
    verb   text        NOT NULL,
    old    jsonb,
    new    jsonb
);

CREATE FUNCTION ledger.short(line jsonb, hashed text[]) RETURNS jsonb LANGUAGE sql IMMUTABLE AS $$
    SELECT jsonb_object_agg(key, CASE
        WHEN key = ANY(hashed) AND jsonb_typeof(value) = 'string'
            THEN to_jsonb(encode(sha256(convert_to(value #>> '{}', 'UTF8')), 'hex'))
        ELSE value END)
    FROM jsonb_each(line)
$$;

CREATE FUNCTION ledger.note() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO ledger.changes (book, verb, old, new) VALUES (
        CASE TG_TABLE_SCHEMA WHEN 'idempotency_partitions' THEN 'records' ELSE TG_TABLE_NAME END, TG_OP,
        CASE WHEN TG_OP <> 'INSERT' THEN ledger.short(to_jsonb(OLD), TG_ARGV::text[]) END,
        CASE WHEN TG_OP <> 'DELETE' THEN ledger.short(to_jsonb(NEW), TG_ARGV::text[]) END);
    RETURN NULL;
END $$;

CREATE FUNCTION ledger.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '%.%: % is refused, the ledger would not know', TG_TABLE_SCHEMA, TG_TABLE_NAME, TG_OP
        USING ERRCODE = 'insufficient_privilege';
END $$;

CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON ledger.changes
    FOR EACH STATEMENT EXECUTE FUNCTION ledger.refuse();
ALTER TABLE ledger.changes ENABLE ALWAYS TRIGGER append_only;
"""

_WATCH = """
CREATE TRIGGER zz_ledger AFTER INSERT OR UPDATE OR DELETE ON {table}
    FOR EACH ROW EXECUTE FUNCTION ledger.note({hashed});
ALTER TABLE {table} ENABLE ALWAYS TRIGGER zz_ledger;
CREATE TRIGGER zz_ledger_truncate BEFORE TRUNCATE ON {table}
    FOR EACH STATEMENT EXECUTE FUNCTION ledger.refuse();
ALTER TABLE {table} ENABLE ALWAYS TRIGGER zz_ledger_truncate;
"""


@dataclass(frozen=True, slots=True)
class Change:
    """One line: a row of `book` before and after, when, and in which transaction of whom."""

    seq: int
    at: datetime
    began: datetime
    txid: int
    pid: int
    writer: str
    book: str
    verb: str
    old: dict[str, Any] | None
    new: dict[str, Any] | None

    @property
    def row(self) -> dict[str, Any]:
        """The row after the change; before it, where it was deleted."""
        row = self.new if self.new is not None else self.old
        assert row is not None
        return row


def install(engine: Engine, business_tables: Sequence[str] = ("entries", "failures")) -> None:
    """Watch the library's tables and these of the application from now on. Once per database."""
    with engine.connect() as connection:
        connection = connection.execution_options(isolation_level="READ COMMITTED")
        with connection.begin():
            connection.execute(text(_TABLES))
            for table, hashed in HASHED.items():
                arguments = ", ".join(f"'{column}'" for column in hashed)
                connection.execute(text(_WATCH.format(table=f"idempotency.{table}", hashed=arguments)))
            for table in business_tables:
                connection.execute(text(_WATCH.format(table=table, hashed="")))


def read(engine: Engine) -> list[Change]:
    """Every line, in the order of writing."""
    with engine.connect() as connection:
        rows = connection.execute(
            text("SELECT seq, at, began, txid, pid, writer, book, verb, old, new FROM ledger.changes ORDER BY seq")
        )
        return [Change(*row) for row in rows]


def sign_writers() -> None:
    """Let every connection of this process, and of those forked from it, say in the ledger which process it is.

    Only with it can a checker see that a record was written by a process that did not hold it.
    """
    _sign()
    os.register_at_fork(after_in_child=_sign)


def _sign() -> None:
    os.environ["PGAPPNAME"] = f"pid {os.getpid()}"  # libpq reads it for each new connection


def history(changes: Sequence[Change], tenant: str, task: str, key: str) -> list[str]:
    """The lines of one operation, for people: what its record, outbox rows and dead letters went through."""
    lines = []
    for change in changes:
        row = change.row
        if (row.get("tenant"), row.get("task"), row.get("key")) != (tenant, task, key):
            continue
        parts = [f"{change.seq:>7} {change.at:%H:%M:%S.%f} tx {change.txid} {change.writer or '-'}", change.book]
        parts += [change.verb.lower()]
        before, after = change.old or {}, change.new or {}
        shown = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        parts += [
            f"{name}={_brief(before.get(name))}→{_brief(after.get(name))}" for name in shown if name not in _NOT_SHOWN
        ]
        lines.append(" ".join(parts))
    return lines


_NOT_SHOWN = frozenset(
    {"tenant", "task", "key", "message", "payload", "headers", "updated_at", "created_at", "fingerprint"}
)


def _brief(value: object) -> str:
    return "-" if value is None else str(value)[:60]
