"""Notifications: one e-mail per event, its row and its message committed with what it tells about."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from idempotency import IdempotentTask, Operation, PermanentError

from . import app
from .models import Notification, Payment
from .outside import mailer


def notify(session: Session, event_type: str, reference: str, payment: Payment) -> None:
    """Tell the customer of a payment about an event; leaves with the caller's commit."""
    event = f"{event_type}:{reference}"
    session.add(
        Notification(
            event=event,
            recipient=f"customer-{payment.customer_id}@customers.example",
            subject=f"{event_type} {reference}",
            body=f"{event_type} {reference}, purchase {payment.id}\n",
        )
    )
    send_notification.enqueue(session, event=event)


def notification_failed(session: Session, operation: Operation, error: PermanentError) -> None:
    notification = session.get(Notification, operation.key, with_for_update=True)
    if notification is not None:
        notification.status, notification.failure = "failed", error.code


@app.task(
    base=IdempotentTask, bind=True, name="notifications.send_notification", key="{event}", on_failed=notification_failed
)
def send_notification(self: IdempotentTask, event: str) -> dict[str, Any]:
    """Send the e-mail of an event. SMTP knows no keys: a repeated call repeats the Message-ID."""
    notification = self.session.get(Notification, event)
    if notification is None:
        raise PermanentError(f"notification {event}: unknown", "notification_unknown")
    recipient, subject, body = notification.recipient, notification.subject, notification.body
    self.session.rollback()

    sent = self.effect("mail", mailer.send, recipient, subject, body)

    notification = self.session.get_one(Notification, event)
    notification.status, notification.message_id = "sent", sent["message_id"]
    return {"message_id": sent["message_id"]}
