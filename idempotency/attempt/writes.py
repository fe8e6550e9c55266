"""The writes of one attempt, each behind its fence, and their commits: the one door to Postgres while it holds.

    alone        one statement that commits by itself: an effect, a release
    in_session   one statement in the session's transaction, for `commit`: a step
    together     both, with what the session has written: an effect whose function wrote something
    finish       the end: with the session's work in one commit, or by itself if no session was opened

Each raises `LeaseLost` if the attempt no longer holds the operation. A commit raises `OutcomeInDoubt` if its answer was
lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from psycopg.pq import TransactionStatus
from sqlalchemy import Connection
from sqlalchemy.exc import DataError, DBAPIError

from ..errors import LeaseLost, OutcomeInDoubt
from ..framework import framework
from ..observe import metrics
from ..observe.crash_points import crash_point
from ..observe.logs import log
from ..store.answers import Claimed
from ..store.driver import reset_role
from ..store.statements import sqlstate
from .heartbeat import Holding
from .runtime import Runtime
from .session import AttemptSession, sessions_of

T = TypeVar("T")
# A finishing statement divides by zero (SQLSTATE 22012) when the attempt is not the holder.
DIVISION_BY_ZERO = "22012"


class FencedWrites:
    """What one claim writes, and the session that it works in."""

    def __init__(self, runtime: Runtime, claim: Claimed, holding: Holding) -> None:
        self._runtime = runtime
        self._holding = holding
        self._session: AttemptSession | None = None
        self._tenant, self._task = claim.id.tenant, claim.id.task
        # for logs
        self.names = {"task": claim.id.task, "key": claim.id.key, "fence": claim.fence, "attempt": claim.attempts}

    @property
    def session(self) -> AttemptSession:
        """The attempt's session, opened on first use."""
        if self._session is None:
            self._session = sessions_of(self._runtime.engine).of(self._runtime.engine, self._tenant)
        return self._session

    def use(self, session: AttemptSession) -> None:
        """Work in this session, whose transaction others share."""
        self._session = session

    @property
    def in_transaction(self) -> bool:
        return self._session is not None and self._session.in_transaction()

    @property
    def is_broken(self) -> bool:
        """Whether a statement has failed and its error was caught: the transaction can only be rolled back."""
        if self._session is None or not self._session.in_transaction():
            return False
        driver: Any = self._session.connection().connection.driver_connection
        return bool(driver.info.transaction_status is TransactionStatus.INERROR)

    def alone(self, write: Callable[[Connection], T | None], *, then: str | None = None) -> T:
        """Write and commit at once. Returns what `write` returns; None or False from it means: not the holder.

        `then` is the crash point after the commit.
        """
        with self._runtime.autocommit(self._tenant) as connection:
            answer = write(connection)
        if then is not None:
            crash_point(then)
        if answer is None or answer is False:
            self.fenced()
        return answer

    def in_session(self, write: Callable[[Connection], None]) -> None:
        """Write in the session's transaction. A statement that finds another holder rolls the session back."""
        with self._fenced_by_division():
            self.as_our_own(write)

    def as_our_own(self, write: Callable[[Connection], None]) -> None:
        """Write in the session's transaction, under our own role, whatever role the body has taken."""
        framework().check_may_commit(self.session)
        connection = self.session.connection()
        reset_role(connection)
        write(connection)

    def together(self, write: Callable[[Connection], None]) -> None:
        """Write in the session's transaction and commit it."""
        try:
            self.session.flush()
            self.in_session(write)
        except BaseException:
            self.roll_back()
            raise
        self.commit()

    def commit(self) -> None:
        """Commit the session's transaction."""
        driver = self.session.connection().connection.driver_connection
        try:
            self.session.end_with_commit()
        except BaseException as error:
            if _refused_by_server(error, driver):
                raise
            self._doubt(error)

    def follow_up(self) -> None:
        """Call what waited for the commit; not before the attempt knows what it has committed."""
        if self._session is not None:
            framework().after_commit(self._session)

    def flush(self) -> None:
        """Write what the session has not written yet; nothing if there is none."""
        if self._session is not None:
            self._session.flush()

    def finish(self, write: Callable[[Connection], None]) -> None:
        """Write the operation's end and commit it, together with the session's work if there is a session."""
        if self._session is None:
            self._finish_without_session(write)
        else:
            self.flush()
            self.in_session(write)
            crash_point("finish.written")
            self.commit()
        crash_point("finish.committed")
        self.follow_up()

    def _finish_without_session(self, write: Callable[[Connection], None]) -> None:
        """Statement and commit are one round trip."""
        with self._fenced_by_division(), self._runtime.autocommit(self._tenant) as connection:
            # Taken now: asking an invalidated connection for it would open another one in the middle of the doubt.
            driver = connection.connection.driver_connection
            try:
                write(connection)
            except BaseException as error:
                if _refused_by_server(error, driver):
                    raise
                connection.invalidate()
                self._doubt(error)

    def roll_back(self) -> None:
        if self._session is not None:
            try:
                self._session.rollback()
            except Exception:  # interrupted in the middle of a statement: the connection cannot be used again
                self._session.invalidate()

    def discard(self) -> None:
        """Roll back and close the session: what a thread of the body still writes has no part in the operation's end."""
        self.close()
        self._session = None

    def close(self) -> None:
        """Roll back what was not committed, and return the connection."""
        self.roll_back()
        if self._session is not None:
            self._session.end()

    @contextmanager
    def _fenced_by_division(self) -> Iterator[None]:
        """Turn the division by zero of a finishing statement into `LeaseLost`."""
        try:
            yield
        except DataError as error:
            if sqlstate(error) != DIVISION_BY_ZERO:
                raise
            if self._session is not None:
                self._session.rollback()
            self.fenced()

    def fenced(self) -> NoReturn:
        """A write matched nothing, because the attempt no longer holds the operation."""
        self._holding.given_up = True
        metrics.fenced.labels(self._task).inc()
        log.warning("fenced", **self.names)
        raise LeaseLost(f"{self._task}: the write of a former holder matched nothing")

    def _doubt(self, error: BaseException) -> NoReturn:
        """The answer to a COMMIT was lost: neither the session nor the claim can be used any more."""
        self._holding.given_up = True
        if self._session is not None:
            self._session.invalidate()
        metrics.in_doubt.labels(self._task).inc()
        log.warning("commit_in_doubt", error=type(error).__name__, **self.names)
        if isinstance(error, SystemExit | KeyboardInterrupt):
            # The process ends. The message is not acknowledged, and the record says how it went.
            raise error
        raise OutcomeInDoubt(f"{self._task}: the answer to COMMIT was lost") from error


def _refused_by_server(error: BaseException, driver: Any) -> bool:
    """Whether the server itself said no: then nothing was committed, and there is no doubt."""
    if not isinstance(error, DBAPIError):
        return False
    state = sqlstate(error)
    # 57P..: the server is going down; what it had done by then is not known
    return state is not None and not state.startswith("57P") and not driver.closed
