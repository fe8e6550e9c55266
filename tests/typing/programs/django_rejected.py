"""What a type checker refuses in a Django project."""

from __future__ import annotations

from idempotency.contrib.django import IdempotentTask, idempotent_task


@idempotent_task(key="{order_id}")
def capture(self: IdempotentTask, order_id: int, cents: int = 1) -> dict[str, str]:
    return {"order": str(order_id)}


def call() -> None:
    capture.enqueue()  # E: call-arg reportCallIssue
    capture.enqueue(order=17)  # E: call-arg reportCallIssue
    capture.enqueue("17")  # E: arg-type reportArgumentType
    capture.enqueue(17, 5, "more")  # E: call-arg reportCallIssue
    text: str = capture.enqueue(17).result(5)  # E: assignment reportAssignmentType
    capture.delay(text)  # E: arg-type reportArgumentType
    capture.delay_on_commit("17")  # E: arg-type reportArgumentType
