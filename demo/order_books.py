"""The check of a run with orders: the application's tables, the provider's and the mail server's books, and the input.

How each order may have ended, and what must be there then, is computed from the input (`order_rules`). Only which of the
possible ends it was is read from the order's row: a race decides whether a request to cancel came in time, and who got
the last pieces of the scarce article.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Engine, text

from demo.checking import CAPTURE, POSTINGS, Findings, Kind, Payment, Posting, Refund, grouped
from demo.input import Line
from demo.order_rules import SCARCE, VERDICTS, Rules, pieces, return_of
from sandbox import ledger
from tasks.branches import BRANCHES, Branch
from tasks.tenants import DEFAULT, domain

SAGA, LABEL, OBSERVED = "returns.process_return", "shipping.create_label", "order_placement"
PROCESSING, CANCELLED = "PROCESSING", "CANCELLED"
# Which call of the saga the carrier refuses, by branch: the key of its operation ends with the return's id and this.
REFUSED_LABELS = {"label refused": LABEL, "reship refused": f"{LABEL}#2"}
# Of a return whose saga was undone.
COMPENSATED = "COMPENSATED"
OUT_OF_STOCK, ON_REQUEST, DECLINED = "out_of_stock", "on_request", "card_declined"


class Checkout(NamedTuple):
    order_id: str
    customer_id: str
    amount: int
    currency: str
    article: str | None
    quantity: int


class Order(NamedTuple):
    """`known_as`: what payments knows of it. `shown`: what the observer shows."""

    session: str
    customer_id: str
    amount: int
    currency: str
    article: str | None
    quantity: int
    status: str
    reason: str | None
    known_as: str | None
    shown: str | None


class Movement(NamedTuple):
    kind: str
    reference: str
    article: str
    quantity: int


class Stock(NamedTuple):
    available: int
    reserved: int
    quarantined: int


class Return(NamedTuple):
    """`inspection`: the verdict as the warehouse has it."""

    order_id: str
    customer_id: str
    is_collected: bool
    is_inspected: bool
    inspection: str | None
    verdict: str | None
    status: str
    refund_id: str | None
    problem: str | None
    saga: str | None


class Label(NamedTuple):
    return_id: str
    kind: str
    status: str


@dataclass(frozen=True)
class Told:
    """What was done to the application.

    `placed`: the orders that buyers were told of, by purchase. `overruled`: the returns that a person may have cancelled
    at any moment.
    """

    purchases: Sequence[Line]
    placed: Mapping[str, Iterable[str]]
    deliveries: Mapping[str, int]
    overruled: Collection[str] = ()


@dataclass(frozen=True)
class OrderBooks:
    """Everything that is compared."""

    told: Told
    checkouts: Mapping[str, Checkout]
    orders: Mapping[str, Order]
    payments: Mapping[str, Payment]
    refunds: Mapping[str, Refund]
    reservations: Mapping[str, tuple[str | None, int, str]]
    movements: Sequence[Movement]
    stock: Mapping[str, Stock]
    returns: Mapping[str, Return]
    labels: Mapping[str, Label]
    return_cases: Collection[tuple[str, str]]
    postings: Sequence[Posting]
    balances: Mapping[str, int]
    notifications: Mapping[str, str]
    cases: Mapping[str, str]
    # operations that have not completed, with their status
    unfinished: Mapping[tuple[str, str], str]
    provider: ledger.Ledger
    carrier: Sequence[ledger.Label]
    mails: Sequence[ledger.Message]


@dataclass
class OrderVerdict(Findings):
    """The result of the comparison. `stock_lost`: pieces that are not where they must be."""

    orders: int = 0
    processing: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    kept_cents: int = 0
    refunds: int = 0
    given_back_cents: int = 0
    delivered: int = 0
    # by status; of those whose saga was undone, `compensated`
    returns: Counter[str] = field(default_factory=Counter)
    emails: int = 0
    stock_lost: int = 0

    @property
    def cancelled(self) -> int:
        """For whatever reason."""
        return self.reasons.total()


def read_order_books(engine: Engine, told: Told, outside: Mapping[str, Path]) -> OrderBooks:
    """Read all books, after everything has stopped. `outside`: the directories of the stand-ins."""
    with engine.connect() as connection:

        def rows(query: str) -> Iterable[Any]:
            return connection.execute(text(query).execution_options(yield_per=1000))

        def by_first(query: str, row: Any) -> dict[str, Any]:
            return {id: row(*values) for id, *values in rows(query)}

        return OrderBooks(
            told=told,
            checkouts=by_first(
                "SELECT checkout_session_id, order_id, customer_id, amount, currency, sku, quantity FROM checkouts",
                Checkout,
            ),
            orders=by_first(
                "SELECT o.id, checkout_session_id, o.customer_id, o.amount, o.currency, sku, quantity, o.status, reason,"
                " p.order_status, g.status FROM orders o LEFT JOIN payments p ON p.order_id = o.id"
                f" LEFT JOIN idempotency.sagas g ON (g.task, g.key) = ('{OBSERVED}', o.id)",
                Order,
            ),
            payments=by_first(
                "SELECT order_id, customer_id, amount, currency, status, charge_id, refunded, failure FROM payments",
                Payment,
            ),
            refunds=by_first("SELECT id, payment_id, amount, status, provider_refund_id, failure FROM refunds", Refund),
            reservations=by_first("SELECT order_id, sku, quantity, status FROM reservations", lambda *row: row),
            movements=[Movement(*row) for row in rows("SELECT kind, reference, sku, quantity FROM stock_movements")],
            stock=by_first("SELECT sku, available, reserved, quarantined FROM stock", Stock),
            returns=by_first(
                "SELECT r.id, order_id, customer_id, is_collected, is_inspected, i.verdict, r.verdict, r.status, refund_id,"
                " problem, g.status FROM returns r LEFT JOIN inspections i ON i.return_id = r.id"
                f" LEFT JOIN idempotency.sagas g ON (g.task, g.key) = ('{SAGA}', r.id)",
                Return,
            ),
            labels=by_first("SELECT id, return_id, kind, lower(status) FROM labels", Label),
            return_cases={tuple(row) for row in rows("SELECT return_id, code FROM return_cases")},
            postings=[Posting(*row) for row in rows(POSTINGS)],
            balances={
                currency: int(total)
                for currency, total in rows("SELECT currency, sum(amount) FROM ledger_entries GROUP BY currency")
            },
            notifications=dict(tuple(row) for row in rows("SELECT about, status FROM notifications")),
            cases=dict(tuple(row) for row in rows("SELECT payment_id, code FROM support_cases")),
            unfinished={
                (task, key): status
                for task, key, status in rows(
                    "SELECT task, key, status FROM idempotency.records WHERE status <> 'completed'"
                )
            },
            provider=ledger.read(outside["provider"]),
            carrier=ledger.read_labels(outside["carrier"]),
            mails=ledger.read_mail(outside["mail"]),
        )


def check_orders(books: OrderBooks, rules: Rules) -> OrderVerdict:
    """Compare the books order by order; the verdict lists all discrepancies."""
    return _Check(books, rules).verdict


class _Check:
    def __init__(self, books: OrderBooks, rules: Rules) -> None:
        self.books = books
        self.rules = rules
        self.verdict = OrderVerdict(orders=len(books.told.purchases), delivered=sum(books.told.deliveries.values()))
        self.charges = grouped(books.provider.charges, lambda charge: charge.metadata.get("purchase_id", ""))
        self.given_back = grouped(books.provider.refunds, lambda refund: refund.payment_intent)
        self.refunds = grouped(books.refunds.items(), lambda refund: refund[1].payment_id)
        self.postings = grouped(books.postings, lambda posting: f"{posting.kind}:{posting.reference}")
        self.movements = grouped(books.movements, lambda movement: movement.reference)
        self.carried = grouped(books.carrier, lambda label: label.reference)
        self.mails = grouped(books.mails, lambda mail: mail.subject.replace(" ", ":", 1))
        # What accounts for something: whatever is not among these is there without a reason.
        accounted = ("order", "posting", "mail", "refund", "failure", "refusal", "overruled", "return", "label")
        self.known: dict[str, set[str]] = {what: set() for what in accounted}
        self.held: Counter[str] = Counter()
        self.quarantined: Counter[str] = Counter()
        self.turned_away: list[tuple[str, int]] = []
        for line in books.told.purchases:
            self._order(line)
        self._stock()
        self._unaccounted()
        self.verdict.compare_sums(books.postings, books.balances, books.provider)
        self.verdict.emails = len({mail.message_id for mail in books.mails})

    def _order(self, line: Line) -> None:
        id, *others = sorted(self.books.told.placed.get(line.id, ())) or [""]
        if others:
            self.verdict.doubled += len(others)
            self.verdict.add("doubled", line.id, f"orders: its buyer was told of {len(others) + 1}")
        article, quantity = self.rules.article(line), pieces(line)
        wanted = (line.customer_id, line.amount, line.currency, article, quantity)
        if (noted := self.books.checkouts.get(line.id)) != (id, *wanted):
            self.verdict.add("wrong", line.id, f"checkout: {noted}, its buyer was told of {id or 'none'}: {wanted}")
        order = self.books.orders.get(id)
        if order is None:
            self.verdict.add("lost", line.id, f"order {id or '(none)'}: missing")
            return
        self.known["order"].add(id)
        if order[:6] != (line.id, *wanted):
            self.verdict.add("wrong", id, f"order: {order[:6]}, the file has {(line.id, *wanted)}")
        self.verdict.processing += order.status == PROCESSING
        if order.status == CANCELLED:
            self.verdict.reasons[order.reason or "none"] += 1
        possible = self._ends(line, id)
        if order.status not in (PROCESSING, CANCELLED):
            self.verdict.add("lost", id, f"order: still {order.status}")
            return
        if (order.status, order.reason) not in possible:
            self.verdict.add("wrong", id, f"order: {order.status} {order.reason or ''}, by the input {possible}")
        seen = ("placed", "COMPLETED") if order.status == PROCESSING else ("cancelled", "FAILED")
        if (order.known_as, order.shown) != seen:
            self.verdict.add("wrong", id, f"order: {order}, for payments and the observer it must be {seen}")
        if order.reason == OUT_OF_STOCK and article is not None:
            self.turned_away.append((article, quantity))
        returned = self._return(line, id) if order.status == PROCESSING else None
        self._money(line, id, order, returned)
        self._pieces(id, order, article, quantity, returned)

    def _ends(self, line: Line, id: str) -> list[tuple[str, str | None]]:
        """How the order may have ended by the input."""
        declined = self.rules.is_declined(line, id)
        ends: list[tuple[str, str | None]] = [(CANCELLED, DECLINED) if declined else (PROCESSING, None)]
        if self.rules.hesitation(line) is not None:
            ends.append((CANCELLED, ON_REQUEST))
        if self.rules.article(line) == SCARCE:
            ends.append((CANCELLED, OUT_OF_STOCK))
        return ends

    def _return(self, line: Line, order_id: str) -> Branch | None:
        """How the order was returned, by the rules; checks the return, its saga, its labels, its cases and its e-mails."""
        name = self.rules.branch(line, order_id)
        if name is None:
            return None
        id, due = return_of(order_id), BRANCHES[name]
        self.known["return"].add(id)
        found = self.books.returns.get(id)
        if found is None:
            self.verdict.add("lost", id, f"return: missing, must be {name}")
            return due
        is_overruled = id in self.books.told.overruled and found.saga == "FAILED"
        if name in REFUSED_LABELS:
            self.known["refusal"].add(refusal := f"{id}/{REFUSED_LABELS[name]}")
            if is_overruled:
                self.known["overruled"].add(refusal)
        inspection = VERDICTS.get(name)
        if is_overruled:
            name, due = "cancelled by a person", self._overruled(id, found, due)
            inspection = found.inspection and inspection
        verdict = None if "late_inspection" in due.cases or (is_overruled and found.verdict is None) else inspection
        heard = (line.customer_id, due.label == "COLLECTED", inspection is not None, inspection, verdict)
        if found[1:6] != heard:
            self.verdict.add("wrong", id, f"return: {found[1:6]}, must be {heard}: {name}")
        self.verdict.returns[COMPENSATED if due.undone else found.status] += 1
        wanted = (order_id, due.status, due.problem, "FAILED" if due.undone else "COMPLETED")
        refund = self.books.refunds.get(found.refund_id or "")
        if due.refunded and line.amount and (refund is None or refund.payment_id != order_id):
            self.verdict.add("wrong", id, f"return: its refund is {found.refund_id}, {refund}: {name}")
        if (found.order_id, found.status, found.problem, found.saga) != wanted:
            has_ended = found.saga in ("FAILED", "COMPLETED")
            self.verdict.add("wrong" if has_ended else "lost", id, f"return: {found}, must be {name}: {wanted}")
        if due.undone:
            self.known["failure"].add(id)
        # by the carrier's own book
        labels = [(label.kind, label.status) for label in self.carried.get(id, [])]
        made = [] if due.label is None else [("return", due.label.lower())]
        made += [("reship", "created")] if name == "reshipped" else []
        # of a second label that was undone
        made += [("reship", "voided")] if due.undone and ("reship", "voided") in labels else []
        if sorted(labels) != sorted(made):
            self.verdict.doubled += max(len(labels) - len(made), 0)
            kind: Kind = "lost" if len(labels) < len(made) else "doubled" if len(labels) > len(made) else "wrong"
            self.verdict.add(kind, id, f"labels: the carrier has {labels}, must have {made}: {name}")
        for label in self.carried.get(id, []):
            self.known["label"].add(label.id)
            if self.books.labels.get(label.id) != (noted := Label(id, label.kind, label.status)):
                self.verdict.add("wrong", id, f"label: {self.books.labels.get(label.id)}, the carrier has {noted}")
        cases = sorted(code for return_id, code in self.books.return_cases if return_id == id)
        if cases != sorted(due.cases):
            self.verdict.add("wrong", id, f"cases: {cases}, must be {sorted(due.cases)}: {name}")
        # of one that was cancelled, the label may not have been sent yet
        is_told = due.label is not None and (not is_overruled or f"return.labelled:{id}" in self.mails)
        self._mail(line, f"return.labelled:{id}", wanted=is_told, status=name)
        self._mail(line, f"return.{due.status.lower()}:{id}", wanted=True, status=name)
        return due

    def _overruled(self, id: str, found: Return, planned: Branch) -> Branch:
        """What must be there after a cancel at any moment: how far it had come is told by the carrier and the provider."""
        labels = {label.kind: label.status for label in self.carried.get(id, [])}
        is_collected = labels.get("return") == "collected"
        charges = self.charges.get(found.order_id, [])
        _, _, reserved = self.books.reservations.get(found.order_id, (None, 0, ""))
        goods = planned.goods if is_collected and reserved == "STOCK_RETURNED" else None
        refunded = is_collected and planned.refunded and any(self.given_back.get(each.id) for each in charges)
        problems = ("cancelled", *("already_refunded",) * refunded, *("already_booked",) * (goods is not None))
        known = {code for return_id, code in self.books.return_cases if return_id == id}
        late = tuple(known & ({"late_parcel", "late_inspection"} if is_collected else {"late_inspection"}))
        return Branch(
            "a person cancels it",
            "",
            "ESCALATED" if is_collected else "CANCELLED",
            ", ".join(problems),
            label="COLLECTED" if is_collected else "VOIDED" if labels else None,
            goods=goods,
            refunded=refunded,
            cases=(*problems, *late) if is_collected else late,
            undone=True,
        )

    def _money(self, line: Line, id: str, order: Order, back: Branch | None) -> None:
        """An order that is PROCESSING is paid; one that is cancelled was never charged, or all is given back."""
        says = f"{order.status} {order.reason or ''}".strip()
        charges = self.charges.get(id, [])
        charged = sum(charge.amount for charge in charges)
        returned = [refund for charge in charges for refund in self.given_back.get(charge.id, [])]
        left = charged - sum(refund.amount for refund in returned)
        paid = line.amount if order.status == PROCESSING else 0
        due = 0 if back is not None and back.refunded else paid
        if left != due:
            kind: Kind = "lost" if left < due else "wrong"
            self.verdict.add(kind, id, f"money: the provider holds {left} {line.currency} of it, {due} are due: {says}")
        # only what was on its way when a request to cancel came may have been charged and given back
        was_on_its_way = order.reason == ON_REQUEST and not self.rules.is_declined(line, id)
        is_charged = bool(charges) if was_on_its_way else paid > 0
        self.verdict.exactly_one(id, "charge", charges, wanted=is_charged, status=says)
        for charge in charges:
            found = (charge.amount, charge.currency.upper(), charge.metadata.get("customer_id"))
            if found != (line.amount, line.currency, line.customer_id):
                self.verdict.add("wrong", id, f"charge {charge.id}: {found}, not {line.amount} of {line.customer_id}")
        self.verdict.kept_cents += left
        self.verdict.refunds += len(returned)
        self.verdict.given_back_cents += charged - left

        payment = self.books.payments.get(id)
        if payment is None:
            self.verdict.add("lost", id, "payment: missing")
            return
        expected = (
            {"captured"} if charges else {"free"} if line.amount == 0 and order.reason in (None, ON_REQUEST) else set()
        )
        if order.status == CANCELLED:
            expected |= {"cancelled"} if not charges else set()
            expected |= {"failed"} if self.rules.is_declined(line, id) else set()
        if payment.status not in expected:
            self.verdict.add("wrong", id, f"payment: {payment.status}, must be {' or '.join(sorted(expected))}: {says}")
        wanted = (line.customer_id, line.amount, line.currency)
        if payment[:3] != wanted or payment.refunded != charged - left:
            self.verdict.add(
                "wrong",
                id,
                f"payment: {payment[:3]}, {payment.refunded} refunded; the file has {wanted}, the provider"
                f" {charged - left} refunded",
            )
        if charges and payment.charge_id not in {charge.id for charge in charges}:
            self.verdict.add("wrong", id, f"payment: has charge {payment.charge_id}, which the provider does not have")
        self._posting("capture", id, line.amount, wanted=bool(charges), status=says)
        self._mail(line, f"payment.captured:{id}", wanted=payment.status in ("captured", "free"), status=payment.status)
        failed = payment.status == "failed"
        if self.books.cases.get(id) != (DECLINED if failed else None):
            self.verdict.add("wrong", id, f"support case: {self.books.cases.get(id)}, the payment is {payment.status}")
        if failed:
            self.known["failure"].add(id)
            if self.books.unfinished.get((CAPTURE, id)) != "failed":
                self.verdict.add("wrong", id, f"{CAPTURE}: has not failed, its payment has")
        self._refunds(line, id, returned, wanted=bool(charges) and due == 0, status=says)

    def _refunds(self, line: Line, id: str, returned: Sequence[ledger.Refund], *, wanted: bool, status: str) -> None:
        rows = self.refunds.get(id, [])
        self.verdict.exactly_one(id, "refund of the provider", returned, wanted=wanted, status=status)
        self.verdict.exactly_one(id, "refund", rows, wanted=wanted, status=status)
        made = {refund.id: (refund.metadata.get("refund_id"), refund.amount) for refund in returned}
        for refund_id, refund in rows:
            self.known["refund"].add(refund_id)
            if refund.status != "refunded" or made.get(refund.provider_refund_id or "") != (refund_id, refund.amount):
                self.verdict.add("wrong", id, f"refund {refund_id}: {refund}, the provider has {made}")
            self._posting("refund", refund_id, refund.amount, wanted=True, status=status)
            self._mail(line, f"payment.refunded:{refund_id}", wanted=True, status=status)

    def _pieces(self, id: str, order: Order, article: str | None, quantity: int, back: Branch | None) -> None:
        """Pieces belong to an order that is PROCESSING; of one that is cancelled they are back, or were never taken."""
        says = f"{order.status} {order.reason or ''}".strip()
        moved = Counter(self.movements.get(id, []))
        taken, released = (Movement(kind, id, article or "", quantity) for kind in ("reserved", "released"))
        possible: list[Counter[Movement]] = [Counter()]
        if article is not None and order.status == PROCESSING:
            possible = [Counter([taken])]
            if back is None or back.goods is None:
                self.held[article] += quantity
            elif back.goods == "quarantined":
                self.quarantined[article] += quantity
        elif article is not None and order.reason != OUT_OF_STOCK:
            possible.append(Counter([taken, released]))
        if moved not in possible:
            kind: Kind = "lost" if moved[taken] - moved[released] < possible[0][taken] else "wrong"
            self.verdict.add(kind, id, f"movements: {list(moved.elements())}, must be {list(possible[-1])}: {says}")
        held = quantity if article is not None else 0
        goods = back.goods if back is not None else None
        booked = [Movement(goods, return_of(id), article or "", quantity)] if goods and held else []
        if (found := self.movements.get(return_of(id), [])) != booked:
            kind = "lost" if len(found) < len(booked) else "doubled" if len(found) > len(booked) else "wrong"
            self.verdict.doubled += max(len(found) - len(booked), 0)
            self.verdict.add(kind, return_of(id), f"movements: {found}, must be {booked}")
        reservation = self.books.reservations.get(id)
        wanted = ("STOCK_RETURNED" if goods else "STOCK_RESERVED", held)
        if order.status == CANCELLED:
            wanted = ("STOCK_RELEASED", held if moved else 0)
        if reservation is None or reservation != (article, *reversed(wanted)):
            self.verdict.add("wrong", id, f"reservation: {reservation}, must be {wanted}: {says}")

    def _stock(self) -> None:
        """Each number of stock, from the deliveries and what the orders hold."""
        ever_taken: Counter[str] = Counter()
        received: Counter[str] = Counter()
        for movement in self.books.movements:
            ever_taken[movement.article] += movement.quantity if movement.kind == "reserved" else 0
            received[movement.article] += movement.quantity if movement.kind == "received" else 0
        for article in sorted(self.books.told.deliveries.keys() | self.books.stock.keys() | received.keys()):
            delivered = self.books.told.deliveries.get(article, 0)
            held, quarantined = self.held[article], self.quarantined[article]
            due = Stock(delivered - held - quarantined, held, quarantined)
            found = self.books.stock.get(article, Stock(0, 0, 0))
            if found != due:
                self.verdict.stock_lost += sum(abs(a - b) for a, b in zip(found, due, strict=True))
                self.verdict.add("wrong", article, f"stock: {found}, the orders leave {due}")
            if received[article] != delivered:
                self.verdict.add("wrong", article, f"stock: {received[article]} received, {delivered} were delivered")
        for article, quantity in self.turned_away:
            if (spare := self.books.told.deliveries.get(article, 0) - ever_taken[article]) >= quantity:
                self.verdict.add(
                    "wrong", article, f"stock: an order of {quantity} turned away, {spare} were never taken"
                )

    def _posting(self, kind: str, reference: str, amount: int, *, wanted: bool, status: str) -> None:
        postings = self.postings.get(f"{kind}:{reference}", [])
        self.verdict.exactly_one(reference, f"{kind} posting", postings, wanted=wanted, status=status)
        if any(posting.amount != amount for posting in postings):
            self.verdict.add("wrong", reference, f"{kind} posting: {postings[0].amount}, not {amount}")
        self.known["posting"].add(f"{kind}:{reference}")

    def _mail(self, line: Line, about: str, *, wanted: bool, status: str) -> None:
        mails = self.mails.get(about, [])
        messages = [mail.message_id for mail in mails]
        if others := {mail.recipient for mail in mails} - {f"customer-{line.customer_id}@{domain(DEFAULT)}"}:
            self.verdict.add("wrong", about, f"e-mail: to {', '.join(sorted(others))}, not to {line.customer_id}")
        self.verdict.exactly_one(about, "e-mail", sorted(set(messages)), wanted=wanted, status=status)
        self.verdict.repeated += len(messages) - len(set(messages))
        noted = self.books.notifications.get(about)
        if noted != ("sent" if wanted else None):
            self.verdict.add("lost" if wanted else "wrong", about, f"notification: {noted}, although {status}")
        self.known["mail"].add(about)

    def _unaccounted(self) -> None:
        """Find what no order accounts for, and what has not ended."""
        known = self.known
        returned = known["order"] | known["return"]
        for what, found, accounted in (
            ("checkout", self.books.checkouts, {line.id for line in self.books.told.purchases}),
            ("order", self.books.orders, known["order"]),
            ("payment", self.books.payments, known["order"]),
            ("charge", self.charges, known["order"]),
            ("refund", self.books.refunds, known["refund"]),
            ("reservation", self.books.reservations, known["order"]),
            ("posting", self.postings, known["posting"]),
            ("notification", self.books.notifications, known["mail"]),
            ("e-mail", self.mails, known["mail"]),
            ("support case", self.books.cases, known["order"]),
            ("return", self.books.returns, known["return"]),
            ("case of a return", {return_id for return_id, _ in self.books.return_cases}, known["return"]),
            ("label", self.books.labels, known["label"]),
            ("label of the carrier", {label.id for label in self.books.carrier}, known["label"]),
        ):
            for id in found:
                if id not in accounted:
                    self.verdict.add("wrong", id, f"{what}: nothing that was ordered accounts for it")
        for movement in self.books.movements:
            if movement.kind != "received" and movement.reference not in returned:
                self.verdict.add("wrong", movement.reference, f"{movement}: nothing that was ordered accounts for it")
        refused = {key.split("/", 2)[-1] for task, key in self.books.unfinished if task == LABEL}
        for key in known["refusal"] - refused - known["overruled"]:
            self.verdict.add("wrong", key, f"{LABEL}: must have failed, and has not")
        for (task, key), status in self.books.unfinished.items():
            if status != "failed":
                self.verdict.add("lost", key, f"{task}: the record is {status}")
            elif task == LABEL and key.split("/", 2)[-1] in known["refusal"]:
                continue
            elif task not in (CAPTURE, SAGA) or key not in known["failure"]:
                self.verdict.add("wrong", key, f"{task}: failed, which nothing that was ordered accounts for")
