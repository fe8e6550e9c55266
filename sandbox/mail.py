"""The mail server: accepts e-mail over SMTP and writes it to its ledger instead of delivering it.

Faults, by seed and Message-ID, at most once per message: `reject` (451, try again later) and `drop_after_data` (accepted,
then the connection is cut before the answer). Recipients at invalid.example do not exist (550).
"""

import asyncio
import sqlite3
import time
from email import message_from_bytes
from email.header import decode_header, make_header
from pathlib import Path
from typing import cast

from aiosmtpd.smtp import SMTP, Envelope, Session

from sandbox import ledger
from sandbox.faults import MAIL_FAULTS, check_rates, fires

UNKNOWN_DOMAIN = "invalid.example"
MAX_SIZE = 1_048_576


class MailSink:
    """The handler that aiosmtpd calls per recipient and per message. Raises `ValueError` for an invalid fault."""

    def __init__(self, directory: Path, rates: dict[str, float], seed: int) -> None:
        self._rates = check_rates(rates, MAIL_FAULTS)
        self._seed = seed
        self._db: sqlite3.Connection = ledger.open_mail(directory)

    def protocol(self) -> asyncio.Protocol:
        """Create the SMTP protocol of a connection; the event loop calls it for each."""
        protocol: asyncio.Protocol = SMTP(
            self,
            data_size_limit=MAX_SIZE,
            enable_SMTPUTF8=True,
            hostname="sandbox",
            ident="mail sandbox",
            loop=asyncio.get_running_loop(),
        )
        return protocol

    async def handle_RCPT(  # noqa: N802
        self, server: SMTP, session: Session, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        if address.rpartition("@")[2].lower() == UNKNOWN_DOMAIN:
            return "550 5.1.1 no such mailbox"
        envelope.rcpt_tos.append(address)
        envelope.rcpt_options.extend(options)
        return "250 2.1.5 OK"

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:  # noqa: N802
        assert isinstance(envelope.content, bytes)
        message = message_from_bytes(envelope.content)
        message_id = str(message.get("Message-ID", "")).strip()
        subject = str(make_header(decode_header(message.get("Subject", ""))))
        if self._injects("reject", message_id):
            return "451 4.3.0 try again later"
        with ledger.transaction(self._db):
            drop = self._injects("drop_after_data", message_id)
            self._db.executemany(
                "INSERT INTO messages (message_id, recipient, subject, created) VALUES (?, ?, ?, ?)",
                [(message_id, recipient, subject, time.time()) for recipient in envelope.rcpt_tos],
            )
        if drop:
            # Not close(), which would still send the answer.
            cast("asyncio.WriteTransport", server.transport).abort()
        return "250 2.0.0 accepted"

    def _injects(self, fault: str, message_id: str) -> bool:
        return fires(self._seed, fault, message_id, self._rates.get(fault, 0)) and ledger.inject_once(
            self._db, fault, message_id
        )
