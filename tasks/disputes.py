"""Disputes of Stripe's: each is one of the payment that has its charge in our books, whichever tenant's.

A dispute names only its charge, and a webhook looks at the books of one tenant. So a report is kept where the provider's name
leads, and handed over once a day, also after a person has corrected whose a charge is.
"""

from __future__ import annotations

from dataclasses import asdict, replace

from sqlalchemy import select, text
from sqlalchemy.exc import NoResultFound, OperationalError
from sqlalchemy.orm import Session

from idempotency.application import runtime_of

from . import app
from .models import Dispute, Payment, PaymentEvent
from .once import insert_unless_there
from .reports import STRIPE
from .settlement import as_report, lock_charge, note_dispute

# Disputes that are not noted, or not as the payment's that has their charge; and the tenants that have been told of them.
_ASTRAY = text(f"""
SELECT p.tenant, p.id AS payment, e.object_id AS id, e.charge_id, array_agg(DISTINCT e.tenant) || p.tenant::text AS tenants
FROM payment_events e JOIN payments p ON p.gateway = e.gateway AND p.charge_id = e.charge_id
WHERE e.object = 'dispute' AND e.gateway = '{STRIPE}'
GROUP BY 1, 2, 3, 4
HAVING bool_or(NOT e.is_applied) OR NOT EXISTS (
    SELECT FROM disputes d WHERE (d.tenant, d.gateway, d.id, d.payment_id) = (p.tenant, '{STRIPE}', e.object_id, p.id)
) OR EXISTS (SELECT FROM disputes d WHERE (d.gateway, d.id) = ('{STRIPE}', e.object_id) AND d.tenant <> p.tenant)
""")
# Those that are noted as a payment's which has lost their charge, that no other payment has and no report has named it for.
_WITHOUT_CHARGE = text(f"""
SELECT NULL AS payment, d.id, min(e.charge_id) AS charge_id, array_agg(DISTINCT e.tenant) AS tenants
FROM disputes d JOIN payment_events e ON (e.gateway, e.object, e.object_id) = (d.gateway, 'dispute', d.id)
WHERE d.gateway = '{STRIPE}'
  AND NOT EXISTS (SELECT FROM payments p WHERE (p.gateway, p.charge_id) = (e.gateway, e.charge_id))
GROUP BY d.tenant, d.id, d.payment_id
HAVING NOT bool_or((e.tenant, e.payment_id) IS NOT DISTINCT FROM (d.tenant, d.payment_id))
""")


def hand_over() -> list[str]:
    """Note each dispute as one of the payment that has its charge by now. Returns what could not be done.

    Charges and refunds need no handing over: each is a difference, with a dead letter.
    """
    with Session(runtime_of(app).engine) as session:
        astray, without_charge = session.execute(_ASTRAY).all(), session.execute(_WITHOUT_CHARGE).all()
    failed = []
    for row in [*astray, *without_charge]:
        try:
            with runtime_of(app).transaction(*row.tenants) as connection, Session(connection) as session:
                if row.payment is None:
                    forget(session, row.id, row.charge_id)
                else:
                    assign(session, row.id, row.charge_id, (row.tenant, row.payment))
                session.flush()
        except (OperationalError, NoResultFound) as error:  # another holds the charge, or has changed it just now
            failed.append(f"dispute {row.id}: {type(error).__name__}")
    return failed


def assign(session: Session, id: str, charge_id: str, payment: tuple[str, str]) -> None:
    """Note a dispute of Stripe's, with all that was reported of it, as one of this payment's (tenant, id), and of no other's.

    `session` sees all tenants that have been told of it. Raises `OperationalError` if another holds its charge for too long, and `NoResultFound` if the payment is gone.
    """
    lock_charge(session, STRIPE, charge_id)
    its = session.get_one(Payment, payment, with_for_update=True)
    for noted in session.scalars(select(Dispute).filter_by(gateway=STRIPE, id=id)).all():
        if (noted.tenant, noted.payment_id) != payment:
            session.delete(noted)
    session.flush()
    of_dispute = select(PaymentEvent).filter_by(gateway=STRIPE, object="dispute", object_id=id)
    for event in session.scalars(of_dispute.order_by(PaymentEvent.occurred_at, PaymentEvent.received_at)).all():
        report = replace(as_report(event), tenant=its.tenant)
        insert_unless_there(session, PaymentEvent, asdict(report))
        note_dispute(session, its, report)
    for event in session.scalars(of_dispute):
        event.is_applied = True


def forget(session: Session, id: str, charge_id: str) -> None:
    """Take back the note of a dispute whose charge no payment has any more; what was reported of it waits."""
    lock_charge(session, STRIPE, charge_id)
    for noted in session.scalars(select(Dispute).filter_by(gateway=STRIPE, id=id)).all():
        session.delete(noted)
    for event in session.scalars(select(PaymentEvent).filter_by(gateway=STRIPE, object="dispute", object_id=id)):
        event.is_applied = False
