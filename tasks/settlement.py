"""What a provider's report changes in our books. Reports come late, twice and in any order; the end is the same.

A report never ends an operation. It notes the fact, in one commit with what follows from it, and wakes the operation that
waits for it; whose finish finds what is noted, and adds only what is missing.

    charge succeeded    payment captured, posted; its order PAID
    charge failed       payment failed; its order CANCELLED; nothing if it is captured, by whichever charge
    refund pending      if it was made at the provider's site: its amount is reserved
    refund succeeded    refund posted, once the payment is captured
    refund failed       if it was posted: a reversal, for what it says after that is older
    dispute             kept as reported last; what is won or lost stays so
"""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any, Literal

from sqlalchemy import func, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import DataError, IntegrityError
from sqlalchemy.orm import Session

from idempotency import Handle, IdempotentTask, OperationId, PermanentError
from idempotency.application import settings_of
from idempotency.observe.logs import log
from idempotency.store import operations

from . import app, orders
from .models import Dispute, Order, Payment, PaymentEvent, Refund
from .once import insert_unless_there
from .outside import gateway
from .payments import CAPTURE, capture_payment, mark_captured, mark_failed
from .refunds import MADE, MAY_BE_MADE, at_site, fail, fits, mark_refunded, move, refund_payment
from .reported import SETTLE_WAITING, failure_of
from .reports import DISPUTE_ENDED, FAILED, REFUND_FAILED, STRIPE, SUCCEEDED, Report

# Seconds for which the lock of a transaction at the provider is held at most.
LOCK_SECONDS = 30
# Seconds for which another report waits for it: those of other charges wait behind it.
WAIT_SECONDS = 2

# Why a question about a refund fails.
NOT_THERE = "refund_not_there"
# The reason of a refund that no request of ours has asked for.
AT_THE_SITE = "made at the provider"

Settled = Literal["applied", "duplicate", "waiting"]

_LOCK = text("""
SELECT set_config('lock_timeout', :wait, true), set_config('statement_timeout', :hold, true),
       set_config('idle_in_transaction_session_timeout', :hold, true)
""")
# The seed is "webh" in ASCII: Postgres before 16 has no hexadecimal numbers.
_OF_CHARGE = text("SELECT pg_advisory_xact_lock(hashtextextended(:charge, 2003133032))")


def settle(session: Session, report: Report) -> Settled:
    """Keep a report and apply it, in the caller's transaction, which must end within `LOCK_SECONDS`.

    "duplicate": it is known, by its id or by what it says. "waiting": it is kept until we know more, such as a refund of a
    payment that is not known to be captured. Raises `OperationalError` if another holds the charge's lock for too long.
    """
    lock_charge(session, report.gateway, report.charge_id)
    report = _with_our_names(session, report)
    if not insert_unless_there(session, PaymentEvent, asdict(report)):
        completed = _completed(session, report)
        if completed is None:
            return "duplicate"
        report = completed
    is_applied = _apply_alone(session, report)
    if report.object == "charge":
        _apply_waiting(session, report.tenant, report.gateway, report.charge_id)
    log.info("payment_event", gateway=report.gateway, type=report.type, applied=is_applied)
    return "applied" if is_applied else "waiting"


def _with_our_names(session: Session, report: Report) -> Report:
    """Without the names of somebody else's: a refund of ours has a row before its first call, as has the payment it is of."""
    tenant = report.tenant
    if report.refund_id is not None and session.get(Refund, (tenant, report.refund_id)) is None:
        report = replace(report, refund_id=None)
    if not may_be_ours(session, report):
        report = replace(report, payment_id=None)
    return report


def may_be_ours(session: Session, report: Report) -> bool:
    """Whether a report names a payment of ours; of a charge, also one that a backup may have forgotten."""
    if report.payment_id is None:
        return False
    return report.object == "charge" or session.get(Payment, (report.tenant, report.payment_id)) is not None


def _completed(session: Session, report: Report) -> Report | None:
    """The same report as it is kept, with the names that this one tells: it came without them, and waits for that."""
    of_object = {"tenant": report.tenant, "gateway": report.gateway, "object": report.object}
    known = select(PaymentEvent).filter_by(
        **of_object, object_id=report.object_id, state=report.state, is_applied=False
    )
    if report.object == "dispute":
        known = known.filter_by(occurred_at=report.occurred_at)
    event = session.scalars(known).one_or_none()
    if event is None:
        return None
    told = {
        name: said
        for name in ("payment_id", "refund_id", "effect_key")
        if getattr(event, name) is None and (said := getattr(report, name)) is not None
    }
    if "payment_id" in told and session.get(Payment, (report.tenant, told["payment_id"])) is None:
        del told["payment_id"]  # not ours
    if not told or (event.payment_id is not None and report.payment_id not in (None, event.payment_id)):
        return None
    for name, said in told.items():
        setattr(event, name, said)
    event.code = event.code or report.code
    session.flush()
    return as_report(event)


def as_report(event: PaymentEvent) -> Report:
    """The report that is kept as this row."""
    return Report(**{name: getattr(event, name) for name in Report.__dataclass_fields__})


def _apply_alone(session: Session, report: Report) -> bool:
    """Apply a report, in a savepoint: one that our books refuse is kept all the same, and the others go on."""
    try:
        with session.begin_nested():
            return _apply(session, report)
    except (DataError, IntegrityError) as error:
        broken = {"gateway": report.gateway, "event_id": report.event_id, "error": type(error).__name__}
        log.error("payment_event_broken", **broken)
        return False


def _apply(session: Session, report: Report) -> bool:
    payment = _payment_of(session, report)
    if payment is None:
        return False
    apply = {"charge": _charge, "refund": _refund, "dispute": note_dispute}[report.object]
    event = session.get_one(PaymentEvent, (report.tenant, report.gateway, report.event_id))
    event.is_applied = True  # for `settle_later`, it is not one of those that wait
    event.is_applied = apply(session, payment, report)
    return event.is_applied


def _payment_of(session: Session, report: Report) -> Payment | None:
    """The payment that a report is about; locked.

    That of a charge, or of a refund of ours, is the one that it names; that of a refund which is in our books, the one that it is
    there. Of a dispute, or another refund at the provider's site, it is the one that has the charge in our books, whatever the
    provider calls it: a person may have found it to be another's. If none has, as of a payment that was charged twice, it is the
    one that is named.
    """
    if report.payment_id is not None and (report.object == "charge" or report.refund_id is not None):
        return _locked(session, report.tenant, report.payment_id)
    if report.object == "refund":
        booked = (
            select(Refund.payment_id)
            .filter_by(tenant=report.tenant)
            .where(_is_object(report), func.coalesce(Refund.gateway, report.gateway) == report.gateway)
        )
        if (payment_id := session.scalars(booked.limit(1)).first()) is not None:
            return _locked(session, report.tenant, payment_id)
    of_charge = select(Payment).filter_by(tenant=report.tenant, charge_id=report.charge_id).with_for_update()
    found = session.scalars(of_charge.limit(2)).all()
    found = [each for each in found if each.gateway == report.gateway] or found
    if not found and report.payment_id is not None:
        return _locked(session, report.tenant, report.payment_id)
    return found[0] if len(found) == 1 else None


def _locked(session: Session, tenant: str, payment_id: str) -> Payment | None:
    return session.get(Payment, (tenant, payment_id), with_for_update=True)


def _is_object(report: Report) -> Any:
    """Whether a refund has this object of the provider's: its task has noted that, or it was written down as the site's."""
    is_written_down = Refund.is_at_site & (Refund.id == at_site(report.gateway, report.object_id))
    return (Refund.provider_refund_id == report.object_id) | is_written_down


@app.task(base=IdempotentTask, bind=True, name=SETTLE_WAITING, key=None)
def settle_waiting(self: IdempotentTask, gateway: str, charge_id: str) -> int:
    """Apply what was reported of a charge too early: its payment was not captured, or nothing was left to refund."""
    session = self.session
    lock_charge(session, gateway, charge_id)
    return _apply_waiting(session, self.tenant, gateway, charge_id)


@app.task(base=IdempotentTask, bind=True, name="payments.ask_about_refund", key=None)
def ask_about_refund(self: IdempotentTask, refund_id: str) -> str:
    """Ask Stripe about a refund that was made at its site and is not decided: no task carries it out, and a webhook may be lost."""
    refund = self.session.get(Refund, (self.tenant, refund_id))
    if refund is None or not refund.is_at_site or refund.status not in MAY_BE_MADE:
        return "decided"
    payment = self.session.get_one(Payment, (self.tenant, refund.payment_id))
    about: dict[str, Any] = {"charge_id": payment.charge_id, "currency": payment.currency.upper()}
    about |= {"amount": refund.amount, "tenant": self.tenant, "object": "refund"}
    there = refund.id.removeprefix(at_site(STRIPE, ""))
    self.session.rollback()  # no open transaction during an external call

    found = gateway.state_of_refund(there)
    if found is None:
        raise PermanentError(
            f"refund {there}: reported before, but the provider has none; is this the API key of another account?",
            NOT_THERE,
        )
    state, code = found
    answer: dict[str, Any] = {"event_id": f"answer-{there}-{state}", "type": "answer", "occurred_at": datetime.now(UTC)}
    return settle(self.session, Report(STRIPE, **answer, **about, object_id=there, state=state, code=code))


def lock_charge(session: Session, gateway: str, charge_id: str) -> None:
    """Let no other report of this charge be applied until the transaction ends. Raises `OperationalError` if one is for too long."""
    session.execute(_LOCK, {"wait": str(int(WAIT_SECONDS * 1000)), "hold": str(LOCK_SECONDS * 1000)})
    session.execute(_OF_CHARGE, {"charge": f"{gateway} {charge_id}"})


def _apply_waiting(session: Session, tenant: str, gateway: str, charge_id: str) -> int:
    """Apply what can be by now; returns how many."""
    waiting = select(PaymentEvent).filter_by(tenant=tenant, gateway=gateway, charge_id=charge_id, is_applied=False)
    reports = [as_report(event) for event in session.scalars(waiting.order_by(PaymentEvent.received_at)).all()]
    return sum(_apply_alone(session, report) for report in reports)


def _charge(session: Session, payment: Payment, report: Report) -> bool:
    is_another = report.state == SUCCEEDED and payment.charge_id not in (None, report.charge_id)
    if not _is_of(payment, report) or is_another:
        # perhaps money that we do not know of: the reconciliation names both sides
        log.error("payment_event_differs", gateway=report.gateway, event_id=report.event_id, payment=payment.id)
        return False
    if report.state == SUCCEEDED:
        is_new = mark_captured(session, payment.id, report.charge_id, by=report.gateway, tenant=payment.tenant)
        if is_new and (order := _order_of(session, payment)) is not None:
            orders.pay(session, order)
    elif report.state == FAILED and not _is_of_an_earlier_call(session, payment, report):
        code = report.code or FAILED
        if mark_failed(session, payment, code) and (order := _order_of(session, payment)) is not None:
            orders.cancel_for(session, order, code)
    _wake(session, capture_payment.name, payment.tenant, payment.id)
    return True


def _is_of_an_earlier_call(session: Session, payment: Payment, report: Report) -> bool:
    """Whether the payment is charged under another key by now, or will be: so that this failure decides nothing.

    A call of which it is known that nothing has happened is followed by one under another key, or the operation fails by itself.
    """
    id = OperationId(payment.tenant, capture_payment.name, payment.id)
    record = operations.lookup(session.connection(), id, settings_of(app).service)
    begun = {} if record is None else record.effects.get(CAPTURE, {})
    if report.effect_key is None or record is None:
        return False
    goes_on = record.status in ("started", "released") and begun.get("state") == "not_happened"
    return goes_on or begun.get("key", report.effect_key) != report.effect_key


def _order_of(session: Session, payment: Payment) -> Order | None:
    return None if payment.order_status is None else orders.find(session, payment.order_id, payment.tenant)


def _refund(session: Session, payment: Payment, report: Report) -> bool:
    booked = _booked(session, payment, report)
    if (
        report.state == SUCCEEDED
        and booked is None
        and failure_of(session, report.charge_id, report.object_id, tenant=payment.tenant) is not None
    ):
        return True  # older than what we know
    refund = _refund_of(session, payment, report) if booked is None else booked
    if refund is None:
        return False
    if refund.is_at_site:  # reports come in any order
        refund.created_at = min(refund.created_at, report.occurred_at)
    if report.state in REFUND_FAILED:
        fail(session, refund, payment, report.code or report.state, at=report.occurred_at)
    elif report.state == SUCCEEDED or refund.is_at_site:
        if payment.status != "captured" or not (refund.status in MADE or fits(refund, payment)):
            return False
        if report.state == SUCCEEDED:
            mark_refunded(session, refund, report.object_id, by=report.gateway)
        elif refund.status == "pending":
            move(refund, payment, "reserved")
    _wake(session, refund_payment.name, payment.tenant, refund.id)
    return True


def _booked(session: Session, payment: Payment, report: Report) -> Refund | None:
    """The refund that has this object of the provider's already, whatever a report calls it; locked."""
    known = select(Refund).filter_by(tenant=payment.tenant, payment_id=payment.id, amount=report.amount)
    known = known.where(_is_object(report))
    return session.scalars(known.with_for_update()).first()


def _refund_of(session: Session, payment: Payment, report: Report) -> Refund | None:
    """The refund, locked. One that was made at the provider's site is written down, once its payment is captured."""
    if report.currency != payment.currency.upper():
        return None
    if report.refund_id is not None:
        refund = session.get(Refund, (payment.tenant, report.refund_id), with_for_update=True)
        if refund is None or (refund.payment_id, refund.amount) != (payment.id, report.amount):
            return None
        if refund.provider_refund_id is not None:  # perhaps made twice
            log.error("payment_event_differs", gateway=report.gateway, event_id=report.event_id, refund=refund.id)
            return None
        return refund
    if payment.status != "captured" or payment.charge_id != report.charge_id or report.amount == 0:
        return None
    id = {"tenant": payment.tenant, "id": at_site(report.gateway, report.object_id)}
    of_payment = select(Refund).filter_by(tenant=payment.tenant, payment_id=payment.id)
    # Perhaps one of ours, whose name the provider does not tell: its task finds it, and says so. What has not succeeded
    # may also be the attempt of one of ours that was refused.
    ours = of_payment.filter_by(amount=report.amount, provider_refund_id=None, is_at_site=False)
    if report.state == SUCCEEDED:
        ours = ours.where(Refund.status.in_(MAY_BE_MADE))
    if session.scalars(ours).first() is not None:
        return None
    about = {"payment_id": payment.id, "amount": report.amount, "reason": AT_THE_SITE, "is_at_site": True}
    about |= {"gateway": report.gateway, "created_at": report.occurred_at}
    if not insert_unless_there(session, Refund, {**id, **about, "status": "pending"}):
        return None  # a request of ours has chosen this id
    return session.get_one(Refund, (id["tenant"], id["id"]), with_for_update=True)


def note_dispute(session: Session, payment: Payment, report: Report) -> bool:
    """Keep a dispute of a payment as it was reported last; what is won or lost stays so."""
    values = {
        "tenant": payment.tenant,
        "gateway": report.gateway,
        "id": report.object_id,
        "payment_id": payment.id,
        "amount": report.amount,
        "currency": report.currency,
        "status": report.state,
        "reason": report.code,
        "reported_at": report.occurred_at,
    }
    kept = insert(Dispute).values(**values)
    is_final = kept.excluded.status.in_(DISPUTE_ENDED)
    # of two in one second the final one counts, then the one that came last
    session.execute(
        kept.on_conflict_do_update(
            index_elements=["tenant", "gateway", "id"],
            set_={name: values[name] for name in ("payment_id", "status", "amount", "reason", "reported_at")},
            where=Dispute.status.not_in(DISPUTE_ENDED)
            & (is_final | (Dispute.reported_at <= kept.excluded.reported_at)),
        )
    )
    return True


def _is_of(payment: Payment, report: Report) -> bool:
    return (payment.amount, payment.currency.upper()) == (report.amount, report.currency)


def _wake(session: Session, task: str, tenant: str, key: str) -> None:
    Handle(app, OperationId(tenant, task, key)).wake(session)
