"""Rows of the application on the timeline of an operation: which ones belong to it, a function of the application says.

It is called with a session that can only read, each statement of which is ended after a while. Whatever becomes of it, the page
is shown: a function that fails or is slow is a sentence there. Nothing of Starlette is imported here: an application imports
`BusinessRow` wherever its models are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from importlib import import_module
from itertools import islice
from threading import BoundedSemaphore
from typing import Any, TypeAlias

from sqlalchemy import Connection, event
from sqlalchemy.orm import Session

from ..attempt.exits import exits_are_errors
from ..attempt.threads import DaemonThreads
from ..errors import SettingsError
from ..observe.logs import log
from ..settings import Settings
from ..store.connections import make_engine

# The most rows of an operation that are shown.
MOST = 50
# Milliseconds for each statement, and seconds for which the page waits for all of them.
STATEMENT, PATIENCE = 2_000, 4.0
# Functions that run at the same time; while all do, further operations are shown without their rows.
AT_ONCE = 4
# What is kept as it is; anything else becomes text at once, while its session is open.
_PLAIN = (str, int, float, Decimal, date, type(None))


@dataclass(frozen=True, slots=True)
class Described:
    """An operation, as the application's function is given it. `arguments`: by name, as far as its message is kept and can be read."""

    tenant: str
    task: str
    key: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BusinessRow:
    """A row of the application. Everybody who may see the operation sees `title`, `at` and the names of the fields.

    Values of `fields` are shown to those who reveal the operation. `at`: when it was written, with a time zone; None: not known.
    """

    title: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    at: datetime | None = None


RowsOf: TypeAlias = Callable[[Session, Described], Iterable[BusinessRow]]


@dataclass(frozen=True, slots=True)
class Found:
    """The rows of an operation; `why` they are not all there, as a sentence, or None."""

    rows: tuple[BusinessRow, ...] = ()
    why: str | None = None


class BusinessRows:
    """Asks the application's function, in threads of its own, on connections of its own."""

    def __init__(self, settings: Settings) -> None:
        self._rows_of = _imported(settings.business_rows)
        self._threads = DaemonThreads(AT_ONCE, "business-rows")
        self._free = BoundedSemaphore(AT_ONCE)
        self._engine = make_engine(
            settings,
            session={
                "default_transaction_read_only": "on",
                "statement_timeout": STATEMENT,
                "idle_in_transaction_session_timeout": int(PATIENCE * 2000),
            },
        )
        event.listen(self._engine, "begin", _only_read)

    def close(self) -> None:
        """Close its connections, and wait for nothing."""
        self._threads.shutdown()
        self._engine.dispose()

    def of(self, operation: Described) -> Found | None:
        """The rows of an operation; None: the application has named no function."""
        if self._rows_of is None:
            return None
        if not self._free.acquire(blocking=False):  # nobody waits for a function that may never end
            return Found(why="The application's rows are not shown: its function is still busy with other operations.")
        asked = self._threads.submit(self._ask, self._rows_of, operation)
        asked.add_done_callback(lambda _: self._free.release())
        try:
            rows = asked.result(PATIENCE)
        except NotInTime:
            log.warning("business_rows_slow", task=operation.task, key=operation.key)
            return Found(
                why=f"The application's rows are not shown: its function did not answer within {PATIENCE:g} s."
            )
        except Exception as error:  # the application's own, or of its statements: of its text nothing is known
            log.warning("business_rows_failed", task=operation.task, key=operation.key, error=type(error).__name__)
            return Found(why=f"The application's rows are not shown: its function raised {type(error).__name__}.")
        if len(rows) > MOST:
            return Found(rows[:MOST], f"The first {MOST} of the application's rows are shown; there are more.")
        return Found(rows)

    def _ask(self, rows_of: RowsOf, operation: Described) -> tuple[BusinessRow, ...]:
        began = time.monotonic()
        with exits_are_errors(), self._engine.connect() as connection, Session(bind=connection) as session:
            rows = []
            for row in islice(rows_of(session, operation), MOST + 1):
                if not isinstance(row, BusinessRow):
                    raise TypeError("not a BusinessRow")
                if row.at is not None and row.at.tzinfo is None:
                    raise ValueError("a time without a zone")
                if time.monotonic() - began > PATIENCE:
                    raise TimeoutError
                rows.append(_plain(row))
            session.rollback()
        return tuple(rows)


def _only_read(connection: Connection) -> None:
    """Of each transaction: once it has read something, it cannot be made to write. The driver's own connection is not watched."""
    connection.exec_driver_sql("SET TRANSACTION READ ONLY")
    connection.exec_driver_sql("SELECT 1")


def _plain(row: BusinessRow) -> BusinessRow:
    """The same row, with nothing in it that could fail or change when it is shown."""
    fields = {str(name): _shown(value) for name, value in dict(row.fields).items()}
    return BusinessRow(str(row.title), fields, None if row.at is None else row.at.astimezone(UTC))


def _shown(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        return {str(name): _shown(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(each) for each in value]
    return str(value)


def _imported(name: str | None) -> RowsOf | None:
    """The function of this name. Raises `SettingsError`."""
    if name is None:
        return None
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise SettingsError(f"idempotency_business_rows: {name}: {error}") from None
    if not callable(found):
        raise SettingsError(f"idempotency_business_rows: {name}: is no function")
    return found  # type: ignore[no-any-return]
