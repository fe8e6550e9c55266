"""Each asserts the bad outcome."""

from __future__ import annotations

import threading
from typing import Any

from idempotency.observe.traces import Traces


def test_a_set_up_that_sends_a_task_hangs_the_process() -> None:
    """`_made` calls it with a lock that is no RLock: what it opens of ours waits for it, for ever, and so does every attempt after."""
    made: list[Any] = []

    def set_up() -> None:
        with traces.span("send", "producer"):  # as `delay` does
            made.append(1)

    traces = Traces(set_up)
    attempt = threading.Thread(target=lambda: traces.open("process q", "consumer").end(), daemon=True)
    attempt.start()
    attempt.join(5)
    assert attempt.is_alive()
    other = threading.Thread(target=lambda: traces.open("process q", "consumer").end(), daemon=True)
    other.start()
    other.join(2)
    assert other.is_alive(), "nor does any other attempt of the process go on"
