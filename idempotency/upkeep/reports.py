"""The weekly report: new, closed and open dead letters per service."""

from __future__ import annotations

import smtplib
import ssl
from collections.abc import Sequence
from email.message import EmailMessage
from typing import Any
from urllib.parse import unquote, urlsplit

from celery import Celery
from sqlalchemy import Row

from ..application import runtime_of
from ..errors import IdempotencyError
from ..hosts import is_loopback
from ..settings import Settings
from ..store import alarms, dead_letters
from ..text import number_of, one_line

DAYS = 7
SMTP_TIMEOUT = 10.0


class MailRefused(IdempotencyError):
    """The report could not be mailed; the message says why and never contains a password."""


def text(rows: Sequence[Row[Any]], days: int = DAYS) -> str:
    """The report as plain text."""
    lines = [f"Dead letters of the last {days} days", ""]
    for row in rows:
        lines.append(
            f"{one_line(row.service)}: {row.new} new, {row.replayed} replayed, {row.discarded} discarded, {row.open} open"
            + (f", {row.archived} archived" if row.archived else "")
        )
        if row.open:
            lines.append(f"    oldest open since {row.oldest_open:%F %T %Z}; {one_line(row.reasons)}")
    return "\n".join(lines if rows else [*lines, "none"]) + "\n"


def mail(settings: Settings, body: str, *, days: int = DAYS) -> None:
    """Mail the report to `report_mail_to`: off this machine, and with a password, over TLS to a known server or not at all.

    Raises `MailRefused`.
    """
    if settings.report_mail_to is None:
        raise MailRefused("idempotency_report_mail_to: not set")
    message = EmailMessage()
    message["Subject"] = f"Dead letters of the last {number_of(days, 'day')}: {settings.service}"
    message["From"], message["To"] = settings.report_mail_from, settings.report_mail_to
    message.set_content(body)
    url = urlsplit(settings.report_smtp_url.get_secret_value())
    host, port = url.hostname or "127.0.0.1", url.port or 0
    try:
        # smtplib's default context accepts any certificate; SSL_CERT_FILE adds an authority
        context = ssl.create_default_context()
        with (
            smtplib.SMTP_SSL(host, port, timeout=SMTP_TIMEOUT, context=context)
            if url.scheme == "smtps"
            else smtplib.SMTP(host, port, timeout=SMTP_TIMEOUT)
        ) as server:
            if url.scheme != "smtps" and (url.username or not is_loopback(host)):
                server.starttls(context=context)
            if url.username:
                server.login(unquote(url.username), unquote(url.password or ""))
            server.send_message(message)
    except (OSError, smtplib.SMTPException) as error:
        raise MailRefused(f"idempotency_report_smtp_url: {url.hostname}: {type(error).__name__}") from None


def mail_weekly(app: Celery) -> bool:
    """Mail the report if it is due and `report_mail_to` is set; returns whether it was sent. Safe to run concurrently."""
    runtime = runtime_of(app)
    if runtime.settings.report_mail_to is None:
        return False
    with runtime.engine.begin() as connection:  # if mailing fails, it is rolled back and due again
        service = runtime.settings.service
        if not alarms.try_begin_report(connection, service, days=DAYS):
            return False
        mail(runtime.settings, text(dead_letters.report(connection, service, days=DAYS)))
    return True
