"""What all pages share: the application, connections that can only read, and how a change is made in a visitor's name."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar
from uuid import uuid4

from celery import Celery
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from starlette.requests import Request

from ..application import runtime_of
from ..attempt.endings import LOCK_NOT_AVAILABLE
from ..errors import ChangeRefused, IdempotencyError, NotAllowed, OperationNotFound
from ..operate.change import Change
from ..store import letter_pages, operation_pages
from ..store.connections import make_engine
from ..store.overview import TIMEOUT, Snapshot
from ..store.statements import describe, sqlstate
from ..store.sweeps import is_row_error
from ..upkeep.overview import ask_broker
from ..wire.keys import OperationId
from .access import Sessions, Visitor
from .business import BusinessRows
from .gate import Site
from .login import Login

T = TypeVar("T")
# Milliseconds for a page's statement.
STATEMENT = 5_000
# Seconds for which what the broker has said is shown.
FRESH = 4.0
# Seconds after which what was made is forgotten.
LONGEST_KEPT = 60.0
# Rows of a page.
ROWS = 50


class Desk:
    """Kept in `app.state.desk`."""

    def __init__(self, celery: Celery, sessions: Sessions, site: Site, login: Login | None) -> None:
        celery.loader.import_default_modules()
        self.celery, self.sessions, self.site, self.login = celery, sessions, site, login
        self.settings = runtime_of(celery).settings
        self._engine = make_engine(
            self.settings,
            session={
                # whatever a page does by mistake; the second behind a pooler, where the transaction has begun
                "default_transaction_read_only": "on",
                "transaction_read_only": "on",
                "statement_timeout": STATEMENT,
                "plan_cache_mode": "force_custom_plan",  # filters choose little or much
                "enable_seqscan": "off",
                "jit": "off",
            },
            isolation_level="AUTOCOMMIT",
        )
        self.business = BusinessRows(self.settings)
        self._kept: dict[Any, tuple[float, Any]] = {}
        self._making: dict[Any, threading.Lock] = {}
        self._failed: dict[Any, tuple[float, Exception]] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close its connections."""
        self._engine.dispose()
        self.business.close()

    @property
    def service(self) -> str:
        """The application whose operations are shown."""
        return self.settings.service

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A connection on which nothing can be written."""
        with self._engine.connect() as connection:
            yield connection

    def recent(self, name: Any, make: Callable[[], T], *, fresh: float = FRESH) -> T:
        """What `make` has returned in the last `fresh` seconds for this name, made by one request for all."""
        with self._lock:
            now = time.monotonic()
            for old in [each for each, (at, _) in self._kept.items() if now - at > LONGEST_KEPT]:
                del self._kept[old], self._making[old]
                self._failed.pop(old, None)
            making = self._making.setdefault(name, threading.Lock())
        began = time.monotonic()
        with making:  # of this name alone: what is made may need what has another
            failed = self._failed.get(name)
            if failed is not None and failed[0] >= began:
                raise failed[1]  # of the one that all have waited for: nobody waits for one after the other
            found = self._kept.get(name)
            if found is not None and time.monotonic() - found[0] < fresh:
                return found[1]  # type: ignore[no-any-return]
            try:
                made = make()
            except Exception as error:
                self._failed[name] = (time.monotonic(), error)
                raise
            with self._lock:
                self._failed.pop(name, None)
                self._making.setdefault(name, making)
                self._kept[name] = (time.monotonic(), made)
            return made

    def forget(self) -> None:
        """Make anew what `recent` has kept."""
        with self._lock:
            self._kept.clear()

    def broker(self) -> Snapshot:
        """Ready messages and consumers by queue, as the broker has said in the last seconds. It may take `TIMEOUT` twice."""

        def ask() -> Snapshot:
            found = Snapshot()
            ask_broker(self.celery, self.settings, found)
            return found

        return self.recent("broker", ask, fresh=FRESH + TIMEOUT)


# ---------------------------------------------------------------- of one request


class Fields(dict[str, str]):
    """The fields of a query or a form, as a template reads them: what is not there is empty."""

    def __missing__(self, name: str) -> str:
        return ""


def desk_of(request: Request) -> Desk:
    """The desk of the application that a request is for."""
    desk: Desk = request.app.state.desk
    return desk


def visitor_of(request: Request) -> Visitor:
    """Who asks; the gate has let them pass."""
    visitor: Visitor = request.state.visitor
    return visitor


def form_of(request: Request) -> dict[str, str]:
    """The fields of a form, which the gate has read."""
    form: dict[str, str] = request.state.form
    return form


def change_of(request: Request) -> Change:
    """The change that a form asks for, by its visitor; sent twice, it is made once. Raises `ChangeRefused` without a reason."""
    visitor, form = visitor_of(request), form_of(request)
    person = visitor.person
    id = form.get("request_id") or uuid4().hex
    return Change(
        person.name,
        form.get("reason", ""),
        f"web:{id[:64]}",
        is_verified=visitor.is_verified,
        check_person=person.check,
    )


def refusal_of(error: IdempotencyError | DBAPIError, letter: int, so_far: str) -> str:
    """Why one letter of many is refused, so that the others go on. Raises what is no fault of it: of the person, a lock, or the database.

    `so_far`: what has been done before it, for the person who reads that.
    """
    if isinstance(error, NotAllowed):
        raise error
    if not isinstance(error, DBAPIError):
        return str(error)
    if sqlstate(error) == LOCK_NOT_AVAILABLE:
        raise ChangeRefused(f"{so_far}; letter {letter} is locked by something else: go on later") from None
    if not is_row_error(error):
        raise error
    return describe(error)


def number(text: str | None, *, what: str, most: int = 2**63 - 1) -> int | None:
    """A whole number of a query or a form. Raises `ChangeRefused`."""
    if not text:
        return None
    if not (text.isascii() and text.isdigit()) or int(text) > most:
        raise ChangeRefused(f"{what}: a number, got {text[:20]!r}")
    return int(text)


def text_of(fields: Mapping[str, str], name: str) -> str | None:
    """A field with text in it; None if it is empty. What Postgres stores no text with matches nothing."""
    return (fields.get(name) or "").strip().replace("\0", "\ufffd") or None


def operation_of(fields: Mapping[str, str]) -> OperationId:
    """The operation that a query or a form names. Raises `OperationNotFound`."""
    names = [fields.get(name, "").replace("\0", "\ufffd") for name in ("tenant", "task", "key")]
    if not all(names):
        raise OperationNotFound("tenant, task and key: all three")
    return OperationId(*names)


def seen(request: Request, connection: Connection, id: OperationId) -> OperationId:
    """The same operation, if it is this application's and the visitor may see it. Raises `OperationNotFound`, in both cases the same."""
    desk = desk_of(request)
    if not visitor_of(request).sees(id.tenant) or not operation_pages.is_own(
        connection, desk.service, id.tenant, id.task, id.key
    ):
        raise OperationNotFound("operation: there is none of this tenant, task and key")
    return id


def letter_of(request: Request, connection: Connection, letter: int) -> Any:
    """A letter that the visitor may see. Raises `OperationNotFound`."""
    found = letter_pages.show(connection, desk_of(request).service, visitor_of(request).tenants, letter)
    if found is None:
        raise OperationNotFound(f"dead letter {letter}: there is none of this number")
    return found
