"""The test application with a real tracing tool, for processes of its own: the tools patch Celery for good.

TRACER=sentry celery -A tests.support.traced worker
TRACER=sentry python -m tests.support.traced ACCOUNT FAILS [ID]    # calls both ways in a span, and prints its trace
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from sqlalchemy.orm import Session

from idempotency import IdempotentTask
from idempotency.application import runtime_of
from tests.support.bank import INSERT, app

# How a tool begins a span, and the trace of the current one.
Tool = tuple[Callable[[], AbstractContextManager[Any]], Callable[[], str]]


def sentry() -> Tool:
    import sentry_sdk
    from sentry_sdk.integrations.celery import CeleryIntegration
    from sentry_sdk.transport import Transport

    class Nowhere(Transport):
        def capture_envelope(self, envelope: Any) -> None: ...

    sentry_sdk.init(
        dsn="http://key@127.0.0.1:9/1",
        transport=Nowhere,
        traces_sample_rate=1.0,
        default_integrations=False,
        auto_enabling_integrations=False,
        integrations=[CeleryIntegration()],
    )

    def current() -> str:
        span = sentry_sdk.get_current_span()
        return span.trace_id if span is not None else "none"

    return lambda: sentry_sdk.start_transaction(name="request"), current


def opentelemetry() -> Tool:
    from opentelemetry import trace
    from opentelemetry.instrumentation.celery import CeleryInstrumentor
    from opentelemetry.sdk.trace import TracerProvider

    trace.set_tracer_provider(TracerProvider())
    CeleryInstrumentor().instrument()  # type: ignore[no-untyped-call]
    tracer = trace.get_tracer("tests")
    return lambda: tracer.start_as_current_span(
        "request"
    ), lambda: f"{trace.get_current_span().get_span_context().trace_id:032x}"


TOOLS: dict[str, Callable[[], Tool]] = {"sentry": sentry, "opentelemetry": opentelemetry}


@app.task(base=IdempotentTask, bind=True, key="{account}")
def traced(self: IdempotentTask, account: str, fails: int = 0) -> str:
    """Leaves a row for the trace that each attempt runs in."""
    with runtime_of(app).autocommit() as connection:
        connection.execute(INSERT, {"account": f"{account} {current_trace()}", "amount": 1})
    if self.request.retries < fails:
        raise self.retry(countdown=0)
    return str(self.request.headers.get("x-request-id"))


def main(account: str, fails: int, task_id: str | None = None) -> None:
    headers = {"x-request-id": "r-1"}
    with begin():
        with Session(runtime_of(app).engine) as session, session.begin():
            traced.enqueue(session, account, fails, headers=headers)
        trace = current_trace()
        traced.apply_async((f"sent-{account}", fails), headers=headers, task_id=task_id)
        assert trace == current_trace()  # what a call has begun has ended with it
    print(trace)  # noqa: T201


if __name__ == "__main__":
    from tests.support import traced as module  # by the name that its task has in the worker

    module.main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
elif "TRACER" in os.environ:
    begin, current_trace = TOOLS[os.environ["TRACER"]]()
