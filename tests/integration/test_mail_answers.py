"""What is concluded from the answers of an odd mail server."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Literal

import pytest

from idempotency import Defer, PermanentError
from tasks.mail import Mailer, MailError, MailServer
from tests.support.certificates import certificate_for

SENDER = "shop@shop.example"


class Server:
    """Speaks SMTP on loopback. `data`: what it says to DATA, empty: it hangs up; `end`: what it says after a text. Keeps what it has taken."""

    def __init__(self, data: bytes, end: bytes, certificate: Path | None = None) -> None:
        self.data, self.end = data, end
        self.context = None
        if certificate is not None:
            self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self.context.load_cert_chain(certificate)
        self.early: list[bytes] = []  # what it says during a text, once it has begun
        self.said: list[bytes] = []
        self.taken: list[tuple[bytes, bytes]] = []  # who to, what
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serving, args=(connection,), daemon=True).start()

    def _serving(self, connection: socket.socket) -> None:
        with suppress(OSError):
            self._serve(self.context.wrap_socket(connection, server_side=True) if self.context else connection)

    def _serve(self, connection: socket.socket) -> None:
        to = b""
        with connection, connection.makefile("rb") as lines:
            connection.sendall(b"220 hello\r\n")
            while line := lines.readline():
                self.said.append(line)
                match line[:4].upper():
                    case b"EHLO" | b"HELO" | b"MAIL" | b"RSET":
                        connection.sendall(b"250 ok\r\n")
                    case b"RCPT":
                        to = line.strip()
                        connection.sendall(b"250 ok\r\n")
                    case b"DATA":
                        connection.sendall(self.data)
                        if not self.data:
                            return
                        if not self.data.startswith(b"354"):
                            continue
                        text: list[bytes] = []
                        while (each := lines.readline()) != b".\r\n":
                            if not each:
                                return
                            text.append(each)
                            for said in self.early:
                                connection.sendall(said)
                            self.early = []
                        self.taken.append((to, b"".join(text)))
                        connection.sendall(self.end)
                    case b"QUIT":
                        connection.sendall(b"221 bye\r\n")
                        return
                    case _:
                        connection.sendall(b"500 what\r\n")

    def close(self) -> None:
        self._listener.close()


@contextmanager
def served(
    data: bytes = b"354 go on\r\n", end: bytes = b"250 ok\r\n", certificate: Path | None = None
) -> Iterator[tuple[Server, Callable[..., object]]]:
    tls: Literal["none", "implicit"] = "none" if certificate is None else "implicit"
    with (
        closing(Server(data, end, certificate)) as server,
        closing(Mailer(MailServer("127.0.0.1", server.port, tls), sender=SENDER, timeout=5)) as mailer,
    ):
        yield server, mailer.send


@pytest.mark.parametrize(
    "answer", [b"250 ok\r\n", b"220 mail.example ESMTP\r\n", b"no number\r\n"], ids=["250", "220", "none"]
)
def test_a_mail_whose_text_was_not_asked_for_is_sent_later(answer: bytes) -> None:
    with served(data=answer) as (server, send):
        with pytest.raises(Defer, match="did not ask for the message"):
            send("a@shop.example", "s", "b", idempotency_key="k")
        assert server.taken == []


def test_a_mail_whose_connection_is_lost_before_its_text_is_sent_later() -> None:
    """Nothing was sent of it."""
    with served(data=b"") as (server, send):
        with pytest.raises(Defer, match="closed the connection before the message"):
            send("a@shop.example", "s", "b", idempotency_key="k")
        assert server.taken == []


def test_one_answer_too_many_is_taken_for_no_mail_s_own() -> None:
    """A second line after a text is read as the answer to the next command, and so on. The connection is not used again then."""
    with served(end=b"250 ok\r\n250 ok\r\n") as (server, send):
        concluded = []
        for number in range(4):
            try:
                send("a@shop.example", "s", f"body {number}\n", idempotency_key=f"k-{number}")
                concluded.append(number)
            except Defer:
                pass
        taken = [number for number in range(4) if any(b"body %d" % number in text for _, text in server.taken)]
    assert concluded == taken == [0, 2]


@pytest.mark.parametrize("end", [b"accepted\r\n", b"199 hm\r\n", b"354 again\r\n"], ids=["none", "199", "354"])
def test_after_an_answer_that_says_nothing_nobody_knows(end: bytes) -> None:
    with served(end=end) as (_, send), pytest.raises(MailError, match="may have been accepted"):
        send("a@shop.example", "s", "b", idempotency_key="k")


def test_an_answer_to_an_earlier_mail_refuses_no_other() -> None:
    with served(end=b"250 ok\r\n550 no\r\n") as (server, send):
        for number in range(3):
            send("a@shop.example", "s", f"body {number}\n", idempotency_key=f"k-{number}")
        assert [text.splitlines()[-1] for _, text in server.taken] == [b"body 0", b"body 1", b"body 2"]


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def secured(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path | None:
    """The certificate of a server with TLS."""
    if not request.param:
        return None
    certificate = certificate_for("127.0.0.1", tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", f"{certificate}.crt")
    return certificate


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("data", "early", "lines"),
    [(b"354 go on\r\n250 ok\r\n", [], 1), (b"354 go on\r\n", [b"250 ok\r\n"], 100_000)],
    ids=["before the text", "in the text"],
)
def test_what_is_said_before_the_end_of_a_mail_is_no_answer_to_it(
    secured: Path | None, data: bytes, early: list[bytes], lines: int
) -> None:
    """The server would refuse it at its end."""
    with served(data, b"554 no\r\n", secured) as (server, send):
        server.early = [*early]
        with pytest.raises(MailError, match="before the end of the message"):
            send("a@shop.example", "s", f"{'x' * 70}\n" * lines, idempotency_key="k")
        assert server.taken == []


def test_a_refusal_before_the_end_of_a_mail_is_one(secured: Path | None) -> None:
    with served(data=b"354 go on\r\n552 too large\r\n", certificate=secured) as (server, send):
        with pytest.raises(PermanentError, match="552"):
            send("a@shop.example", "s", "b", idempotency_key="k")
        assert server.taken == []


def test_a_mail_with_lines_of_dots_arrives_as_it_is(secured: Path | None) -> None:
    with served(certificate=secured) as (server, send):
        for number in range(2):
            send("a@shop.example", "s", f"{number}\n.\n..\n.a", idempotency_key="k")
        assert [text.split(b"\r\n\r\n")[1] for _, text in server.taken] == [
            b"%d\r\n..\r\n...\r\n..a\r\n" % number for number in range(2)
        ]
