"""The bank with OpenTelemetry's own instrumentation of Celery beside our spans, for processes of their own.

celery -A tests.support.instrumented worker
python -m tests.support.instrumented ACCOUNT     # calls a task both ways in a span
"""

from __future__ import annotations

import sys
from typing import Any

from celery.signals import worker_process_init
from sqlalchemy.orm import Session

from idempotency.application import runtime_of
from tests.support import telemetry
from tests.support.bank import app, deposit


@worker_process_init.connect(weak=False)
def set_up(**_: Any) -> None:
    """As its documentation says, in each child of the pool. Our own setting is left at its default."""
    from opentelemetry.instrumentation.celery import CeleryInstrumentor

    telemetry.set_up()
    CeleryInstrumentor().instrument()  # type: ignore[no-untyped-call]


def main(account: str) -> None:
    from opentelemetry import trace

    set_up()
    with trace.get_tracer("tests").start_as_current_span("request"):
        with Session(runtime_of(app).engine) as session, session.begin():
            deposit.enqueue(session, account)
        deposit.delay(f"sent-{account}")


if __name__ == "__main__":
    main(sys.argv[1])
