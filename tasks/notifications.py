"""Notifications: one e-mail per event that concerns a customer."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from idempotency import IdempotentTask, Operation, PermanentError, subscribe

from . import app
from .models import Notification
from .outside import mailer
from .templates import render
from .tenants import domain


def about(event: dict[str, Any]) -> tuple[str, str]:
    """What an event is about: its type, and the id of the return, refund or payment."""
    data = event["data"]
    return event["type"], data.get("return_id") or data.get("refund_id") or data["payment_id"]


def notification_failed(session: Session, operation: Operation, error: PermanentError) -> None:
    event = operation.arguments["event"]
    session.merge(
        Notification(
            tenant=operation.tenant,
            about=":".join(about(event)),
            event_id=event["id"],
            status="failed",
            failure=error.code,
        )
    )


@subscribe(
    "payment.captured",
    "payment.refunded",
    "return.labelled",
    "return.aborted",
    "return.cancelled",
    "return.escalated",
    "return.refunded",
    "return.rejected",
    consumer="notifications",
    app=app,
    on_failed=notification_failed,
)
def send_notification(self: IdempotentTask, event: dict[str, Any]) -> dict[str, Any]:
    """Send the e-mail about an event. SMTP has no idempotency keys, but a repeated call uses the same Message-ID."""
    subject = " ".join(about(event))
    recipient = f"customer-{event['data']['customer_id']}@{domain(self.tenant)}"
    body = f"{subject}, {_concerns(event['data'])}\n"

    sent: dict[str, Any] = self.effect("mail", send, recipient, subject, body)

    message_id = sent["message_id"]
    self.session.merge(
        Notification(
            tenant=self.tenant,
            about=":".join(about(event)),
            event_id=event["id"],
            status="sent",
            message_id=message_id,
            failure=None,
        )
    )
    return {"message_id": message_id}


def send(recipient: str, subject: str, summary: str, *, idempotency_key: str) -> dict[str, Any]:
    """Send it as text and HTML. The texts are no arguments of the effect: they may change between two attempts, by a deploy."""
    shop = recipient.rpartition("@")[2]
    text, html = render("notification", subject=subject, summary=summary.strip(), shop=shop)
    return mailer.send(recipient, subject, text, html, idempotency_key=idempotency_key)


def _concerns(data: dict[str, Any]) -> str:
    if "return_id" not in data:
        return f"purchase {data['payment_id']}"
    return ", ".join(f"{name} {data[name]}" for name in ("order_id", "label_id", "problem") if data.get(name))
