"""The books of the sandboxes, as they are on disk after a run that never was."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sandbox import ledger

Rows = Sequence[tuple[object, ...]]


def write_ledgers(
    directory: Path, charges: Rows, refunds: Rows, mails: Rows, labels: Rows = (), label_ends: Rows = ()
) -> None:
    """Write what the provider, the mail server and the carrier have seen."""
    provider, mail, carrier = (
        opened(directory) for opened in (ledger.open_provider, ledger.open_mail, ledger.open_carrier)
    )
    provider.executemany(
        "INSERT INTO charges (id, amount, currency, payment_method, idempotency_key, metadata, created)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        charges,
    )
    provider.executemany(
        "INSERT INTO refunds (id, payment_intent, amount, currency, idempotency_key, metadata, created)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        refunds,
    )
    mail.executemany("INSERT INTO messages (message_id, recipient, subject, created) VALUES (?, ?, ?, ?)", mails)
    carrier.executemany(
        "INSERT INTO labels (id, reference, kind, idempotency_key, metadata, created) VALUES (?, ?, ?, ?, ?, ?)", labels
    )
    carrier.executemany("INSERT INTO label_ends (label_id, status, created) VALUES (?, ?, ?)", label_ends)
    for book in (provider, mail, carrier):
        book.close()
