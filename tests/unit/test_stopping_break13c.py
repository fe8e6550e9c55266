"""Proofs of a second reader: what the socket of `stopped_by_signals` does in processes that were forked."""

from __future__ import annotations

import os
import signal
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
def test_a_child_that_is_terminated_stops_its_parent() -> None:
    """The child inherits the descriptor: a SIGTERM to it alone is a byte in the socket of both."""
    stop = stopped_by_signals()
    child = get_context("fork").Process(target=time.sleep, args=(3,))
    child.start()
    time.sleep(0.3)
    child.terminate()  # as `multiprocessing.Pool` does when it is left
    assert stop.wait(2)  # nobody has asked the parent to stop
    os.kill(child.pid or 0, signal.SIGKILL)
    child.join()


@pytest.mark.usefixtures("_handlers")
@pytest.mark.timeout(20)
def test_asyncio_in_the_same_thread_takes_the_signals_away() -> None:
    """A loop that has had a handler of any signal leaves the process without a descriptor: no SIGTERM is heard any more."""
    import asyncio

    stop = stopped_by_signals()

    async def body() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, print)

    asyncio.run(body())
    os.kill(os.getpid(), signal.SIGTERM)
    assert not stop.wait(2)


@pytest.mark.usefixtures("_handlers")
@pytest.mark.timeout(20)
def test_the_second_of_a_process_leaves_the_first_unstopped() -> None:
    first, second = stopped_by_signals(), stopped_by_signals()
    os.kill(os.getpid(), signal.SIGTERM)
    assert second.wait(5)
    assert not first.wait(1)
