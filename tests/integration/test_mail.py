"""E-mail through the real mail sandbox: what each answer of an SMTP server means for an operation."""

import multiprocessing
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from email import message_from_bytes, policy
from pathlib import Path
from typing import Any

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult
from jinja2 import UndefinedError

from idempotency import Defer, PermanentError
from sandbox import ledger, process
from sandbox.process import Sandbox
from tasks.mail import Mailer, MailError, MailServer
from tasks.templates import render
from tests.support.certificates import certificate_for

SENDER = "shop@shop.example"


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    with process.running("mail", tmp_path) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    """A server that no test sends anything to."""
    with process.running("mail", tmp_path_factory.mktemp("idle")) as sandbox:
        yield sandbox


@pytest.fixture
def mailer(sandbox: Sandbox) -> Iterator[Mailer]:
    with closing(mailer_for(sandbox)) as mailer:
        yield mailer


def mailer_for(sandbox: Sandbox) -> Mailer:
    return Mailer(MailServer("127.0.0.1", sandbox.port), sender=SENDER, timeout=30)


def test_an_accepted_message_is_in_the_ledger(sandbox: Sandbox, mailer: Mailer) -> None:
    result = mailer.send("a@shop.example", "Your receipt: 12,50 €", "Thank you.\n", idempotency_key="k-1")
    (message,) = ledger.read_mail(sandbox.data)
    assert (message.recipient, message.subject) == ("a@shop.example", "Your receipt: 12,50 €")
    assert {"message_id": message.message_id} == result
    assert message.message_id.endswith("@shop.example>")


@pytest.mark.long
def test_the_same_key_is_the_same_message_id_and_another_key_another(mailer: Mailer) -> None:
    first = mailer.send("a@shop.example", "s", "b", idempotency_key="k-1")
    assert mailer.send("a@shop.example", "s", "b", idempotency_key="k-1") == first
    assert mailer.send("a@shop.example", "s", "b", idempotency_key="k-2") != first


@pytest.mark.long
def test_a_message_sent_twice_is_in_the_ledger_twice_in_the_order_received(sandbox: Sandbox, mailer: Mailer) -> None:
    for subject, key in (("first", "k"), ("second", "k"), ("third", "k-3")):
        mailer.send("a@shop.example", subject, "b", idempotency_key=key)
    messages = ledger.read_mail(sandbox.data)
    assert [message.subject for message in messages] == ["first", "second", "third"]
    assert messages[0].message_id == messages[1].message_id != messages[2].message_id


@pytest.mark.few(1)
@pytest.mark.parametrize("body", ["", ".\n..\n", "x" * 5000, "ünï\r\nwith a dot\r\n.\r\nend"], ids=len)
def test_any_body_arrives_as_one_message(sandbox: Sandbox, mailer: Mailer, body: str) -> None:
    mailer.send("a@shop.example", "s", body, idempotency_key="k")
    mailer.send("a@shop.example", "s", "after", idempotency_key="k-2")
    assert len(ledger.read_mail(sandbox.data)) == 2


@pytest.mark.long
def test_try_later_is_deferred_and_the_next_try_is_accepted(tmp_path: Path) -> None:
    with process.running("mail", tmp_path, "--faults", "reject=1") as sandbox, closing(mailer_for(sandbox)) as mailer:
        with pytest.raises(Defer, match="451"):
            mailer.send("a@shop.example", "s", "b", idempotency_key="k")
        assert ledger.read_mail(tmp_path) == []
        mailer.send("a@shop.example", "s", "b", idempotency_key="k")
        assert len(ledger.read_mail(tmp_path)) == 1


@pytest.mark.long
def test_a_recipient_that_does_not_exist_is_permanent(sandbox: Sandbox, mailer: Mailer) -> None:
    with pytest.raises(PermanentError, match="recipient") as refused:
        mailer.send("a@invalid.example", "s", "b", idempotency_key="k")
    assert refused.value.code == "smtp_550"
    mailer.send("a@shop.example", "s", "b", idempotency_key="k")
    assert len(ledger.read_mail(sandbox.data)) == 1


def test_a_connection_lost_after_the_text_is_an_unknown_outcome(tmp_path: Path) -> None:
    with (
        process.running("mail", tmp_path, "--faults", "drop_after_data=1") as sandbox,
        closing(mailer_for(sandbox)) as mailer,
    ):
        with pytest.raises(MailError):
            mailer.send("a@shop.example", "s", "b", idempotency_key="k")
        assert len(ledger.read_mail(tmp_path)) == 1
        again = mailer.send("a@shop.example", "s", "b", idempotency_key="k")
        assert [message.message_id for message in ledger.read_mail(tmp_path)] == [again["message_id"]] * 2


def test_an_unreachable_server_is_deferred() -> None:
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with pytest.raises(Defer, match="unreachable"):
        Mailer(MailServer("127.0.0.1", port), sender=SENDER).send("a@shop.example", "s", "b", idempotency_key="k")


def test_a_server_that_never_says_hello_is_deferred() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        mailer = Mailer(MailServer("127.0.0.1", silent.getsockname()[1]), sender=SENDER, timeout=0.2)
        with pytest.raises(Defer, match="unreachable"):
            mailer.send("a@shop.example", "s", "b", idempotency_key="k")


@pytest.mark.parametrize("greeting", [b"421 too busy\r\n", b"554 not you\r\n"])
def test_a_server_that_takes_no_connections_is_deferred_whatever_its_code(greeting: bytes) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as rude:

        def greet() -> None:
            connection, _ = rude.accept()
            with connection:
                connection.sendall(greeting)
                connection.recv(100)

        thread = threading.Thread(target=greet)
        thread.start()
        mailer = Mailer(MailServer("127.0.0.1", rude.getsockname()[1]), sender=SENDER, timeout=30)
        with pytest.raises(Defer, match=greeting[:3].decode()):
            mailer.send("a@shop.example", "s", "b", idempotency_key="k")
        thread.join()


@pytest.mark.long
def test_a_connection_is_kept_and_replaced_when_the_server_was_restarted(sandbox: Sandbox, mailer: Mailer) -> None:
    mailer.send("a@shop.example", "before", "b", idempotency_key="k-1")
    sandbox.restart()
    mailer.send("a@shop.example", "after", "b", idempotency_key="k-2")
    assert [message.subject for message in ledger.read_mail(sandbox.data)] == ["before", "after"]


def test_a_killed_server_keeps_what_it_accepted(sandbox: Sandbox, mailer: Mailer) -> None:
    for number in range(20):
        mailer.send("a@shop.example", str(number), "b", idempotency_key=f"k-{number}")
    sandbox.kill()
    assert len(ledger.read_mail(sandbox.data)) == 20


@pytest.mark.long
def test_threads_and_forked_children_use_connections_of_their_own(sandbox: Sandbox, mailer: Mailer) -> None:
    mailer.send("a@shop.example", "parent", "b", idempotency_key="k")
    with ThreadPoolExecutor(4) as threads:
        list(
            threads.map(
                lambda number: mailer.send("a@shop.example", "thread", "b", idempotency_key=f"t-{number}"), range(20)
            )
        )
    fork = multiprocessing.get_context("fork")
    start = fork.Barrier(3)
    children = [fork.Process(target=_send_in_child, args=(mailer, number, start)) for number in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * 3
    mailer.send("a@shop.example", "parent", "b", idempotency_key="k-2")
    subjects = [message.subject for message in ledger.read_mail(sandbox.data)]
    assert sorted(subjects) == ["child"] * 30 + ["parent"] * 2 + ["thread"] * 20


def _send_in_child(mailer: Mailer, number: int, start: Any) -> None:
    start.wait(60)
    for message in range(10):
        mailer.send("a@shop.example", "child", "b", idempotency_key=f"c-{number}-{message}")
    os._exit(0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipient", "subject", "field"),
    [
        ("a@shop.example\r\nBcc: b@shop.example", "s", "recipient"),
        ("a@shop.example\n", "s", "recipient"),
        ("a@shop.example, b@shop.example", "s", "recipient"),
        ("Ann <a@shop.example>", "s", "recipient"),
        ("ünï@shop.example", "s", "recipient"),
        ("a" * 250 + "@shop.example", "s", "recipient"),
        ("", "s", "recipient"),
        ("a@shop.example", "s\r\nBcc: b@shop.example", "subject"),
        ("a@shop.example", "s\rx", "subject"),
        ("a@shop.example", "s" * 501, "subject"),
    ],
)
def test_a_malformed_field_is_refused_by_name_and_not_repeated_back(
    idle: Sandbox, recipient: str, subject: str, field: str
) -> None:
    with closing(mailer_for(idle)) as mailer, pytest.raises(PermanentError, match=field) as refused:
        mailer.send(recipient, subject, "b", idempotency_key="k")
    assert refused.value.code == f"invalid_{field}"
    assert "example" not in str(refused.value)
    assert ledger.read_mail(idle.data) == []


@pytest.mark.few(1)
@pytest.mark.parametrize("recipient", ["a@shop.example", "first.last+tag@sub.shop.example", "o'neil@shop.example"])
def test_ordinary_recipients_are_accepted(sandbox: Sandbox, mailer: Mailer, recipient: str) -> None:
    mailer.send(recipient, "s" * 500, "b", idempotency_key="k")
    (message,) = ledger.read_mail(sandbox.data)
    assert (message.recipient, message.subject) == (recipient, "s" * 500)


def test_sigterm_stops_it_cleanly_while_a_client_is_connected(sandbox: Sandbox, mailer: Mailer) -> None:
    mailer.send("a@shop.example", "s", "b", idempotency_key="k")
    assert sandbox.stop() == 0
    assert (sandbox.data / "mail.log").read_text() == ""


@pytest.mark.parametrize(("sender", "timeout", "name"), [("nobody", 1, "sender"), (SENDER, 0, "timeout")])
def test_a_setting_out_of_range_is_refused_by_name(sender: str, timeout: float, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Mailer(MailServer("127.0.0.1", 25), sender=sender, timeout=timeout)


# ---------------------------------------------------------------- TLS and login


class Guarded:
    """A mail server with a certificate for 127.0.0.1 that lets `shop` in; what it was told, and what it has accepted."""

    def __init__(self, certificate: Path, tls: str) -> None:
        self.mails: list[bytes] = []
        self.logins: list[tuple[bytes, bytes]] = []
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate)
        # aiosmtpd does not count implicit TLS as such
        guard: dict[str, Any] = {
            "authenticator": self.check,
            "auth_required": True,
            "auth_require_tls": tls == "starttls",
        }
        encrypted = {"implicit": {"ssl_context": context}, "starttls": {"tls_context": context}, "none": {}}[tls]
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.controller = Controller(self, hostname="127.0.0.1", port=self.port, **guard, **encrypted)

    def check(self, server: Any, session: Any, envelope: Any, mechanism: str, data: Any) -> AuthResult:
        self.logins.append((data.login, data.password))
        return AuthResult(success=self.logins[-1] == (b"shop", b"geheim/1"), handled=False)

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:  # noqa: N802
        self.mails.append(envelope.content)
        return "250 OK"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificate_for("127.0.0.1", tmp_path_factory.mktemp("tls"))


@pytest.mark.filterwarnings("ignore:Requiring AUTH while not requiring TLS")
@pytest.mark.parametrize("tls", ["implicit", "starttls"])
@pytest.mark.parametrize("trouble", [None, "unknown certificate", "another name", "wrong password", "no TLS"])
def test_mail_goes_over_tls_to_a_known_server_or_not_at_all(
    certificate: Path, monkeypatch: pytest.MonkeyPatch, tls: Any, trouble: str | None
) -> None:
    guarded = Guarded(certificate, "none" if trouble == "no TLS" else tls)
    if trouble != "unknown certificate":
        monkeypatch.setenv("SSL_CERT_FILE", f"{certificate}.crt")
    host = "localhost" if trouble == "another name" else "127.0.0.1"
    password = "falsch" if trouble == "wrong password" else "geheim/1"
    guarded.controller.start()
    try:
        with closing(Mailer(MailServer(host, guarded.port, tls, "shop", password), sender=SENDER)) as mailer:
            if trouble is None:
                for key in ("k-1", "k-2"):  # by one connection
                    mailer.send("a@shop.example", "s", "b", idempotency_key=key)
                assert (len(guarded.mails), guarded.logins) == (2, [(b"shop", b"geheim/1")])
                return
            with pytest.raises(Defer) as deferred:
                mailer.send("a@shop.example", "s", "b", idempotency_key="k")
    finally:
        guarded.controller.stop()
    assert guarded.mails == []
    assert "geheim" not in str(deferred.value)
    assert set(guarded.logins) == ({(b"shop", b"falsch")} if trouble == "wrong password" else set())


@pytest.mark.parametrize(
    ("url", "server"),
    [
        ("smtp://127.0.0.1:8425", MailServer("127.0.0.1", 8425)),
        ("smtp://localhost", MailServer("localhost", 25)),
        ("smtp://mail.example", MailServer("mail.example", 587, "starttls")),
        ("smtps://shop:geheim%2F1@mail.example", MailServer("mail.example", 465, "implicit", "shop", "geheim/1")),
        ("smtp://127.0.0.1?starttls=never", MailServer("127.0.0.1", 25)),
        ("smtps://127.0.0.1:8465", MailServer("127.0.0.1", 8465, "implicit")),
    ],
)
def test_the_address_says_how_the_server_is_spoken_to(url: str, server: MailServer) -> None:
    assert MailServer.at(url) == server
    assert "geheim" not in repr(server)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("mail.example", "must be smtp://"),
        ("http://mail.example", "must be smtp://"),
        ("smtp://", "must be smtp://"),
        ("smtp://mail.example/inbox", "must be smtp://"),
        ("smtp://geheim:x@mail.example:port", "not an address"),
        ("smtp://mail.example?starttls=maybe", "the only option"),
        ("smtps://mail.example?starttls=never", "the only option"),
        ("smtp://mail.example?starttls=never", "starttls=never is for a server on this machine"),
        ("smtp://shop:geheim@mail.example?starttls=never", "starttls=never is for a server on this machine"),
    ],
)
def test_an_unusable_address_is_refused_without_being_shown(url: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"SMTP_URL: {why}") as refused:
        MailServer.at(url)
    assert "geheim" not in str(refused.value)


@pytest.mark.filterwarnings("ignore:Requiring AUTH while not requiring TLS")
def test_html_is_an_alternative_to_the_text_and_every_attempt_sends_the_same(certificate: Path) -> None:
    guarded = Guarded(certificate, "none")
    guarded.controller.start()
    try:
        server = MailServer("127.0.0.1", guarded.port, "none", "shop", "geheim/1")
        with closing(Mailer(server, sender=SENDER)) as mailer:
            for _ in range(2):
                mailer.send("a@shop.example", "Zoë", "text: ü\n", "<p>html: ü</p>\n", idempotency_key="k")
    finally:
        guarded.controller.stop()
    first, second = (message_from_bytes(mail, policy=policy.default) for mail in guarded.mails)
    assert first.get_content_type() == "multipart/alternative"
    parts = [(part.get_content_type(), part.get_content()) for part in first.iter_parts()]
    assert parts == [("text/plain", "text: ü\n"), ("text/html", "<p>html: ü</p>\n")]
    assert (first["Subject"], first["Message-ID"]) == ("Zoë", second["Message-ID"])
    del first["Date"], second["Date"]
    assert first.as_bytes() == second.as_bytes()


def test_what_a_customer_has_written_is_text_in_the_html() -> None:
    given = {"subject": "s", "summary": "<script>alert('1')</script> & more", "shop": "shop.example"}
    text, html = render("notification", **given)
    assert text == "Hello,\n\n<script>alert('1')</script> & more\n\nshop.example\n"
    assert "<script>" not in html
    assert "&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt; &amp; more" in html
    with pytest.raises(UndefinedError):
        render("notification", subject="s", summary="s")
