"""The examples of docs/traces.md."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from celery import Celery

from tests.sagas.conftest import Stage
from tests.support import bank as b
from tests.support.collector import collecting
from tests.support.documents import ROOT, python_blocks
from tests.support.spans import Spans, id_of, parent_of

SET_UP, IN_TRACE_OF = python_blocks("docs/traces.md")
USE = """
set_up()
trace.get_tracer("yourapp").start_span("made by the example").end()
worker_process_shutdown.send(sender=None)
"""


@pytest.mark.long
def test_the_function_of_the_page_exports_and_flushes_when_a_child_ends() -> None:
    with collecting() as collector:
        done = subprocess.run(
            [sys.executable, "-c", SET_UP + USE + "import os; os._exit(0)"],
            cwd=ROOT,
            env=os.environ | collector.environment("shop") | {"OTEL_BSP_SCHEDULE_DELAY": "60000"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert [(span.service, span.name) for span in collector.spans] == [("shop", "made by the example")]


def test_what_is_in_the_trace_of_an_operation(stage: Stage, spans: Spans, bank: Celery) -> None:
    stage.enqueue(b.deposit, "p1")
    stage.run()
    seen: list[str] = []
    example = IN_TRACE_OF.replace("payments.capture", b.deposit.name)
    exec(example, {"app": bank, "tenant": "default", "payment_id": "p1", "report": "r", "settle": seen.append})
    assert seen == ["r"]
    processed = spans.one(f"process {bank.conf.task_default_queue}")
    assert parent_of(spans.one("payment webhook")) == id_of(processed)
