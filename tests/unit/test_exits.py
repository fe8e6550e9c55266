"""`sys.exit` in the application's code is its error; in a handler of a signal, it ends the process."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from asyncio import CancelledError
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from billiard import common

from idempotency.attempt.exits import Exited, exits_are_errors


def exit_in_a_handler(signum: int, frame: Any) -> None:
    signal.signal(signum, signal.SIG_DFL)  # as billiard does, so that nothing leads back to this handler
    sys.exit(3)


def exit_by_any_arguments(*given: Any) -> None:
    sys.exit(3)


def get(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    time.sleep(5.0)


@pytest.fixture(params=[exit_in_a_handler, exit_by_any_arguments, common._shutdown_cleanup])
def handler(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, request.param)
    yield request.param
    signal.signal(signal.SIGTERM, before)
    common._should_have_exited[0] = False


@pytest.mark.parametrize("error", [SystemExit(3), SystemExit(), CancelledError()])
def test_what_code_raises_by_itself_is_an_error(error: BaseException) -> None:
    with pytest.raises(Exited, match=type(error).__name__) as raised, exits_are_errors():
        raise error
    assert raised.value.__cause__ is error


def test_the_handler_of_a_signal_ends_the_process_still(handler: Callable[..., Any]) -> None:
    with pytest.raises(SystemExit), exits_are_errors():
        get(signal.SIGTERM)


def test_in_a_thread_neither_is_of_a_signal() -> None:
    """Signals are handled in the main thread alone."""
    found: list[BaseException] = []

    def run() -> None:
        for error in (KeyboardInterrupt(), SystemExit(3)):
            try:
                with exits_are_errors():
                    raise error
            except BaseException as raised:
                found.append(raised)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert [type(each) for each in found] == [Exited, Exited]


def test_ctrl_c_is_no_error() -> None:
    # what a shell starts in the background ignores it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), exits_are_errors():
            get(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
