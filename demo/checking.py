"""The check: three independent ledgers must agree about every accepted line.

They are the business tables, the idempotency records, and the ledgers of the provider and the mail server. The accepted
lines come from the files, so a row that is missing from all three is noticed too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from sqlalchemy import Engine, text

from demo.input import Intake, Line
from sandbox import ledger

CAPTURE, REFUND = "payments.capture_payment", "refunds.refund_payment"
# The event consumers' tasks, keyed by event id.
MAIL, SUPPORT, WEBHOOKS = "notifications.send_notification", "support.open_case", "webhooks.fan_out"
# Of each refund, for a support case that there may be.
LOOK_AGAIN = "support.look_again"
# The final statuses of a business row, and the record's status for each.
ENDS = {
    "captured": "completed",
    "free": "completed",
    "failed": "failed",
    "refunded": "completed",
    "refused": "failed",
    "unknown": "failed",
}

T = TypeVar("T")
Kind = Literal["lost", "doubled", "wrong"]


class Payment(NamedTuple):
    customer_id: str
    amount: int
    currency: str
    status: str
    charge_id: str | None
    refunded: int
    failure: str | None


class Refund(NamedTuple):
    payment_id: str
    amount: int
    status: str
    provider_refund_id: str | None
    failure: str | None


class Posting(NamedTuple):
    kind: str
    reference: str
    amount: int
    currency: str


# One between other accounts, or the other way round, is none.
POSTINGS = """
SELECT kind, reference, amount, currency FROM ledger
WHERE (kind, debit, credit) IN (('capture', 'provider', 'revenue'), ('refund', 'revenue', 'provider'))
"""


class Notification(NamedTuple):
    event_id: str
    status: str


class Record(NamedTuple):
    status: str
    error: str | None


@dataclass(frozen=True)
class Books:
    """Everything that is compared. Amounts are in the minor unit; `balances` are the sums of all entries by currency."""

    purchases: Sequence[Line]
    refund_requests: Sequence[Line]
    payments: Mapping[str, Payment]
    refunds: Mapping[str, Refund]
    postings: Sequence[Posting]
    balances: Mapping[str, int]
    notifications: Mapping[str, Notification]
    cases: Mapping[str, str]
    records: Mapping[tuple[str, str], Record]
    provider: ledger.Ledger
    mails: Sequence[ledger.Message]


@dataclass(frozen=True, slots=True)
class Discrepancy:
    """One disagreement between the ledgers, with the id of the operation."""

    kind: Kind
    id: str
    what: str


@dataclass
class Findings:
    """What was found. `repeated` counts e-mails that arrived again with the same Message-ID."""

    discrepancies: list[Discrepancy] = field(default_factory=list)
    doubled: int = 0
    repeated: int = 0

    @property
    def lost(self) -> int:
        """Accepted operations that did not end, or ended without the effect that their status implies."""
        return len({found.id for found in self.discrepancies if found.kind == "lost"})

    def add(self, kind: Kind, id: str, what: str) -> None:
        """Add a discrepancy."""
        self.discrepancies.append(Discrepancy(kind, id, what))

    def exactly_one(self, id: str, what: str, found: Sequence[object], *, wanted: bool, status: str) -> None:
        """Compare how many there are of something with whether a status says that there is one."""
        if wanted and not found:
            self.add("lost", id, f"{what}: missing, although {status}")
        if not wanted and found:
            self.add("wrong", id, f"{what}: exists, although {status}")
        if len(found) > 1:
            self.doubled += len(found) - 1
            self.add("doubled", id, f"{what}: {len(found)} times")

    def compare_sums(self, postings: Iterable[Posting], balances: Mapping[str, int], provider: ledger.Ledger) -> None:
        """Compare, by currency, what was posted with what the provider holds."""
        for currency, balance in balances.items():
            if balance != 0:
                self.add("wrong", currency, f"double entry: the accounts sum to {balance}, not 0")
        posted: Counter[str] = Counter()
        for posting in postings:
            posted[posting.currency] += posting.amount if posting.kind == "capture" else -posting.amount
        held: Counter[str] = Counter()
        for charge in provider.charges:
            held[charge.currency.upper()] += charge.amount
        for refund in provider.refunds:
            held[refund.currency.upper()] -= refund.amount
        for currency in sorted(posted.keys() | held.keys()):
            if posted[currency] != held[currency]:
                self.add("wrong", currency, f"posted {posted[currency]}, the provider holds {held[currency]}")


@dataclass
class Verdict(Findings):
    """The result of the comparison of payments and refunds."""

    completed: int = 0
    failed: int = 0
    charged_cents: int = 0
    refunds: int = 0
    refunded_cents: int = 0
    emails: int = 0


def read_books(engine: Engine, intake: Intake, provider: Path, mail: Path) -> Books:
    """Read all ledgers, after everything has stopped. `provider` and `mail` are the sandboxes' data directories."""
    with engine.connect() as connection:

        def rows(query: str) -> Iterable[Any]:
            # In batches, or the driver would hold a second copy of every row.
            return connection.execute(text(query).execution_options(yield_per=1000))

        return Books(
            purchases=list(intake.accepted("purchase")),
            refund_requests=list(intake.accepted("refund")),
            payments={
                id: Payment(*values)
                for id, *values in rows(
                    "SELECT id, customer_id, amount, currency, status, charge_id, refunded, failure FROM payments"
                )
            },
            refunds={
                id: Refund(*values)
                for id, *values in rows(
                    "SELECT id, payment_id, amount, status, provider_refund_id, failure FROM refunds"
                )
            },
            postings=[Posting(*row) for row in rows(POSTINGS)],
            balances={
                currency: int(total)
                for currency, total in rows("SELECT currency, sum(amount) FROM ledger_entries GROUP BY currency")
            },
            notifications={
                about: Notification(*values)
                for about, *values in rows("SELECT about, event_id, status FROM notifications")
            },
            cases=dict(tuple(row) for row in rows("SELECT payment_id, code FROM support_cases")),
            records={
                (task, key): Record(status, error)
                for task, key, status, error in rows(
                    # not the requests' own records: the payments and refunds that they started are counted instead
                    "SELECT task, key, status, error FROM idempotency.records WHERE task <> 'http'"
                )
            },
            provider=ledger.read(provider),
            mails=ledger.read_mail(mail),
        )


def check(books: Books) -> Verdict:
    """Compare the ledgers line by line; the verdict lists all discrepancies."""
    return _Check(books).verdict


class _Check:
    def __init__(self, books: Books) -> None:
        self.books = books
        self.verdict = Verdict()
        self.charges = grouped(books.provider.charges, lambda charge: charge.metadata.get("purchase_id", ""))
        self.given_back = grouped(books.provider.refunds, lambda refund: refund.metadata.get("refund_id", ""))
        self.by_charge = grouped(books.provider.refunds, lambda refund: refund.payment_intent)
        self.postings = grouped(books.postings, lambda posting: f"{posting.kind}:{posting.reference}")
        # The subject names the event.
        self.mails = grouped(books.mails, lambda mail: mail.subject.replace(" ", ":", 1))
        self.expected: set[tuple[str, str]] = set()
        self.notifiable: set[str] = set()  # what customers should get an e-mail about
        self.cases_due = 0

        for line in books.purchases:
            self._purchase(line)
        for line in books.refund_requests:
            self._refund(line)
        self._unaccounted()
        self._sums()

    def _purchase(self, line: Line) -> None:
        payment = self.books.payments.get(line.id)
        self._operation(CAPTURE, line.id, None if payment is None else payment.status)
        if payment is None:
            return
        wanted = (line.customer_id, line.amount, line.currency)
        if payment[:3] != wanted:
            self.verdict.add("wrong", line.id, f"payment: {payment[:3]}, the file has {wanted}")
        captured, is_complete = payment.status == "captured", payment.status in ("captured", "free")
        self.verdict.completed += is_complete
        self.verdict.failed += payment.status in ("failed", "unknown")

        charges = self.charges.get(line.id, [])
        self.verdict.exactly_one(line.id, "charge", charges, wanted=captured, status=payment.status)
        for charge in charges:
            amount, currency = charge.amount, charge.currency.upper()
            if (amount, currency) != (line.amount, line.currency):
                self.verdict.add(
                    "wrong", line.id, f"charge {charge.id}: {amount} {currency}, not {line.amount} {line.currency}"
                )
        if captured and charges and payment.charge_id not in {charge.id for charge in charges}:
            self.verdict.add(
                "wrong", line.id, f"payment: has charge {payment.charge_id}, which is not among its charges"
            )
        given_back = sum(refund.amount for charge in charges for refund in self.by_charge.get(charge.id, []))
        if given_back > line.amount:
            self.verdict.add("wrong", line.id, f"refunds: {given_back} refunded of {line.amount}")
        if given_back != payment.refunded:
            self.verdict.add("wrong", line.id, f"payment: {payment.refunded} refunded, the provider says {given_back}")
        self._posting("capture", line.id, line.amount, wanted=captured, status=payment.status)
        self._mail(f"payment.captured:{line.id}", wanted=is_complete, status=payment.status)
        self._case(line.id, payment)

    def _refund(self, line: Line) -> None:
        refund = self.books.refunds.get(line.id)
        self._operation(REFUND, line.id, None if refund is None else refund.status)
        if refund is None:
            return
        if refund[:2] != (line.purchase_id, line.amount):
            self.verdict.add("wrong", line.id, f"refund: {refund[:2]}, the file has {(line.purchase_id, line.amount)}")
        refunded = refund.status == "refunded"
        self.verdict.refunds += refunded

        payment = self.books.payments.get(line.purchase_id)
        given_back = self.given_back.get(line.id, [])
        self.verdict.exactly_one(line.id, "refund", given_back, wanted=refunded, status=refund.status)
        for done in given_back:
            if done.amount != line.amount:
                self.verdict.add("wrong", line.id, f"refund {done.id}: {done.amount}, not {line.amount}")
            if payment is None or done.payment_intent != payment.charge_id:
                self.verdict.add(
                    "wrong", line.id, f"refund {done.id}: of {done.payment_intent}, the charge of another payment"
                )
        if refunded and given_back and refund.provider_refund_id not in {done.id for done in given_back}:
            self.verdict.add(
                "wrong", line.id, f"refund: has {refund.provider_refund_id}, which the provider does not have"
            )
        self._posting("refund", line.id, line.amount, wanted=refunded, status=refund.status)
        self._mail(f"payment.refunded:{line.id}", wanted=refunded, status=refund.status)

    def _operation(self, task: str, key: str, status: str | None) -> None:
        self.expected.add((task, key))
        record = self.books.records.get((task, key))
        found = "missing" if record is None else record.status
        if found not in ("completed", "failed"):
            self.verdict.add("lost", key, f"{task}: the record is {found}")
        elif status is None:
            self.verdict.add("lost", key, f"{task}: the record is {found}, the business row is missing")
        elif status not in ENDS:
            self.verdict.add("lost", key, f"{task}: the record is {found}, the business row still {status}")
        elif ENDS[status] != found:
            self.verdict.add("wrong", key, f"{task}: the record is {found}, the business row {status}")

    def _posting(self, kind: str, reference: str, amount: int, *, wanted: bool, status: str) -> None:
        postings = self.postings.get(f"{kind}:{reference}", [])
        self.verdict.exactly_one(reference, f"{kind} posting", postings, wanted=wanted, status=status)
        if any(posting.amount != amount for posting in postings):
            self.verdict.add("wrong", reference, f"{kind} posting: not of {amount}")

    def _mail(self, about: str, *, wanted: bool, status: str) -> None:
        messages = [mail.message_id for mail in self.mails.get(about, [])]
        distinct = set(messages)
        self.verdict.exactly_one(about, "e-mail", sorted(distinct), wanted=wanted, status=status)
        self.verdict.repeated += len(messages) - len(distinct)
        if wanted:
            self.notifiable.add(about)
            notification = self.books.notifications.get(about)
            if notification is None or notification.status != "sent":
                found = "missing" if notification is None else notification.status
                self.verdict.add("lost", about, f"notification: {found}")
            else:
                self._handled(MAIL, notification.event_id, about)
                self._handled(WEBHOOKS, notification.event_id, about)
                if about.startswith("payment.refunded:"):
                    self._handled(LOOK_AGAIN, notification.event_id, about)

    def _case(self, payment_id: str, payment: Payment) -> None:
        case, failed = self.books.cases.get(payment_id), payment.status in ("failed", "unknown")
        if failed and case is None:
            self.verdict.add("lost", payment_id, f"support case: missing, although {payment.status}")
        if case is not None and (not failed or case != payment.failure):
            self.verdict.add("wrong", payment_id, f"support case: {case}, the payment {payment.status}")
        self.cases_due += failed

    def _handled(self, task: str, event_id: str, about: str) -> None:
        """Check the consumer's record of an event, by the event id in the business row."""
        self.expected.add((task, event_id))
        record = self.books.records.get((task, event_id))
        found = "missing" if record is None else record.status
        if found != "completed":
            self.verdict.add("lost", about, f"{task}: the record is {found}")

    def _unaccounted(self) -> None:
        """Find everything that no accepted line accounts for."""
        purchases = {line.id for line in self.books.purchases}
        refunds = {line.id for line in self.books.refund_requests}
        for what, found, known in (
            ("payment", self.books.payments, purchases),
            ("charge", self.charges, purchases),
            ("refund row", self.books.refunds, refunds),
            ("refund", self.given_back, refunds),
            ("posting", self.postings, {f"capture:{id}" for id in purchases} | {f"refund:{id}" for id in refunds}),
            ("notification", self.books.notifications, self.notifiable),
            ("e-mail", self.mails, self.notifiable),
            ("support case", self.books.cases, purchases),
        ):
            for id in found:
                if id not in known:
                    self.verdict.add("wrong", id, f"{what}: nothing accepted accounts for it")
        cases = Counter(record.status for (task, _), record in self.books.records.items() if task == SUPPORT)
        if cases != Counter({"completed": self.cases_due} if self.cases_due else {}):
            self.verdict.add("wrong", SUPPORT, f"records: {dict(cases)}, there are {self.cases_due} failed payments")
        for task, key in self.books.records:
            if task != SUPPORT and (task, key) not in self.expected:
                self.verdict.add("wrong", key, f"{task}: a record that nothing accepted accounts for")

    def _sums(self) -> None:
        charges, refunds = self.books.provider
        self.verdict.charged_cents = sum(charge.amount for charge in charges)
        self.verdict.refunded_cents = sum(refund.amount for refund in refunds)
        self.verdict.emails = len({mail.message_id for mail in self.books.mails})
        self.verdict.compare_sums(self.books.postings, self.books.balances, self.books.provider)


def grouped(things: Iterable[T], name: Callable[[T], str]) -> dict[str, list[T]]:
    groups: dict[str, list[T]] = defaultdict(list)
    for thing in things:
        groups[name(thing)].append(thing)
    return dict(groups)
