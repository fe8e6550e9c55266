"""What a type checker refuses: each line would be a message that no worker can run, or a result of another type."""

from __future__ import annotations

from celery import Celery
from sqlalchemy.orm import Session

from idempotency import IdempotentTask, idempotent_task

app = Celery("shop")


def reserve(session: Session, payment_id: str) -> int:
    return 1


def charge(payment_id: str, *, idempotency_key: str) -> str:
    return payment_id


@idempotent_task(app, key="{payment_id}")
def capture(self: IdempotentTask, payment_id: str, amount: int = 1) -> dict[str, str]:
    self.step("reserve", reserve)  # E: arg-type reportCallIssue
    self.step("reserve", reserve, 17)  # E: call-overload reportArgumentType
    amount = self.step("reserve", reserve, "p1", payment="p1")  # E: call-arg reportCallIssue
    text: str = self.step("reserve", reserve, payment_id)  # E: assignment reportAssignmentType
    number: int = self.effect("charge", charge, payment_id)  # E: assignment reportAssignmentType
    self.effect("charge", "charge", payment_id)  # E: arg-type reportArgumentType
    return {text: str(number + amount)}


@idempotent_task(app, key="{payment_id}")  # E: arg-type reportArgumentType
def ship(payment_id: str) -> None: ...  # its first parameter is not the task


def call(session: Session) -> None:
    capture.enqueue(session)  # E: call-arg reportCallIssue
    capture.enqueue(session, payment="p1")  # E: call-arg reportCallIssue
    capture.enqueue(session, payment_id=17)  # E: arg-type reportArgumentType
    capture.enqueue(session, "p1", 5, "more")  # E: call-arg reportCallIssue
    capture.enqueue("p1")  # E: call-arg reportCallIssue
    capture.enqueue(payment_id="p1")  # E: call-arg reportCallIssue
    capture.using(countdwn=60)  # E: call-arg reportCallIssue
    capture.using(countdown=60).enqueue(session, payment_id=17)  # E: arg-type reportArgumentType
    capture.delay(payment="p1")  # E: call-arg reportCallIssue
    capture.delay(17)  # E: arg-type reportArgumentType
    capture("p1", amount="5")  # E: arg-type reportArgumentType
    text: str = capture.enqueue(session, "p1").result(5)  # E: assignment reportAssignmentType
    number: int = capture("p1")  # E: assignment reportAssignmentType
    capture.using(queue=text, priority=number)
