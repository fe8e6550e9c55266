"""The library's log: key=value lines through the standard `logging`, as logger "idempotency".

Only state changes are logged, with task, key, fence and attempt where they apply; never arguments or results.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

from ..text import one_line, without_values

# These come first, and are left out where they do not apply.
_FIRST = ("event", "task", "key", "fence", "attempt")


class KeyValueLog:
    """Writes an event and its fields as one line in logfmt: `log.warning("fenced", task=..., key=...)`."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def info(self, event: str, **fields: object) -> None:
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, **fields: object) -> None:
        self._write(logging.ERROR, event, fields)

    def exception(self, event: str, **fields: object) -> None:
        """An error with the traceback of the exception that is being handled, in the same line."""
        self._write(logging.ERROR, event, fields | {"exception": traceback.format_exc().rstrip()})

    def _write(self, level: int, event: str, fields: Mapping[str, object]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, " ".join(_pairs({"event": event, **fields})), stacklevel=3)


def _pairs(fields: Mapping[str, object]) -> Iterator[str]:
    yield from (f"{name}={_text(fields[name])}" for name in _FIRST if fields.get(name) is not None)
    yield from (f"{name}={_text(value)}" for name, value in fields.items() if name not in _FIRST)


def _text(value: object) -> str:
    """A value in logfmt: quoted if it has spaces, quotes or equals signs, and always on one line."""
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
    text = without_values(str(value))
    if any(character in text for character in ' ="'):
        text = text.replace("\\", "\\\\").replace('"', '\\"')
        text = f'"{text}"'
    return one_line(text)


class WholeLines(logging.Filter):
    """Keeps what others log, Celery above all, from looking like more lines than it is, and free of the values of rows.

    Task ids, names of hosts and texts of errors come from messages. What is formatted into a line is escaped, and a
    traceback is indented, so that no line of it begins as a line of the log does.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, Mapping):
            record.args = {name: _quiet(value) for name, value in record.args.items()}
        elif record.args:
            record.args = tuple(_quiet(value) for value in record.args)
        if isinstance(record.exc_info, tuple) and record.exc_info[0] is not None and not record.exc_text:
            said = without_values("".join(traceback.format_exception(*record.exc_info)).rstrip("\n"))
            record.exc_text = "\n".join(f"    {one_line(line)}" for line in said.split("\n"))
        return True


class _Quiet:
    """A value that is formatted as one line."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        return one_line(without_values(str(self._value)))

    def __repr__(self) -> str:
        return one_line(without_values(repr(self._value)))


def _quiet(value: Any) -> Any:
    if isinstance(value, str):
        return one_line(without_values(value))
    return value if isinstance(value, int | float | None) else _Quiet(value)


_WHOLE_LINES = WholeLines()


def keep_lines_whole(logger: logging.Logger, **_: Any) -> None:
    """Guard the handlers of a logger. In Celery's processes, those that Celery has made; others are the application's."""
    for handler in logger.handlers:
        handler.addFilter(_WHOLE_LINES)


log = KeyValueLog(logging.getLogger("idempotency"))
