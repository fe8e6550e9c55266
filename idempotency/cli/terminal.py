"""What all commands share: the application, the operator's token, signals, and how answers are printed."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from celery import Celery
from celery.app.utils import find_app
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from ..environment import environment
from ..errors import IdempotencyError
from ..observe.logs import keep_lines_whole

# A table of so many columns is readable with folded cells.
FOLDED = 3
# Columns, for whatever reads a pipe or a file: there, a row is a line.
UNFOLDED = 10_000
console = Console() if sys.stdout.isatty() else Console(width=UNFOLDED)
errors = Console(stderr=True)
_NAME_IT = "name your Celery application with -A, or in CELERY_APP"


def application(name: str) -> Celery:
    """Find the Celery application of this name. Raises `IdempotencyError`, also without a name."""
    if not name:
        raise IdempotencyError(f"no application: {_NAME_IT}")
    try:
        app = find_app(name)
        if app._fixups:  # of Django, whose settings and ours are there once it is set up, as a worker does
            app.loader.import_default_modules()
        return app
    except (ImportError, AttributeError) as error:
        module, colon, attribute = name.partition(":")
        absent = isinstance(error, ModuleNotFoundError) and error.name == name and module in sys.modules
        why = f"the module {module} has no {attribute!r}" if colon and absent else error
        # of the application's own code, which was found: where it fails says more than how it is named
        frames = [] if absent else traceback.extract_tb(error.__traceback__)
        places = [f"{each.filename}:{each.lineno}" for each in frames if each.name == "<module>"]
        if places:
            raise IdempotencyError(f"--app {name}: {why} ({places[-1]})") from None
        raise IdempotencyError(f"--app {name}: {why}; {_NAME_IT}") from None


def task_named(app: Celery, name: str | None) -> str | None:
    """The task that a filter means, by its name or the part of it after a dot.

    A name that the application does not know is left as it is: it may be the name of a task of the past. Raises
    `IdempotencyError` if several tasks end in it.
    """
    if name is None:
        return None
    app.loader.import_default_modules()
    if name in app.tasks:
        return name
    found = sorted(known for known in app.tasks if known.endswith(f".{name}"))
    if len(found) > 1:
        raise IdempotencyError(f"--task {name}: several tasks end in it: {', '.join(found)}")
    return found[0] if found else name


def check_known(app: Celery, name: str | None, what: str) -> None:
    """Say that a task does not exist, once nothing was found under its name. Raises `IdempotencyError`."""
    if name is not None and name not in app.tasks:
        raise IdempotencyError(f"--task {name}: no {what} matches, and the application has no such task")


def print_json(document: Any) -> None:
    """Print one JSON document on stdout; times are ISO 8601."""
    print(json.dumps(document, default=_as_text))  # noqa: T201


def print_line(text: str) -> None:
    """Print a line of plain text, which may have names in it that others have chosen; as long as it is."""
    console.print(plain(text), markup=False, highlight=False, soft_wrap=True)


def print_table(*columns: str, rows: Iterable[Iterable[Any]], title: str | None = None) -> None:
    """Print a table of plain text: no markup is interpreted and no control character reaches the terminal.

    Of a table that is too wide for the terminal, each row is printed on its own, with a line for each column. Without rows, a
    line says so.
    """
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    cells = [[cell if hasattr(cell, "__rich_console__") else Text(plain(cell)) for cell in row] for row in rows]
    if not cells:
        print_line(f"{title}: none" if title else "none")
        return
    for row in cells:
        table.add_row(*row)
    if len(columns) <= FOLDED or _width(table) <= console.width:
        console.print(table)
        return
    for number, row in enumerate(cells, 1):
        console.rule(f"{title or 'row'} {number} of {len(cells)}", align="left", characters="─")
        one = Table.grid(padding=(0, 2))
        for column, cell in zip(columns, row, strict=True):
            one.add_row(Text(column), cell)
        console.print(one)


def _width(table: Table) -> int:
    """How wide a table is that nothing folds."""
    return Measurement.get(console, console.options.update(max_width=UNFOLDED), table).maximum


def plain(value: Any) -> str:
    """Write a value as one line for a person."""
    if value is None:
        return ""
    if hasattr(value, "strftime"):
        return f"{value:%F %T%z}"
    if isinstance(value, dict):
        value = json.dumps(value, default=_as_text)
    return "".join(character if character.isprintable() else "\ufffd" for character in str(value))


def _as_text(value: Any) -> str:
    return str(value.isoformat() if hasattr(value, "isoformat") else value)


def log_to_stderr() -> None:
    """Write the logs of a command that runs until it is stopped, a line each."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    keep_lines_whole(logging.getLogger())


def stopped_by_signals() -> threading.Event:
    """An event that SIGTERM and SIGINT set, for a command that runs until it is stopped.

    A thread sets it, which the interpreter wakes through a socket. Handlers run in the main thread alone, and a main thread that
    waits for a lock, as in `stop.wait()`, sleeps on when the kernel has given the signal to another thread.
    """
    stop, names = threading.Event(), (signal.SIGTERM, signal.SIGINT)
    asked, asking = socket.socketpair()
    asking.setblocking(False)  # as set_wakeup_fd wants it

    def set_when_asked() -> None:
        with asked, asking:  # kept as long as the interpreter writes to one of them
            while received := asked.recv(1024):  # a byte for each signal
                if not {*names}.isdisjoint(received):
                    stop.set()

    def ask(number: int, _frame: object) -> None:
        with suppress(OSError):  # once more than the interpreter, from which an event loop may have taken the socket
            asking.send(bytes((number,)))

    def forget() -> None:
        if (
            signal.getsignal(signal.SIGTERM) is ask
        ):  # a process that was forked has no such thread, and not to stop this one
            signal.set_wakeup_fd(-1)
            for name in names:
                signal.signal(name, signal.SIG_DFL)

    threading.Thread(target=set_when_asked, name="stopped-by-signals", daemon=True).start()
    os.register_at_fork(after_in_child=forget)
    for name in names:
        signal.signal(name, ask)
    signal.set_wakeup_fd(asking.fileno())
    return stop


def operators_token() -> str | None:
    """The operator's token from the environment, if one is set."""
    token = environment().token
    return None if token is None else token.get_secret_value()
