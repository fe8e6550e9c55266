"""Setting a process's tracer up never keeps its work from going on."""

from __future__ import annotations

import threading

import pytest

from idempotency.observe import traces as observed
from idempotency.observe.traces import Traces


def test_a_set_up_that_sends_a_task_does_not_wait_for_itself() -> None:
    made: list[bool] = []

    def set_up() -> None:
        with traces.span("send", "producer"):  # as `delay` does
            made.append(True)

    traces = Traces(set_up)
    attempt = threading.Thread(target=lambda: traces.open("process q", "consumer").end(), daemon=True)
    attempt.start()
    attempt.join(30)
    assert (attempt.is_alive(), made) == (False, [True])
    traces.open("process q", "consumer").end()
    assert made == [True], "once"


def test_an_attempt_waits_for_a_set_up_that_hangs_only_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observed, "PATIENCE", 0.1)
    begun, end = threading.Event(), threading.Event()

    def set_up() -> None:
        begun.set()
        end.wait(60)

    traces = Traces(set_up)
    first = threading.Thread(target=lambda: traces.open("process q", "consumer").end(), daemon=True)
    first.start()
    assert begun.wait(30)
    other = threading.Thread(target=lambda: traces.open("process q", "consumer").end(), daemon=True)
    other.start()
    other.join(30)
    assert (other.is_alive(), first.is_alive()) == (False, True)
    end.set()
    first.join(30)
    assert not first.is_alive()
