"""E-mail over SMTP, with the same Message-ID in every attempt.

SMTP has no idempotency keys: if the connection is lost after the message was sent, it is unknown whether it was
accepted, and sending it again may deliver it twice. The Message-ID is derived from the idempotency key, so that a mail
server or a person can recognise the second copy.

Off this machine, mail goes over TLS to a server whose certificate is valid for its name, or not at all.
"""

import hashlib
import os
import re
import smtplib
import socket
import ssl
import threading
from dataclasses import dataclass
from email.header import Header
from email.mime.multipart import MIMEMultipart
from email.mime.text import MIMEText
from email.policy import compat32
from email.utils import formatdate
from typing import Any, Literal, Never, Self
from urllib.parse import parse_qs, unquote, urlsplit

from idempotency import Defer, PermanentError
from idempotency.hosts import is_loopback

UNAVAILABLE_SECONDS = 5.0
TRY_LATER_SECONDS = 30.0
# RFC 5321 allows 256 characters including angle brackets.
MAX_ADDRESS = 254
MAX_SUBJECT = 500
# RFC 5322: 998 characters and the line end.
MAX_LINE = 998
# The older policy folds headers without parsing them and is several times faster.
_WIRE = compat32.clone(linesep="\r\n", max_line_length=MAX_LINE)
_ADDRESS = re.compile(r"[!-;=?-~]+@[A-Za-z0-9.-]+")
# What a line of a text begins with that is not to end it (RFC 5321, 4.5.2).
_DOT = re.compile(rb"(?m)^\.")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class MailServer:
    """Where a mail server is, and how it is spoken to. `tls`: from the first byte (RFC 8314), or after STARTTLS (RFC 3207)."""

    host: str
    port: int
    tls: Literal["implicit", "starttls", "none"] = "none"
    user: str | None = None
    password: str | None = None

    def __repr__(self) -> str:
        return f"MailServer({self.host}:{self.port}, tls={self.tls})"

    @classmethod
    def at(cls, url: str) -> Self:
        """Read `smtps://user:password@host` or `smtp://…`, which means STARTTLS, except on this machine.

        `?starttls=never` is for this machine alone. Raises `ValueError`, which never shows the address.
        """
        try:
            parts = urlsplit(url)
            host, port, options = parts.hostname, parts.port, parse_qs(parts.query, strict_parsing=bool(parts.query))
        except ValueError:
            raise ValueError("SMTP_URL: not an address") from None
        if parts.scheme not in ("smtp", "smtps") or not host or parts.path.strip("/"):
            raise ValueError("SMTP_URL: must be smtp://[user:password@]host[:port] or smtps://…")
        if options not in ({}, {"starttls": ["never"]}) or (options and parts.scheme == "smtps"):
            raise ValueError("SMTP_URL: the only option is ?starttls=never, of smtp://")
        is_here = is_loopback(host)
        if options and not is_here:
            raise ValueError("SMTP_URL: starttls=never is for a server on this machine; another one needs TLS")
        tls: Literal["implicit", "starttls", "none"] = (
            "implicit" if parts.scheme == "smtps" else "none" if is_here else "starttls"
        )
        user, password = (None if part is None else unquote(part) for part in (parts.username, parts.password))
        return cls(host, port or {"implicit": 465, "starttls": 587, "none": 25}[tls], tls, user, password)


class MailError(Exception):
    """The connection was lost after the message was sent, or the answer is none to it; it is unknown whether it was accepted."""


class _Connection(threading.local):
    smtp: smtplib.SMTP | None = None
    pid: int = 0


class Mailer:
    """Sends e-mail through one SMTP server, with one persistent connection per thread.

    `sender` is the From address; Message-IDs end in its domain. `timeout` is in seconds. Raises `ValueError` for either.
    """

    def __init__(self, server: MailServer, *, sender: str, timeout: float = 10.0) -> None:
        if not _ADDRESS.fullmatch(sender):
            raise ValueError("sender must be one e-mail address")
        if not 0 < timeout <= 3600:
            raise ValueError(f"timeout is {timeout}; it must be above 0 and at most 3600 seconds")
        self._server = server
        self._sender = sender
        self._domain = sender.rpartition("@")[2]
        self._timeout = timeout
        self._connection = _Connection()

    def message_id(self, idempotency_key: str) -> str:
        """The Message-ID for this idempotency key, the same in every attempt."""
        digest = hashlib.sha256(idempotency_key.encode()).hexdigest()
        return f"<{digest[:40]}@{self._domain}>"

    def send(
        self, recipient: str, subject: str, body: str, html: str | None = None, *, idempotency_key: str
    ) -> dict[str, Any]:
        """Send one e-mail, as text or also as HTML, and return its `message_id`.

        Raises `Defer` if the server is unavailable or answers 4xx, `PermanentError` if it answers 5xx or a field is
        malformed, and `MailError` if the connection broke after the message was sent, or the answer says nothing about it.
        """
        _check(recipient, subject)
        message: MIMEText | MIMEMultipart = _part(body, "plain")
        if html is not None:
            # the same in every attempt, as the Message-ID is; the last part is the one that is preferred (RFC 2046, 5.1.4)
            boundary = hashlib.sha256(f"boundary {idempotency_key}".encode()).hexdigest()
            message = MIMEMultipart("alternative", boundary, [message, _part(html, "html")], policy=_WIRE)
        message["From"] = self._sender
        message["To"] = recipient
        message.add_header("Subject", subject if subject.isascii() else Header(subject, "utf-8").encode())
        message["Date"] = formatdate()
        message["Message-ID"] = message_id = self.message_id(idempotency_key)
        text = message.as_bytes()

        try:
            smtp = self._with_recipient(recipient)
            self._data(smtp, text)
        except BaseException:
            self.close()
            raise
        return {"message_id": message_id}

    def close(self) -> None:
        """Close the calling thread's connection; the next call opens another."""
        smtp, self._connection.smtp = self._connection.smtp, None
        if smtp is not None:
            smtp.close()

    def _connected(self) -> smtplib.SMTP:
        kept = self._connection.smtp
        if kept is not None and self._connection.pid == os.getpid():
            return kept
        self.close()
        try:
            return self._open()
        except ssl.SSLError as error:
            self.close()
            raise Defer(TRY_LATER_SECONDS, f"mail server: no TLS with it ({type(error).__name__})") from None
        except smtplib.SMTPNotSupportedError:
            self.close()
            raise Defer(TRY_LATER_SECONDS, "mail server does not offer what is needed: STARTTLS, or a login") from None
        except smtplib.SMTPResponseException as error:
            self.close()
            # Whatever the code, it is not about this message.
            raise Defer(TRY_LATER_SECONDS, f"mail server refused the connection ({error.smtp_code})") from None
        except (OSError, smtplib.SMTPException):
            self.close()
            raise Defer(UNAVAILABLE_SECONDS, "mail server is unreachable") from None

    def _open(self) -> smtplib.SMTP:
        server, timeout = self._server, self._timeout
        # By default, smtplib asks DNS for this machine's name at each connection; and its own context takes any certificate.
        # SSL_CERT_FILE names further authorities.
        smtp: smtplib.SMTP
        if server.tls == "implicit":
            context = ssl.create_default_context()
            smtp = smtplib.SMTP_SSL(server.host, server.port, self._domain, timeout=timeout, context=context)
        else:
            smtp = smtplib.SMTP(server.host, server.port, self._domain, timeout=timeout)
        self._connection.smtp, self._connection.pid = smtp, os.getpid()
        assert smtp.sock is not None
        # the end of a text goes out by itself, and must not wait until the text is acknowledged
        smtp.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        smtp.ehlo_or_helo_if_needed()
        if server.tls == "starttls":
            smtp.starttls(context=ssl.create_default_context())
        if server.user is not None:
            smtp.login(server.user, server.password or "")
        return smtp

    def _with_recipient(self, recipient: str) -> smtplib.SMTP:
        """A connection that accepted sender and recipient: the existing one, or a new one if that was closed."""
        is_kept = self._connection.smtp is not None
        try:
            return self._envelope(self._connected(), recipient)
        except (OSError, smtplib.SMTPException):
            self.close()  # the message was not sent yet
        except (Defer, PermanentError):
            if not is_kept:
                raise
            self.close()  # this may have been the answer to an earlier message: a new connection has none
        try:
            return self._envelope(self._connected(), recipient)
        except (OSError, smtplib.SMTPException):
            raise Defer(UNAVAILABLE_SECONDS, "mail server closed the connection before the message") from None

    def _envelope(self, smtp: smtplib.SMTP, recipient: str) -> smtplib.SMTP:
        for what, (code, _) in (
            ("sender", smtp.mail(self._sender)),
            ("recipient", smtp.rcpt(recipient)),
        ):
            if code >= 400:
                _refused(code, what)
            if not 200 <= code < 300:
                raise smtplib.SMTPException("no answer to this command")
        return smtp

    def _data(self, smtp: smtplib.SMTP, text: bytes) -> None:
        is_early = False
        try:
            code, _ = smtp.docmd("DATA")
        except (OSError, smtplib.SMTPException):
            raise Defer(UNAVAILABLE_SECONDS, "mail server closed the connection before the message") from None
        try:
            if code == 354:
                smtp.send(_DOT.sub(b"..", text) + (b"" if text.endswith(b"\r\n") else b"\r\n"))
                is_early = _has_answered(smtp)
                if not is_early:
                    smtp.send(b".\r\n")
                code, _ = smtp.getreply()
            elif code < 400:
                # Nothing but 354 asks for the text, which was not sent then. This is the answer to an earlier command.
                raise Defer(UNAVAILABLE_SECONDS, f"mail server did not ask for the message ({code})")
        except (OSError, smtplib.SMTPException):
            raise MailError("mail server closed the connection during the message; it may have been accepted") from None
        if code >= 400:
            _refused(code, "message")
        if is_early:
            raise MailError(f"mail server answered before the end of the message ({code}); it may have been accepted")
        if not 200 <= code < 300:
            raise MailError(f"mail server did not say what became of the message ({code}); it may have been accepted")


def _has_answered(smtp: smtplib.SMTP) -> bool:
    """Whether an answer is there that has not been read. Not promised: one that is still on its way is not seen."""
    assert smtp.sock is not None
    assert smtp.file is not None
    patience = smtp.sock.gettimeout()
    smtp.sock.settimeout(0.0)
    try:
        return bool(smtp.file.peek(1))
    except ssl.SSLWantReadError:  # records of TLS without text, or none
        return False
    finally:
        smtp.sock.settimeout(patience)


def _part(text: str, kind: Literal["plain", "html"]) -> MIMEText:
    is_plain = text.isascii() and max(map(len, text.splitlines()), default=0) <= MAX_LINE
    return MIMEText(text, kind, "us-ascii" if is_plain else "utf-8", policy=_WIRE)


def _check(recipient: str, subject: str) -> None:
    if len(recipient) > MAX_ADDRESS or not _ADDRESS.fullmatch(recipient):
        raise PermanentError(
            f"recipient: must be one ASCII e-mail address of at most {MAX_ADDRESS} characters",
            "invalid_recipient",
        )
    if len(subject) > MAX_SUBJECT or _CONTROL.search(subject):
        raise PermanentError(f"subject: must be one line of at most {MAX_SUBJECT} characters", "invalid_subject")


def _refused(code: int, what: str) -> Never:
    # Only the code, since the server's text may quote the message.
    if code < 500:
        raise Defer(TRY_LATER_SECONDS, f"mail server temporarily rejected the {what} ({code})")
    raise PermanentError(f"mail server rejected the {what} ({code})", f"smtp_{code}")
