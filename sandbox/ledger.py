"""What really happened: the sandbox appends to it, a checker reads it.

Only the provider's object ids are unique: a purchase charged twice is two rows. Every answer is sent after its commit.
WAL without fsync keeps commits if the process is killed, but not in a power cut.
"""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

PROVIDER_FILE = "provider.sqlite"
CARRIER_FILE = "carrier.sqlite"
MAIL_FILE = "mail.sqlite"

_INJECTED = """
CREATE TABLE IF NOT EXISTS injected (
    fault TEXT NOT NULL, identity TEXT NOT NULL, PRIMARY KEY (fault, identity)
) WITHOUT ROWID;
"""

_ANSWERS = """
CREATE TABLE IF NOT EXISTS answers (
    idempotency_key TEXT NOT NULL UNIQUE, endpoint TEXT NOT NULL, fingerprint BLOB NOT NULL,
    status INTEGER NOT NULL, body TEXT NOT NULL, request_id TEXT NOT NULL, created REAL NOT NULL
);
"""


def _append_only(*tables: str) -> str:
    return "".join(
        f"""
CREATE TRIGGER IF NOT EXISTS {table}_no_{verb} BEFORE {verb} ON {table}
BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END;
"""
        for table in tables
        for verb in ("update", "delete")
    )


_PROVIDER_SCHEMA = (
    """
CREATE TABLE IF NOT EXISTS charges (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, amount INTEGER NOT NULL, currency TEXT NOT NULL,
    payment_method TEXT NOT NULL, idempotency_key TEXT NOT NULL, metadata TEXT NOT NULL, created REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS declines (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, amount INTEGER NOT NULL, currency TEXT NOT NULL,
    payment_method TEXT NOT NULL, idempotency_key TEXT NOT NULL, metadata TEXT NOT NULL, created REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS refunds (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, payment_intent TEXT NOT NULL, amount INTEGER NOT NULL,
    currency TEXT NOT NULL, idempotency_key TEXT NOT NULL, metadata TEXT NOT NULL, created REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS undecided (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, amount INTEGER NOT NULL, currency TEXT NOT NULL,
    payment_method TEXT NOT NULL, idempotency_key TEXT NOT NULL, metadata TEXT NOT NULL, created REAL NOT NULL,
    decided_at REAL NOT NULL, is_declined INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS pending_refunds (id TEXT NOT NULL PRIMARY KEY, decided_at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS failed_refunds (id TEXT NOT NULL PRIMARY KEY, reason TEXT NOT NULL, created REAL NOT NULL);
CREATE TABLE IF NOT EXISTS events (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, body TEXT NOT NULL, due REAL NOT NULL, attempts INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS events_due ON events (due);
CREATE INDEX IF NOT EXISTS undecided_purchase ON undecided (json_extract(metadata, '$."purchase_id"'));
CREATE INDEX IF NOT EXISTS charges_purchase ON charges (json_extract(metadata, '$."purchase_id"'));
CREATE INDEX IF NOT EXISTS declines_purchase ON declines (json_extract(metadata, '$."purchase_id"'));
CREATE INDEX IF NOT EXISTS refunds_intent ON refunds (payment_intent);
CREATE TABLE IF NOT EXISTS calls (
    endpoint TEXT NOT NULL, idempotency_key TEXT NOT NULL, count INTEGER NOT NULL,
    PRIMARY KEY (idempotency_key, endpoint)
) WITHOUT ROWID;
"""
    + _append_only("charges", "declines", "refunds", "undecided", "failed_refunds")
    + _ANSWERS
    + _INJECTED
)

# A label has at most one end: what came first.
_CARRIER_SCHEMA = (
    """
CREATE TABLE IF NOT EXISTS labels (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, reference TEXT NOT NULL, kind TEXT NOT NULL,
    idempotency_key TEXT NOT NULL, metadata TEXT NOT NULL, created REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS labels_key ON labels (idempotency_key);
CREATE TABLE IF NOT EXISTS label_ends (
    label_id TEXT NOT NULL PRIMARY KEY, status TEXT NOT NULL, created REAL NOT NULL
);
"""
    + _append_only("labels", "label_ends")
    + _ANSWERS
    + _INJECTED
)

_MAIL_SCHEMA = (
    """
CREATE TABLE IF NOT EXISTS messages (
    seq INTEGER PRIMARY KEY, message_id TEXT NOT NULL, recipient TEXT NOT NULL, subject TEXT NOT NULL,
    created REAL NOT NULL
);
"""
    + _INJECTED
)


@dataclass(frozen=True, slots=True)
class Charge:
    """A captured payment. `id` is the payment intent's; `amount` is in the currency's minor unit."""

    id: str
    amount: int
    currency: str
    idempotency_key: str
    metadata: dict[str, str]
    created: float


@dataclass(frozen=True, slots=True)
class Refund:
    """A refund of one payment intent. `has_failed`: its money has come back."""

    id: str
    payment_intent: str
    amount: int
    currency: str
    idempotency_key: str
    metadata: dict[str, str]
    created: float
    has_failed: bool = False


@dataclass(frozen=True, slots=True)
class Message:
    """An accepted e-mail; one row per recipient."""

    message_id: str
    recipient: str
    subject: str
    created: float


@dataclass(frozen=True, slots=True)
class Label:
    """A label that the carrier has made. `status`: created, voided, or collected."""

    id: str
    reference: str
    kind: str
    idempotency_key: str
    metadata: dict[str, str]
    created: float
    status: str


class Ledger(NamedTuple):
    """Charges and refunds, in order."""

    charges: list[Charge]
    refunds: list[Refund]


def read(directory: str | Path) -> Ledger:
    """Read the provider's charges and refunds as one snapshot, without disturbing it.

    `directory` is the sandbox's `--data`. Raises `FileNotFoundError` if no sandbox has run there.
    """
    with _reading(Path(directory) / PROVIDER_FILE) as db:
        charges = db.execute(
            "SELECT id, amount, currency, idempotency_key, metadata, created FROM charges ORDER BY seq"
        )
        refunds = db.execute(
            "SELECT r.id, payment_intent, amount, currency, idempotency_key, metadata, r.created, f.id IS NOT NULL"
            " FROM refunds r LEFT JOIN failed_refunds f ON f.id = r.id ORDER BY seq"
        )
        return Ledger(
            [
                Charge(identifier, amount, currency, key, json.loads(metadata), created)
                for identifier, amount, currency, key, metadata, created in charges
            ],
            [
                Refund(identifier, intent, amount, currency, key, json.loads(metadata), created, bool(has_failed))
                for identifier, intent, amount, currency, key, metadata, created, has_failed in refunds
            ],
        )


def untold(directory: str | Path) -> int:
    """How many webhooks of the provider are not answered yet."""
    with _reading(Path(directory) / PROVIDER_FILE) as db:
        (number,) = db.execute("SELECT count(*) FROM events").fetchone()
        return int(number)


def read_mail(directory: str | Path) -> list[Message]:
    """Read the e-mails that the mail sandbox accepted, in order.

    `directory` is the sandbox's `--data`. Raises `FileNotFoundError` if no sandbox has run there.
    """
    with _reading(Path(directory) / MAIL_FILE) as db:
        rows = db.execute("SELECT message_id, recipient, subject, created FROM messages ORDER BY seq")
        return [Message(*row) for row in rows]


def read_labels(directory: str | Path) -> list[Label]:
    """Read the labels that the carrier has made, in order.

    `directory` is the sandbox's `--data`. Raises `FileNotFoundError` if no sandbox has run there.
    """
    with _reading(Path(directory) / CARRIER_FILE) as db:
        rows = db.execute(
            "SELECT id, reference, kind, idempotency_key, metadata, l.created, coalesce(e.status, 'created')"
            " FROM labels l LEFT JOIN label_ends e ON e.label_id = l.id ORDER BY seq"
        )
        return [Label(id, of, kind, key, json.loads(data), at, status) for id, of, kind, key, data, at, status in rows]


def open_provider(directory: Path) -> sqlite3.Connection:
    """Open the provider's ledger for its only writer; creates it if missing."""
    return _writing(directory / PROVIDER_FILE, _PROVIDER_SCHEMA)


def open_carrier(directory: Path) -> sqlite3.Connection:
    """Open the carrier's ledger for its only writer; creates it if missing."""
    return _writing(directory / CARRIER_FILE, _CARRIER_SCHEMA)


def open_mail(directory: Path) -> sqlite3.Connection:
    """Open the mail ledger for its only writer; creates it if missing."""
    return _writing(directory / MAIL_FILE, _MAIL_SCHEMA)


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Commit everything written in the block, or nothing."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


def inject_once(db: sqlite3.Connection, fault: str, identity: str) -> bool:
    """Record that a fault is about to hit `identity`; False if it already has."""
    return db.execute("INSERT OR IGNORE INTO injected VALUES (?, ?)", (fault, identity)).rowcount == 1


def _writing(path: Path, schema: str) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=OFF")
    db.executescript(schema)
    return db


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    if not path.exists():
        raise FileNotFoundError(f"no ledger at {path}: was the sandbox started with --data {path.parent}?")
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, isolation_level=None)) as db:
        db.execute("BEGIN")
        yield db
