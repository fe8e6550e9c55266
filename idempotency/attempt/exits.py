"""`sys.exit` in the application's own code: an error like any other, unless a signal has told the process to end."""

from __future__ import annotations

import threading
from asyncio import CancelledError
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

# What `except Exception` lets through, and code may raise by itself.
_EXITS = (SystemExit, KeyboardInterrupt, CancelledError)


class Exited(Exception):
    """The application's own code has raised what ends a process: it would end with everything else that it has at hand."""


@contextmanager
def exits_are_errors() -> Iterator[None]:
    """Within the block, `sys.exit` is an error like any other. Raises `Exited`, and what a signal has raised as it is."""
    try:
        yield
    except _EXITS as error:
        if _is_by_signal(error):
            raise
        raise Exited(f"{type(error).__name__}: {error}".removesuffix(": ")) from error


def _is_by_signal(error: BaseException) -> bool:
    """Whether a handler of a signal has raised it: only the main thread runs these. That of Ctrl-C has no frame of its own."""
    if threading.current_thread() is not threading.main_thread():
        return False
    return isinstance(error, KeyboardInterrupt) or any(map(_is_handler, _frames(error.__traceback__)))


def _frames(traceback: TracebackType | None) -> Iterator[FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _is_handler(frame: FrameType) -> bool:
    """Whether it was given the frame that it has interrupted. By now another handler may be set, as billiard does before it exits."""
    for value in frame.f_locals.values():
        given = value if isinstance(value, tuple) else (value,)
        if frame.f_back is not None and any(each is frame.f_back for each in given):
            return True
    return False
