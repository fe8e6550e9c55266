"""Alerts and the weekly report: sent once, at a limited rate, to a receiver that may hang or be unavailable."""

from __future__ import annotations

import re
import socket
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult
from celery import Celery
from sqlalchemy import Connection, text

from idempotency.application import close_runtime
from idempotency.store import alarms as stored
from idempotency.store.sweeps import BATCH
from idempotency.upkeep import alerts, maintenance, reports
from tests.support import operations as op
from tests.support.alert_receiver import Receiver, receiving
from tests.support.certificates import certificate_for
from tests.support.dripping import BODY, HEADERS, dripping
from tests.support.operations import at_once
from tests.support.processes import eventually


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def alerting(bank: Celery, receiver: Receiver) -> Iterator[Celery]:
    """The bank, whose alerts go to the receiver."""
    changed = {
        "idempotency_alert_webhook_url": receiver.url,
        "idempotency_alert_timeout": 0.5,
        "idempotency_alert_open_letters": 3,
        "idempotency_report_mail_to": "ops@bank.example",
    }
    bank.conf.update(changed)
    yield bank
    close_runtime(bank)
    for name in [*changed, "idempotency_report_smtp_url"]:
        bank.conf.pop(name, None)


def store(connection: Connection, *reasons: str, service: str = "bank") -> None:
    for reason in reasons:
        connection.execute(
            text("""INSERT INTO idempotency.dead_letters (source, consumer_service, reason, payload)
                    VALUES ('broker', :service, :reason, 'secret')"""),
            {"service": service, "reason": reason},
        )


def later(connection: Connection, seconds: float = 61.0) -> None:
    """The last alerts were so many seconds ago."""
    connection.execute(
        text("UPDATE idempotency.alerts SET sent_at = sent_at - make_interval(secs => :seconds)"), {"seconds": seconds}
    )


def test_new_letters_alert_once_per_reason_and_interval(
    alerting: Celery, receiver: Receiver, connection: Connection
) -> None:
    assert alerts.run_once(alerting) == 0
    store(connection, "envelope", "envelope", "expired")
    assert alerts.run_once(alerting) == 3
    assert receiver.texts == ["Dead letters\nbank: 2 new, envelope\nbank: 1 new, expired"]
    store(connection, "envelope")
    store(connection, "envelope", service="shop")
    assert alerts.run_once(alerting) == 0  # it was told less than an interval ago, and the shop's are not its own
    later(connection)
    assert alerts.run_once(alerting) == 1
    later(connection)
    assert alerts.run_once(alerting) == 0
    assert not any("secret" in told for told in receiver.texts)


def test_more_open_letters_than_the_limit_are_an_alarm_of_their_own(
    alerting: Celery, receiver: Receiver, connection: Connection
) -> None:
    store(connection, *["envelope"] * 3)
    alerts.run_once(alerting)
    assert "open" not in receiver.texts[-1]
    store(connection, "envelope")
    alerts.run_once(alerting)
    assert receiver.texts[-1] == "Dead letters\nbank: 4 open dead letters, more than 3"
    alerts.run_once(alerting)
    assert len(receiver.texts) == 2


@pytest.mark.long
@pytest.mark.parametrize("told_before", [False, True], ids=["new", "told lately"])
def test_many_forged_letters_hold_up_no_alert_about_another(
    alerting: Celery, receiver: Receiver, connection: Connection, told_before: bool
) -> None:
    if told_before:
        store(connection, "unsigned")
        alerts.run_once(alerting)
    forged = """INSERT INTO idempotency.dead_letters (source, consumer_service, reason, payload)
                SELECT 'broker', owner, 'unsigned', '' FROM unnest(ARRAY['bank', NULL]) owner, generate_series(1, :many)"""
    connection.execute(text(forged), {"many": stored.BATCH + 1})
    store(connection, "ledger_differs", "effect_unknown")
    alerts.run_once(alerting)
    told = receiver.texts[-1]
    assert "bank: 1 new, ledger_differs" in told
    assert "bank: 1 new, effect_unknown" in told
    assert (f"bank: {2 * stored.BATCH} new, unsigned" in told) is not told_before
    if not told_before:
        later(connection)
        alerts.run_once(alerting)
        assert receiver.texts[-1].startswith("Dead letters\nbank: 2 new, unsigned")


@pytest.mark.parametrize("channel", ["log", "webhook"])
@pytest.mark.parametrize("owner", ["bank", None])
def test_letters_of_a_kind_that_was_told_lately_are_not_read(
    bank: Celery, connection: Connection, channel: stored.Channel, owner: str | None
) -> None:
    """What a pass costs does not grow with a flood."""
    many = """INSERT INTO idempotency.dead_letters (source, consumer_service, reason, payload, alert_logged_at)
              SELECT 'broker', :owner, 'unsigned', '', CASE WHEN :logged THEN now() END FROM generate_series(1, 5000)"""
    connection.execute(text(many), {"owner": owner, "logged": channel == "webhook"})
    connection.execute(text("ANALYZE idempotency.dead_letters"))
    prefix = stored._PREFIX[channel]
    connection.execute(text("INSERT INTO idempotency.alerts VALUES (:kind, now())"), {"kind": f"{prefix}bank/unsigned"})
    new, is_open = stored._NEW[channel]
    fields = {"service": "bank", "interval": 60.0, "batch": stored.BATCH, "prefix": prefix}
    for condition in stored._OWNERS:
        new_letters = f"{new} {is_open} AND archived_at IS NULL AND {condition}"
        statement = "EXPLAIN (ANALYZE, TIMING off) " + stored._LETTERS.format(new=new_letters)
        plan = "\n".join(connection.exec_driver_sql(statement, fields).scalars())
        read = [float(rows) for rows in re.findall(r"(?:actual rows=|Removed by Filter: )([0-9.]+)", plan)]
        assert max(read) <= 1, plan
        assert {"log": "dead_letters_unlogged", "webhook": "dead_letters_unsent"}[channel] in plan, plan


def test_an_outbox_row_that_can_never_be_published_is_told(
    alerting: Celery, receiver: Receiver, connection: Connection
) -> None:
    op.early(connection)
    connection.execute(text("UPDATE idempotency.outbox SET status = 'failed', last_error = 'too large'"))
    assert alerts.run_once(alerting) == 1
    assert receiver.texts == ["Dead letters\nbank: 1 new, outbox_failed"]
    later(connection)
    assert alerts.run_once(alerting) == 0


def test_rows_that_the_broker_keeps_refusing_alert_from_the_fifth_try(
    alerting: Celery, receiver: Receiver, connection: Connection
) -> None:
    op.early(connection)
    op.early(connection)
    connection.execute(text("UPDATE idempotency.outbox SET attempts = 4, last_error = 'NO_ROUTE'"))
    alerts.run_once(alerting)
    assert receiver.texts == []
    connection.execute(text("UPDATE idempotency.outbox SET attempts = attempts + 1"))
    for _ in range(2):  # once in an interval
        alerts.run_once(alerting)
    said = "Dead letters\nbank: 2 outbox rows refused by the broker at least 5 times, still being retried"
    assert receiver.texts == [said]
    later(connection)
    alerts.run_once(alerting)
    assert receiver.texts == [said, said]
    connection.execute(text("UPDATE idempotency.outbox SET status = 'published', published_at = clock_timestamp()"))
    later(connection)
    alerts.run_once(alerting)
    assert len(receiver.texts) == 2


@pytest.mark.few(2)
@pytest.mark.parametrize("trouble", ["500", "redirect", "silent", "gone"])
def test_a_failing_receiver_delays_nothing_and_gets_its_alert_later(
    alerting: Celery, receiver: Receiver, connection: Connection, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    store(connection, "envelope")
    receiver.status = {"500": 500, "redirect": 302}.get(trouble, 200)
    if trouble == "silent":
        receiver.silent.set()
    if trouble == "gone":
        alerting.conf.idempotency_alert_webhook_url = "http://127.0.0.1:1/services/secret-path"
    assert alerts.run_once(alerting) == 0
    assert "event=alert service=bank reason=envelope" in caplog.text
    assert "alert_not_sent" in caplog.text
    assert "secret" not in caplog.text

    receiver.silent.clear()
    receiver.status = 200
    told = len(receiver.texts)
    assert alerts.run_once(alerting) == 0  # this process leaves it to others for an interval
    assert len(receiver.texts) == told
    if trouble == "gone":
        alerting.conf.idempotency_alert_webhook_url = receiver.url
    close_runtime(alerting)  # as another process, or as this one after the interval
    assert alerts.run_once(alerting) == 1
    assert receiver.texts[-1] == "Dead letters\nbank: 1 new, envelope"
    assert caplog.text.count("event=alert ") == 1


def test_an_alert_waits_for_a_process_that_has_the_address(
    alerting: Celery, receiver: Receiver, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    address = alerting.conf.idempotency_alert_webhook_url

    def process(address: str | None) -> int:
        alerting.conf.idempotency_alert_webhook_url = address
        close_runtime(alerting)
        return alerts.run_once(alerting)

    store(connection, *["envelope"] * 4)
    op.early(connection)
    connection.execute(text("UPDATE idempotency.outbox SET status = 'failed', last_error = 'too large'"))
    assert process(None) == 5
    later(connection)
    assert process(None) == 0
    assert [message.partition(" ")[0] for message in caplog.messages] == ["event=alert", "event=alert", "event=alarm"]
    assert process(address) == 5
    assert receiver.texts == [
        "Dead letters\nbank: 4 new, envelope\nbank: 1 new, outbox_failed\nbank: 4 open dead letters, more than 3"
    ]
    assert len(caplog.messages) == 3
    later(connection)
    assert (process(address), process(None)) == (0, 0)


def test_an_address_that_is_set_later_gets_what_is_open_and_no_history(
    alerting: Celery, receiver: Receiver, connection: Connection
) -> None:
    address, alerting.conf.idempotency_alert_webhook_url = alerting.conf.idempotency_alert_webhook_url, None
    store(connection, *["envelope"] * 3)
    assert alerts.run_once(alerting) == 3
    connection.execute(text("UPDATE idempotency.dead_letters SET status = 'replayed', closed_at = now() WHERE id = 1"))
    alerting.conf.idempotency_alert_webhook_url = address
    close_runtime(alerting)
    assert alerts.run_once(alerting) == 2
    assert receiver.texts == ["Dead letters\nbank: 2 new, envelope"]


def test_a_crash_after_the_post_repeats_the_alert_and_loses_none(
    alerting: Celery, receiver: Receiver, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(connection, "envelope")
    post = alerts.post

    def post_and_die(*given: Any) -> bool:
        assert post(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(alerts, "post", post_and_die)
    with pytest.raises(KeyboardInterrupt):
        alerts.run_once(alerting)
    monkeypatch.undo()
    assert (alerts.run_once(alerting), alerts.run_once(alerting)) == (1, 0)
    assert receiver.texts == ["Dead letters\nbank: 1 new, envelope"] * 2


def test_any_number_at_once_tell_each_letter_once(alerting: Celery, receiver: Receiver, connection: Connection) -> None:
    store(connection, "envelope", "expired")

    def tell(_: int) -> int:
        return alerts.run_once(alerting)

    assert sum(at_once(5, tell)) == 2
    assert len(receiver.texts) == 1


@contextmanager
def told_meanwhile(alerting: Celery, receiver: Receiver, connection: Connection) -> Iterator[None]:
    """While one process tells the receiver of a first letter, and that takes its time."""
    alerting.conf.idempotency_alert_timeout = 30.0
    store(connection, "envelope")
    receiver.hold.set()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(alerts.run_once, alerting)
        eventually(receiver.asked.is_set, what="the receiver is asked")
        yield
        receiver.hold.clear()
        assert first.result(30) == 1


def test_while_one_process_tells_another_one_has_nothing_to_tell(
    alerting: Celery, receiver: Receiver, connection: Connection
) -> None:
    """Relay and beat both run it: the second comes while the first one's receiver takes its time."""
    with told_meanwhile(alerting, receiver, connection):
        assert alerts.run_once(alerting) == 0
    assert alerts.run_once(alerting) == 0
    assert receiver.texts == ["Dead letters\nbank: 1 new, envelope"]


@pytest.mark.parametrize("dripped", [HEADERS, BODY], ids=["headers", "body"])
def test_a_receiver_that_drips_is_left_in_time(
    alerting: Celery, connection: Connection, caplog: pytest.LogCaptureFixture, dripped: tuple[bytes, bytes]
) -> None:
    """The body is not read: what matters has been said."""
    with dripping(*dripped) as server:
        alerting.conf.idempotency_alert_webhook_url = server.url
        store(connection, "envelope")
        begun = time.monotonic()
        told = alerts.run_once(alerting)
        assert time.monotonic() - begun < 2.0  # of a limit of 0.5
        assert server.asked == 1
    assert (told, "alert_not_sent" in caplog.text) == ((1, False) if dripped is BODY else (0, True))


def test_what_is_new_is_logged_while_the_webhook_takes_its_time(
    alerting: Celery, receiver: Receiver, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    with told_meanwhile(alerting, receiver, connection):
        store(connection, "expired")
        assert alerts.run_once(alerting) == 0  # as another process would
        logged = [message for message in caplog.messages if "event=alert " in message]
    assert ["reason=envelope" in logged[0], "reason=expired" in logged[1]] == [True, True]
    assert alerts.run_once(alerting) == 1
    assert receiver.texts == ["Dead letters\nbank: 1 new, envelope", "Dead letters\nbank: 1 new, expired"]


# ---------------------------------------------------------------- the weekly report


class Inbox:
    def __init__(self) -> None:
        self.mails: list[str] = []
        self.is_encrypted: list[bool] = []

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:  # noqa: N802  aiosmtpd's name
        self.is_encrypted.append(session.ssl is not None)
        self.mails.append(envelope.content.decode())
        return "250 OK"


@pytest.fixture
def inbox(alerting: Celery) -> Iterator[Inbox]:
    inbox = Inbox()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    controller = Controller(inbox, hostname="127.0.0.1", port=port)
    controller.start()
    alerting.conf.idempotency_report_smtp_url = f"smtp://127.0.0.1:{port}"
    yield inbox
    controller.stop()


def test_the_weekly_report_is_mailed_once_however_many_beats_there_are(
    alerting: Celery, inbox: Inbox, connection: Connection
) -> None:
    store(connection, "envelope", "envelope", "expired")

    def mail(_: int) -> bool:
        return reports.mail_weekly(alerting)

    assert sum(at_once(3, mail)) == 1
    (mail_text,) = eventually(lambda: inbox.mails)
    assert "To: ops@bank.example" in mail_text
    assert "bank: 3 new, 0 replayed, 0 discarded, 3 open" in mail_text
    assert "envelope 2, expired 1" in mail_text
    assert "secret" not in mail_text
    later(connection, 7 * 86400.0)
    assert reports.mail_weekly(alerting)


def test_a_report_that_cannot_be_mailed_is_due_again_and_shows_no_password(alerting: Celery) -> None:
    alerting.conf.idempotency_report_smtp_url = "smtp://ops:geheim@127.0.0.1:1"
    for _ in range(2):
        with pytest.raises(reports.MailRefused, match=r"127\.0\.0\.1: ConnectionRefusedError") as refused:
            reports.mail_weekly(alerting)
        assert "geheim" not in str(refused.value)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificate_for("127.0.0.1", tmp_path_factory.mktemp("tls"))


class Login:
    """Knows one password, and what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[bytes, bytes]] = []

    def __call__(self, server: Any, session: Any, envelope: Any, mechanism: str, data: Any) -> AuthResult:
        self.told.append((data.login, data.password))
        return AuthResult(success=self.told[-1] == (b"ops", b"geheim/1"), handled=False)


# aiosmtpd does not count the TLS of smtps as such
@pytest.mark.few(3)
@pytest.mark.filterwarnings("ignore:Requiring AUTH while not requiring TLS")
@pytest.mark.parametrize("scheme", ["smtp", "smtps"])
@pytest.mark.parametrize("trouble", [None, "unknown certificate", "wrong password", "no TLS"])
def test_a_report_with_a_password_goes_only_over_tls_to_a_known_server(
    alerting: Celery, certificate: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, trouble: str | None
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    inbox, login = Inbox(), Login()
    tls: dict[str, Any] = {"ssl_context": context} if scheme == "smtps" else {"tls_context": context}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = {"authenticator": login, "auth_required": True, "auth_require_tls": scheme == "smtp"}
    controller = Controller(inbox, hostname="127.0.0.1", port=port, **options, **({} if trouble == "no TLS" else tls))
    controller.start()
    password = "falsch" if trouble == "wrong password" else "geheim%2F1"
    alerting.conf.idempotency_report_smtp_url = f"{scheme}://ops:{password}@127.0.0.1:{port}"
    if trouble != "unknown certificate":
        monkeypatch.setenv("SSL_CERT_FILE", f"{certificate}.crt")
    try:
        if trouble is None:
            assert reports.mail_weekly(alerting)
            assert login.told == [(b"ops", b"geheim/1")]
            assert len(eventually(lambda: inbox.mails)) == 1
            return
        with pytest.raises(reports.MailRefused) as refused:
            reports.mail_weekly(alerting)
        assert not inbox.mails
        assert "geheim" not in str(refused.value)
        assert set(login.told) == ({(b"ops", b"falsch")} if trouble == "wrong password" else set())
        if trouble == "unknown certificate":
            assert "SSLCertVerificationError" in str(refused.value)
    finally:
        controller.stop()


# this machine, by an address that is not one of its own alone
@pytest.mark.parametrize("trouble", [None, "unknown certificate", "no TLS"])
def test_a_report_goes_off_this_machine_only_over_tls_without_a_password_too(
    alerting: Celery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str | None
) -> None:
    certificate = certificate_for("0.0.0.0", tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    inbox = Inbox()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    tls: dict[str, Any] = {} if trouble == "no TLS" else {"tls_context": context}
    controller = Controller(inbox, hostname="127.0.0.1", port=port, **tls)
    controller.start()
    alerting.conf.idempotency_report_smtp_url = f"smtp://0.0.0.0:{port}"
    if trouble != "unknown certificate":
        monkeypatch.setenv("SSL_CERT_FILE", f"{certificate}.crt")
    try:
        if trouble is None:
            assert reports.mail_weekly(alerting)
            assert len(eventually(lambda: inbox.mails)) == 1
            assert inbox.is_encrypted == [True]
            return
        why = "SMTPNotSupportedError" if trouble == "no TLS" else "SSLCertVerificationError"
        with pytest.raises(reports.MailRefused, match=why):
            reports.mail_weekly(alerting)
        assert not inbox.mails
    finally:
        controller.stop()


# ---------------------------------------------------------------- kept for a while


def test_only_letters_closed_long_ago_are_purged(bank: Celery, connection: Connection) -> None:
    store(connection, "old open", "old", "young")
    connection.execute(text("UPDATE idempotency.dead_letters SET failed_at = now() - interval '90 days'"))
    for reason, days in [("old", 31), ("young", 29)]:
        connection.execute(
            text("""UPDATE idempotency.dead_letters SET status = 'discarded',
                    closed_at = clock_timestamp() - make_interval(days => :days) WHERE reason = :reason"""),
            {"reason": reason, "days": days},
        )
    assert maintenance.purge_once(bank, limit=BATCH).letters == 1
    assert [letter.reason for letter in op.dead_letters(connection)] == ["old open", "young"]
