"""Three books that have to agree: the provider's sandbox, our record, and the business rows of tasks/."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

import services
from idempotency import DidNotHappen, Happened, OperationId, PermanentError
from idempotency.application import close_runtime
from idempotency.operate.cancel import cancel
from idempotency.operate.change import read
from idempotency.operate.replay import replay
from idempotency.operate.resolve import resolve_effect
from sandbox import ledger
from sandbox import process as sandbox_process
from sandbox.process import Sandbox
from tests.support import operations as op
from tests.support.deliveries import Deliveries, Outcome, deliver_row
from tests.support.operators import ANN
from tests.support.tasks import transactional


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    with sandbox_process.running(
        "provider", tmp_path_factory.mktemp("provider"), "--faults", "hold_ms=1000"
    ) as running:
        yield running


@pytest.fixture(scope="module")
def mail(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    with sandbox_process.running("mail", tmp_path_factory.mktemp("mail")) as running:
        yield running


class Shop:
    """The application in this process: its messages are delivered one by one, as the test says."""

    def __init__(
        self, engine: Engine, database: str, broker: str, provider: Sandbox, mail: Sandbox, patch: pytest.MonkeyPatch
    ) -> None:
        import tasks
        from tasks import migrate, notifications, payments, refunds
        from tasks.gateway import StripeGateway
        from tasks.mail import Mailer, MailServer

        tasks.app.conf.update(
            broker_url=broker,
            idempotency_database_url=database,
            idempotency_redis_url=None,
            idempotency_retry_base=0.0,
        )
        close_runtime(tasks.app)
        self.app, self.payments, self.refunds, self.notifications = tasks.app, payments, refunds, notifications
        self.engine, self.provider, self.mail = engine, provider, mail
        own = create_engine(database, poolclass=NullPool)
        migrate.migrate(own)
        own.dispose()
        gateway = StripeGateway("sk_test_sandbox", url=provider.url, read_timeout=0.3, search_lag=0.2)
        patch.setattr(payments, "gateway", gateway)
        patch.setattr(refunds, "gateway", gateway)
        host, port = mail.url.rpartition("//")[2].split(":")
        self.mailer = Mailer(MailServer(host, int(port)), sender="payments@shop.example")
        patch.setattr(notifications, "mailer", self.mailer)
        self.deliveries = Deliveries(tasks.app)

    def faults(self, purchase_id: str, *faults: str) -> None:
        body = {"next": list(faults), "only": {"purchase_id": purchase_id}}
        requests.post(f"{self.provider.url}/_sandbox/faults", json=body, timeout=10).raise_for_status()

    def buy(self, payment_id: str, amount: int = 1000) -> OperationId:
        with Session(transactional(self.engine)) as session, session.begin():
            self.payments.submit_payment(
                session, payment_id=payment_id, customer_id="c1", amount=amount, currency="USD"
            )
        return OperationId("default", "payments.capture_payment", payment_id)

    def give_back(self, refund_id: str, payment_id: str, amount: int) -> OperationId:
        with Session(transactional(self.engine)) as session, session.begin():
            self.refunds.submit_refund(
                session, refund_id=refund_id, payment_id=payment_id, amount=amount, reason="test"
            )
        return OperationId("default", "refunds.refund_payment", refund_id)

    def deliver(self, id: OperationId) -> Outcome:
        """Deliver the newest outbox row of the operation."""
        with self.engine.connect() as connection:
            row = op.outbox(connection, id)[-1]
        return deliver_row(self.deliveries, self.app.tasks[id.task], row)

    def replay(self, id: OperationId) -> Outcome:
        with self.engine.connect() as connection:
            (letter,) = [each for each in op.dead_letters(connection, id) if each.status == "open"]
        replay(self.app, letter.id, ANN)
        return self.deliver(id)

    def cancel(self, id: OperationId) -> Any:
        """Stop waiting for what may have happened: one of many ways to `effect_unknown`."""
        with self.engine.connect() as connection:
            return cancel(self.app, read(connection, id, "tasks"), ANN, may_have_happened=True)

    def resolve(self, id: OperationId, name: str, word: Any, **options: Any) -> None:
        with self.engine.connect() as connection:
            resolve_effect(self.app, read(connection, id, "tasks"), name, word, ANN, **options)

    def row(self, table: str, id: str, column: str = "id") -> Any:
        with self.engine.connect() as connection:
            return connection.execute(text(f"SELECT * FROM {table} WHERE {column} = :id"), {"id": id}).one()

    def record(self, id: OperationId) -> Any:
        with self.engine.connect() as connection:
            return op.record(connection, id)

    def events(self, event_type: str) -> list[OperationId]:
        with self.engine.connect() as connection:
            rows = [row for row in op.outbox(connection) if json.dumps(event_type)[1:-1] in row.message]
        return [OperationId(row.tenant, row.task, row.key) for row in rows]

    def charges(self, payment_id: str) -> list[ledger.Charge]:
        return [each for each in ledger.read(self.provider.data).charges if each.metadata["purchase_id"] == payment_id]

    def refunds_of(self, payment_id: str) -> list[ledger.Refund]:
        return [each for each in ledger.read(self.provider.data).refunds if each.metadata["purchase_id"] == payment_id]


@pytest.fixture
def shop(
    servers: services.Services,
    engine: Engine,
    database: str,
    provider: Sandbox,
    mail: Sandbox,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Shop]:
    monkeypatch.setenv("DATABASE_URL", database)
    monkeypatch.setenv("BROKER_URL", servers.broker_url)
    shop = Shop(engine, database, servers.broker_url, provider, mail, monkeypatch)
    yield shop
    shop.mailer.close()
    close_runtime(shop.app)


# ---------------------------------------------------------------- payments


def test_a_replayed_payment_that_becomes_unknown_is_called_unknown(shop: Shop) -> None:
    """Declined, replayed with another card, charged, and the answer is lost."""
    payment = shop.buy("p-declined")
    shop.faults("p-declined", "declined")
    shop.deliver(payment)
    assert shop.row("payments", "p-declined").status == "failed"
    shop.faults("p-declined", "timeout_after")
    assert shop.replay(payment).state == "RETRY"
    assert shop.cancel(payment).code == "effect_unknown"
    assert len(shop.charges("p-declined")) == 1
    row = shop.row("payments", "p-declined")
    assert (row.status, row.failure) == ("unknown", "effect_unknown")
    assert len(shop.events("payment.unknown")) == 1


def test_a_failed_payment_that_has_happened_after_all_becomes_unknown(shop: Shop) -> None:
    """A person's word is corrected: the operation is unfinished, and the charge is there."""
    payment = shop.buy("p-corrected")
    shop.faults("p-corrected", "timeout_after")
    shop.deliver(payment)
    shop.cancel(payment)
    shop.resolve(payment, "capture", DidNotHappen(), end=True)
    assert shop.row("payments", "p-corrected").status == "failed"
    (charge,) = shop.charges("p-corrected")
    found = {"id": charge.id, "amount": charge.amount, "currency": charge.currency, "status": "succeeded"}
    shop.resolve(payment, "capture", Happened(found))
    assert shop.record(payment).error_code == "unfinished"
    assert shop.row("payments", "p-corrected").status == "unknown"


def test_a_captured_payment_is_not_charged_under_another_key(shop: Shop) -> None:
    payment = shop.buy("p-twice")
    first = shop.deliver(payment)
    again = shop.deliveries.deliver(shop.app.tasks[payment.task], key="retry-1", payment_id="p-twice")
    assert first.value["status"] == "captured"
    assert first == again
    assert len(shop.charges("p-twice")) == 1


def test_a_payment_with_a_corrected_parameter_is_replayed_and_charged_once(shop: Shop) -> None:
    payment = shop.buy("p-currency")
    with shop.engine.connect() as connection:
        connection.execute(text("UPDATE payments SET currency = 'DOLLARS' WHERE id = 'p-currency'"))
    shop.deliver(payment)
    refused = shop.record(payment)
    assert (refused.status, refused.effects["capture"]["state"]) == ("failed", "not_happened")
    with shop.engine.connect() as connection:
        connection.execute(text("UPDATE payments SET currency = 'USD' WHERE id = 'p-currency'"))
    assert shop.replay(payment).state == "SUCCESS"
    assert len(shop.charges("p-currency")) == 1
    assert shop.row("payments", "p-currency").status == "captured"


def test_a_payment_captured_after_a_failure_closes_its_support_case(shop: Shop) -> None:
    payment = shop.buy("p-healed")
    shop.faults("p-healed", "declined")
    shop.deliver(payment)
    (failed,) = shop.events("payment.failed")
    shop.deliver(failed)
    assert shop.row("support_cases", "p-healed", "payment_id").code == "card_declined"
    assert shop.replay(payment).state == "SUCCESS"
    row = shop.row("payments", "p-healed")
    assert (row.status, row.failure) == ("captured", None)
    (recovered,) = shop.events("payment.recovered")
    shop.deliver(recovered)
    assert shop.row("support_cases", "p-healed", "payment_id").code == "recovered"


# ---------------------------------------------------------------- refunds


@pytest.mark.long
def test_a_refund_that_becomes_unknown_a_second_time_is_called_unknown(shop: Shop) -> None:
    shop.deliver(shop.buy("p-refund"))
    refund = shop.give_back("r-1", "p-refund", 400)
    shop.faults("p-refund", "rate_limited")
    shop.deliver(refund)
    shop.cancel(refund)
    assert shop.row("refunds", "r-1").status == "unknown"
    shop.resolve(refund, "refund", DidNotHappen())  # true: it was refused for its rate
    shop.faults("p-refund", "timeout_after")
    assert shop.replay(refund).state == "RETRY"
    assert shop.cancel(refund).code == "effect_unknown"
    assert [each.amount for each in shop.refunds_of("p-refund")] == [400]  # paid out
    assert shop.row("refunds", "r-1").status == "unknown"
    assert shop.row("payments", "p-refund").refunded == 400  # and still reserved


@pytest.mark.long
def test_a_refund_that_a_person_says_has_happened_is_not_refused(shop: Shop) -> None:
    shop.deliver(shop.buy("p-word"))
    refund = shop.give_back("r-2", "p-word", 400)
    shop.faults("p-word", "timeout_after")
    shop.deliver(refund)
    shop.cancel(refund)
    (paid,) = shop.refunds_of("p-word")
    word = Happened({"id": paid.id, "amount": 400, "currency": "usd", "status": "succeeded"})
    shop.resolve(refund, "refund", word, end=True)
    assert shop.record(refund).error_code == "unfinished"
    assert shop.row("refunds", "r-2").status == "unknown"
    assert shop.row("payments", "p-word").refunded == 400


# ---------------------------------------------------------------- notifications


def test_a_notification_that_failed_is_replayed_and_sent_once(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.deliver(shop.buy("p-mail"))
    (mail,) = [id for id in shop.events("payment.captured") if id.task.startswith("notifications.")]

    def refused(*_: Any, **__: Any) -> Any:
        raise PermanentError("the mail server refused the recipient: 550", "smtp_550")

    with monkeypatch.context() as patch:
        patch.setattr(shop.mailer, "send", refused)
        shop.deliver(mail)
    assert shop.row("notifications", "payment.captured:p-mail", "about").failure == "smtp_550"
    assert shop.replay(mail).state == "SUCCESS"
    assert len([each for each in ledger.read_mail(shop.mail.data) if "p-mail" in each.subject]) == 1
    row = shop.row("notifications", "payment.captured:p-mail", "about")
    assert (shop.record(mail).status, row.status, row.failure) == ("completed", "sent", None)


# ---------------------------------------------------------------- support


def test_a_support_case_says_what_became_of_its_payment_in_either_order(shop: Shop) -> None:
    """payment.unknown and payment.failed have no ordering key: the older one may come last."""
    payment = shop.buy("p-case")
    shop.faults("p-case", "rate_limited")
    shop.deliver(payment)
    shop.cancel(payment)
    shop.resolve(payment, "capture", DidNotHappen(), end=True)
    (unknown,) = shop.events("payment.unknown")
    (failed,) = shop.events("payment.failed")
    shop.deliver(failed)
    shop.deliver(unknown)
    row = shop.row("payments", "p-case")
    assert (row.status, row.failure) == ("failed", "cancelled")
    assert shop.row("support_cases", "p-case", "payment_id").code == "cancelled"


@pytest.mark.long
def test_a_refund_of_a_payment_in_doubt_waits_for_the_fact(shop: Shop) -> None:
    payment = shop.buy("p-doubt")
    shop.faults("p-doubt", "timeout_after")
    shop.deliver(payment)
    shop.cancel(payment)
    assert shop.row("payments", "p-doubt").status == "unknown"
    refund = shop.give_back("r-doubt", "p-doubt", 400)
    assert shop.deliver(refund).state == "RETRY"

    (charge,) = shop.charges("p-doubt")
    found = {"id": charge.id, "amount": charge.amount, "currency": charge.currency, "status": "succeeded"}
    shop.resolve(payment, "capture", Happened(found))
    assert shop.replay(payment).state == "SUCCESS"
    with shop.engine.connect() as connection:
        op.age(connection, refund, available_at=-1)
        connection.commit()
    assert shop.deliver(refund).state == "SUCCESS"
    assert [given.amount for given in shop.refunds_of("p-doubt")] == [400]


@pytest.mark.long
def test_the_undo_that_records_name_is_still_there(shop: Shop) -> None:
    """A record names its undo by module and function; what was reserved before a deploy says this one."""
    undo = shop.refunds.free
    assert (undo.__module__, undo.__qualname__) == ("tasks.refunds", "free")
