"""The session of a body and of `on_failed`: plain SQLAlchemy, except that only the attempt commits and closes it."""

from __future__ import annotations

import asyncio
import re
from typing import Any, NoReturn

from sqlalchemy import Connection, Engine, event
from sqlalchemy.orm import Session, sessionmaker

from ..errors import SessionNotYours
from ..store.connections import act_for

_REFUSAL = "the session commits with the result; what must be committed before the body goes on belongs in self.step"


class AttemptSession(Session):
    """A session whose transaction its user can roll back, but neither commit nor close."""

    _may_commit = False
    _owned: Connection | None = None
    # whose rows its transactions are about, where row-level security wants to know
    _tenant: str | None = None
    _has_ended = False
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
        self._options = {"expire_on_commit": False, **options}

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

# A statement that would end the transaction past SQLAlchemy; ROLLBACK TO SAVEPOINT does not.
_ENDS_TRANSACTION = re.compile(
    r"(?:\s|--[^\n]*\n|/\*.*?\*/)*"
    r"(?:commit|end|abort|prepare\s+transaction|rollback(?!\s+(?:(?:work|transaction)\s+)?to\b))\b",
    re.IGNORECASE | re.DOTALL,
)
# The key in `connection.info` of the session that works on the connection.
_OWNER = "idempotency.session"
_SETS_ROLE = re.compile(r"\bset\b.*\b(?:role|authorization)\b|\bset_config\W+role\b", re.IGNORECASE | re.DOTALL)
_HAS_ROLE = "idempotency.role"


def refuse_end_of_transaction(statement: str) -> None:
    """Raise `SessionNotYours` for a statement that would end the attempt's transaction."""
    if _ENDS_TRANSACTION.match(statement):
        raise SessionNotYours(_REFUSAL)


def _refuse_commit(session: AttemptSession) -> None:
    """Also refuses `session.get_transaction().commit()`."""
    if not session._may_commit and not session.in_nested_transaction():
        raise SessionNotYours(_REFUSAL)


def takes_role(statement: str) -> bool:
    """Whether a statement may take on another role."""
    return _SETS_ROLE.search(statement) is not None


def note_role(connection: Connection) -> None:
    """Note that a connection may have another role, for `reset_role`."""
    connection.info[_HAS_ROLE] = True


def reset_role(connection: Connection) -> None:
    """Drop a role that a body has taken on: it need not have rights on our tables, and SET LOCAL lasts until COMMIT."""
    if connection.info.pop(_HAS_ROLE, False):
        connection.exec_driver_sql("RESET ROLE")


def _own(session: AttemptSession, _: Any, connection: Connection) -> None:
    owned = session._owned
    if owned is not None and owned is not connection and not owned.closed:
        raise SessionNotYours(
            "the session has begun on a second connection (by its binds or get_bind): what is written there would not "
            "be committed with the operation"
        )
    connection.info[_OWNER] = session
    session._owned = connection
    if session._tenant is not None:
        act_for(connection, [session._tenant])


def _disown(session: AttemptSession, transaction: Any) -> None:
    connection = session._owned
    if transaction.parent is None and connection is not None:
        session._owned = None
        if not connection.closed and not connection.invalidated:
            connection.info.pop(_OWNER, None)


def refuse_others_commits(engine: Engine) -> None:
    """Refuse a commit on the connection of an attempt's session like a commit of the session itself."""
    if not event.contains(AttemptSession, "before_commit", _refuse_commit):
        event.listen(AttemptSession, "before_commit", _refuse_commit)
        event.listen(AttemptSession, "after_begin", _own)
        event.listen(AttemptSession, "after_transaction_end", _disown)

    @event.listens_for(engine, "commit")
    def _(connection: Connection) -> None:
        session = connection.info.get(_OWNER)
        if session is not None and not session._may_commit:
            connection.invalidate()  # a later commit must not include this transaction's work
            raise SessionNotYours(_REFUSAL)

    @event.listens_for(engine, "before_cursor_execute")
    def _(connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        if _OWNER in connection.info:
            refuse_end_of_transaction(statement)
        if takes_role(statement):
            note_role(connection)

    @event.listens_for(engine, "checkin")
    def _(_: Any, record: Any) -> None:
        record.info.pop(_OWNER, None)  # a closing session returns its connection before `after_transaction_end`
