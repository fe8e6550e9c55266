"""The library's log: key=value lines through the standard `logging`, as logger "idempotency".

Only state changes are logged, with task, key, fence and attempt where they apply; never arguments or results.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator, Mapping

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
    text = str(value)
    if any(character in text for character in ' ="'):
        text = text.replace("\\", "\\\\").replace('"', '\\"')
        text = f'"{text}"'
    return text.replace("\n", "\\n")


log = KeyValueLog(logging.getLogger("idempotency"))
