"""A command that runs until it is stopped."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from idempotency.cli.terminal import stopped_by_signals


@pytest.fixture
def _handlers() -> Iterator[None]:
    before = {name: signal.getsignal(name) for name in (signal.SIGTERM, signal.SIGINT)}
    yield
    for name, handler in before.items():
        signal.signal(name, handler)
    signal.set_wakeup_fd(-1)


@pytest.mark.usefixtures("_handlers")
@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_middle_of_a_wait_stops_it(name: signal.Signals) -> None:
    stop = stopped_by_signals()
    with stop._cond:  # type: ignore[attr-defined]  # as `stop.wait()` holds it before it sleeps
        os.kill(os.getpid(), name)
    assert stop.wait(10)


@pytest.mark.usefixtures("_handlers")
@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_another_thread_takes_ends_a_wait_without_a_limit(name: signal.Signals) -> None:
    stop = stopped_by_signals()

    def take() -> None:
        time.sleep(0.2)  # the main thread waits by then
        signal.pthread_kill(threading.get_ident(), name)
        time.sleep(0.1)  # which runs the interpreter's own handler, in this thread

    thread = threading.Thread(target=take)
    thread.start()
    stop.wait()
    thread.join()
