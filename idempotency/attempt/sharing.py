"""A body in a transaction that others share: what the next one would get of it is noticed, and then it runs alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import Connection

from ..errors import IdempotencyError
from ..store.answers import Claimed
from ..store.connections import act_for
from ..wire.delivery import Delivery
from .attempt import Attempt
from .heartbeat import Holding, JobTime
from .policy import Policy
from .runtime import Runtime
from .session import BETWEEN, LEADING, sessions_of

# What would be so for the next bodies: settings, savepoints that are not SQLAlchemy's, what lives until the transaction ends.
_TEMPORARY = rf"(?:(?:or|replace|local|global){BETWEEN})*temp(?:orary)?\b"
_LASTS = re.compile(
    LEADING
    + r"(?:(?:set|reset|discard|do|declare)\b"
    + r"|(?:savepoint|rollback|release)\b(?!.*\bsa_savepoint_)"
    + rf"|create{BETWEEN}{_TEMPORARY}"
    + rf"|(?:select|with)\b.*\binto{BETWEEN}{_TEMPORARY})",
    re.IGNORECASE | re.DOTALL,
)
# The same, anywhere in a statement.
_LASTS_WITHIN = re.compile(r"\b(?:set_config|pg_settings|pg_temp)\b", re.IGNORECASE)
# A call of `idempotency.about`, as `enqueue` makes one, and the name of the parameter that is its tenant.
_ABOUT = re.compile(r'\babout"?\s*\(\s*(?:%\((\w+)\)s)?', re.IGNORECASE)


class Alone(IdempotencyError):
    """This body needs a transaction of its own."""


class SharingAttempt(Attempt):
    """An attempt whose body shares its transaction with others. It may not commit anything before its end."""

    # Whether the next bodies would get what this one has done to the connection, and no savepoint undoes it: a rollback past
    # SQLAlchemy, other options of it.
    has_spoilt = False
    # Whether the transaction may be about another tenant, too.
    is_about_others = False
    # Its span, which is noted with its end.
    trace: str | None = None
    # Its result as its record would keep it, until that is committed.
    stored: str | None = None

    def __init__(
        self, runtime: Runtime, claim: Claimed, delivery: Delivery, policy: Policy, job: JobTime | None = None
    ) -> None:
        super().__init__(runtime, claim, delivery, policy)
        self._holding.job = job

    def keep(self) -> Holding:
        """Have the heartbeat renew its claim until the body runs alone."""
        self.runtime.heartbeat.hold(self._holding)
        return self._holding

    def check_may_begin(self) -> None:
        self.leave()

    def watch(self, statement: str, parameters: Any) -> None:
        """Leave because of a statement whose effect the next bodies would get, and note one that names another tenant."""
        if _LASTS.match(statement) or _LASTS_WITHIN.search(statement):
            self.leave()
        given = parameters if isinstance(parameters, Mapping) else {}
        if any(given.get(name) != self.claim.id.tenant for name in _ABOUT.findall(statement)):
            self.is_about_others = True

    def leave(self) -> None:
        """Have the body run alone, even if it catches what this raises."""
        self.stopped = True
        raise Alone(f"{self.claim.id.task}: needs a transaction of its own")


def run_within(
    runtime: Runtime,
    connection: Connection,
    attempt: SharingAttempt,
    body: Callable[[Any], Any],
    *,
    savepoint: bool = False,
) -> tuple[Any, str]:
    """Run a body in a transaction that others share, and flush what it wrote. Returns its result, and that as text.

    Raises what the body raises, and `Alone`. Without a `savepoint`, only a rollback of all undoes what it wrote by then.
    """
    sessions = sessions_of(runtime.engine)
    session = sessions.within(connection, savepoint=savepoint)
    attempt.writes.use(session)
    attempt.stopped, attempt.is_about_others, shared = False, False, connection.get_transaction()
    session.watch = attempt.watch
    driver: Any = connection.connection.driver_connection
    rollbacks, options = getattr(driver, "rollbacks", 0), connection.get_execution_options()

    def note_spoilt() -> None:
        attempt.has_spoilt = getattr(driver, "rollbacks", 0) != rollbacks or (
            connection.get_execution_options() is not options
            and connection.get_execution_options() != {**options, **sessions.execution_options}
        )

    try:
        try:
            if session.tells_of_commit:
                attempt.leave()
            result = body(attempt)
            session.flush()  # first: if it raises, no large result has been put
            attempt.stored = stored = runtime.stored_result(result)
        finally:
            note_spoilt()
        if (
            attempt.stopped
            or session.tells_of_commit
            or attempt.has_spoilt
            or session.is_elsewhere(connection)
            or session.leaves_savepoints(connection)  # to which the next body could roll back
            or (session.has_begun_anew and not savepoint)  # what should be undone would be committed
            or not connection.in_transaction()
            or connection.get_transaction() is not shared
        ):
            attempt.leave()  # perhaps it has rolled back more than its own
        session.end_with_commit()  # of the savepoint, if there is one
        note_spoilt()
        if attempt.has_spoilt:
            attempt.leave()
        if attempt.is_about_others:
            act_for(connection, [attempt.claim.id.tenant])
    finally:
        session.watch = None
        session.end()
    return result, stored
