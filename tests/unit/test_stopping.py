"""A command that runs until it is stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing import get_context

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


@pytest.mark.usefixtures("_handlers")
@pytest.mark.timeout(20)
def test_a_child_that_is_terminated_does_not_stop_its_parent() -> None:
    """The child inherits the descriptor, and would write into the socket of both."""
    stop = stopped_by_signals()
    child = get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    time.sleep(0.3)
    child.terminate()  # as `multiprocessing.Pool` does when it is left
    child.join()
    assert child.exitcode == -signal.SIGTERM
    assert not stop.wait(0.5)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.wait(5)


@pytest.mark.usefixtures("_handlers")
@pytest.mark.timeout(20)
def test_an_event_loop_in_the_same_thread_leaves_the_signals() -> None:
    """A loop that has had a handler of any signal leaves the process without a descriptor."""
    stop = stopped_by_signals()

    async def body() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, print)

    asyncio.run(body())
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.wait(5)
