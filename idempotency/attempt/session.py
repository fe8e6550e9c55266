"""The session of a body and of `on_failed`: plain SQLAlchemy, except that only the attempt commits and closes it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from sqlalchemy import Connection, Engine, NestedTransaction, event
from sqlalchemy.orm import Session, sessionmaker

from ..errors import SessionNotYours
from ..store.connections import act_for

_REFUSAL = "the session commits with the result; what must be committed before the body goes on belongs in self.step"


class AttemptSession(Session):
    """A session whose transaction its user can roll back, but neither commit nor close."""

    _may_commit = False
    _owned: Connection | None = None
    # behind which its transaction is, inside of that of its connection
    _savepoint: NestedTransaction | None = None
    # whose transaction this session's is inside of, on one connection in a test
    _inside: AttemptSession | None = None
    # whose rows its transactions are about, where row-level security wants to know
    _tenant: str | None = None
    _has_ended = False
    # whether its transaction has ended, and it has begun, or will begin, another one
    has_begun_anew = False
    # whether the application's class does something when it commits
    _acts_at_commit = False
    # told of each statement and its parameters before it is executed, and may refuse it
    watch: Callable[[str, Any], None] | None = None
    # the event loop that waits for the body, if it is an HTTP handler
    _loop: asyncio.AbstractEventLoop | None = None

    def get_bind(self, *args: Any, **options: Any) -> Any:
        """Every statement asks here. Refuses those of a thread that outlives its attempt, and those that would stop the loop."""
        if self._has_ended:
            raise SessionNotYours("the attempt has ended: nothing more is committed in its session")
        if self._loop is not None and asyncio._get_running_loop() is self._loop:
            raise SessionNotYours(
                "a statement on the event loop would stop it, perhaps for a lock whose holder waits for the loop: in an "
                "`async def` handler, await attempt.run_sync(fn)"
            )
        return super().get_bind(*args, **options)

    def stay_off(self, loop: asyncio.AbstractEventLoop) -> None:
        """Refuse statements on this event loop."""
        self._loop = loop

    def commit(self) -> NoReturn:
        raise SessionNotYours(_REFUSAL)

    def begin(self, nested: bool = False) -> Any:
        if nested:
            return super().begin(nested=True)
        raise SessionNotYours("the session's transaction belongs to the attempt; use begin_nested() for a savepoint")

    def connection(self, bind_arguments: Any = None, execution_options: Any = None) -> Connection:
        if "isolation_level" in (execution_options or {}):
            raise SessionNotYours(
                "the session's isolation level belongs to the attempt: under another one it could not finish"
            )
        return super().connection(bind_arguments, execution_options)

    def close(self) -> None:
        raise SessionNotYours(
            "the session belongs to the attempt, which closes it: `with self.session` would undo its work"
        )

    def check_commit(self) -> None:
        """Raise `SessionNotYours` unless the session's owner commits: asked by its connection."""
        if not self._may_commit:
            raise SessionNotYours(_REFUSAL)

    def check_statement(self, statement: str, parameters: Any) -> None:
        """Raise `SessionNotYours` for a statement that would end the attempt's transaction: asked by its connection."""
        refuse_end_of_transaction(statement)
        if self.watch is not None:
            self.watch(statement, parameters)

    @property
    def tells_of_commit(self) -> bool:
        """Whether something is done once the session commits, or its transaction ends, which it does before that."""
        return (
            self._acts_at_commit
            or bool(self.dispatch.after_commit)
            or any(listener is not _disown for listener in self.dispatch.after_transaction_end)
        )

    def is_elsewhere(self, connection: Connection) -> bool:
        """Whether it has begun on another connection than this one, by its binds or its class's `get_bind`."""
        return self._owned is not None and self._owned is not connection

    def leaves_savepoints(self, connection: Connection) -> bool:
        """Whether a savepoint is there that is not this session's own, on the connection whose transaction it is inside of."""
        return connection.get_nested_transaction() is not (self._savepoint if self.in_transaction() else None)

    def end_with_commit(self) -> None:
        """Commit, for the session's owner."""
        self._may_commit = True
        try:
            super().commit()
        finally:
            self._may_commit = False

    def end(self) -> None:
        """Close for good, for the session's owner."""
        self._has_ended = True
        super().close()


class SessionMaker:
    """Makes attempts' sessions of an application's own class, or with its sessionmaker's options."""

    def __init__(self, chosen: type[Session] | sessionmaker[Any]) -> None:
        own, options = (chosen.class_, chosen.kw) if isinstance(chosen, sessionmaker) else (chosen, {})
        self._class: type[AttemptSession] = (
            AttemptSession if own is Session else type(own.__name__, (AttemptSession, own), {})
        )
        self._class._acts_at_commit = own.commit is not Session.commit
        self._options = {"expire_on_commit": False, **options}

    @property
    def execution_options(self) -> Mapping[str, Any]:
        """Those that each session gives its connection."""
        given: Mapping[str, Any] = self._options.get("execution_options", {})
        return given

    def of(self, engine: Engine, tenant: str) -> AttemptSession:
        """A session with its own transaction, about the rows of a tenant."""
        session = self._class(**{**self._options, "bind": engine})
        session._tenant = tenant
        return session

    def within(self, connection: Connection, *, savepoint: bool = True) -> AttemptSession:
        """A session inside a connection's transaction, behind a savepoint: a rollback undoes only the session's work.

        Without `savepoint` it undoes the whole transaction.
        """
        mode = "create_savepoint" if savepoint else "rollback_only"
        return self._class(**{**self._options, "bind": connection, "join_transaction_mode": mode})


def use_sessions(bind: Engine | Connection, chosen: type[Session] | sessionmaker[Any]) -> None:
    """Let the attempts on this engine, or on this one connection, have sessions of this class or maker."""
    options = {_SESSIONS: SessionMaker(chosen)}
    if isinstance(bind, Connection):
        bind.execution_options(**options)
    else:
        bind.update_execution_options(**options)


def sessions_of(bind: Engine | Connection) -> SessionMaker:
    """What makes the sessions on this engine or on a connection of it."""
    maker: SessionMaker = bind.get_execution_options()[_SESSIONS]
    return maker


_SESSIONS = "idempotency_sessions"

# It ends at its first end: with `/\*.*?\*/`, several of them could be read in many ways, and the time doubles with each.
_COMMENT = r"--[^\r\n]*(?:[\r\n]|\Z)|/\*(?:[^*]|\*(?!/))*\*/"
# What may stand in front of a statement, and between two words of one.
LEADING = rf"(?:[\s;]|{_COMMENT})*"
BETWEEN = rf"(?:\s|{_COMMENT})+"
# A statement that would end the transaction past SQLAlchemy; ROLLBACK TO SAVEPOINT does not.
_ENDS_TRANSACTION = re.compile(
    LEADING
    + rf"(?:commit|end|abort|prepare{BETWEEN}transaction|rollback(?!{BETWEEN}(?:(?:work|transaction){BETWEEN})?to\b))\b",
    re.IGNORECASE | re.DOTALL,
)


def refuse_end_of_transaction(statement: str) -> None:
    """Raise `SessionNotYours` for a statement that would end the attempt's transaction."""
    if _ENDS_TRANSACTION.match(statement):
        raise SessionNotYours(_REFUSAL)


def _refuse_commit(session: AttemptSession) -> None:
    """Also refuses `session.get_transaction().commit()`."""
    if not session._may_commit and not session.in_nested_transaction():
        raise SessionNotYours(_REFUSAL)


def _own(session: AttemptSession, transaction: Any, connection: Connection) -> None:
    owned = session._owned
    if owned is not None and owned is not connection and not owned.closed:
        raise SessionNotYours(
            "the session has begun on a second connection (by its binds or get_bind): what is written there would not "
            "be committed with the operation"
        )
    driver: Any = connection.connection.driver_connection
    if (before := getattr(driver, "owner", None)) is not session:
        session._inside, driver.owner = before, session
    session._owned = connection
    if transaction.parent is None:
        session._savepoint = connection.get_nested_transaction()
    if session._tenant is not None:
        act_for(connection, [session._tenant])


def _disown(session: AttemptSession, transaction: Any) -> None:
    connection = session._owned
    if transaction.parent is None and connection is not None:
        session._owned, session.has_begun_anew = None, True
        if not connection.closed and not connection.invalidated:
            connection.connection.driver_connection.owner = session._inside  # type: ignore[union-attr]


def refuse_others_commits() -> None:
    """Refuse a commit on the connection of an attempt's session like a commit of the session itself."""
    if not event.contains(AttemptSession, "before_commit", _refuse_commit):
        event.listen(AttemptSession, "before_commit", _refuse_commit)
        # before those of the application, whose statements are the body's
        event.listen(AttemptSession, "after_begin", _own, insert=True)
        event.listen(AttemptSession, "after_transaction_end", _disown)
