"""Stopping a saga: it goes no further without a deploy or a person, and nothing that is recorded changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from ..errors import AttemptsExhausted, Misuse, PermanentError
from ..observe.logs import log
from ..reasons import SAGA_MISMATCH
from ..store import letters, sagas
from ..store.answers import error_text
from ..store.sagas import FIRST_PAUSE, LONGEST_PAUSE
from ..store.statements import describe
from .journal import Mismatch

if TYPE_CHECKING:
    from .attempt import SagaAttempt


def stop(attempt: SagaAttempt, reason: str, why: str, *, tries_again: bool = False) -> NoReturn:
    """Go no further: a dead letter says why. `tries_again`: after a pause, since it may be over by then."""
    attempt.writes.roll_back()
    attempt.check_lease()
    log.error("saga_stopped", reason=reason, why=why, **attempt.writes.names)
    pause = min(FIRST_PAUSE * 2.0 ** min(attempt.saga.stops, 20), LONGEST_PAUSE) if tries_again else None
    attempt.wait(1, pause, stopped=(reason, why))


def write_letter(attempt: SagaAttempt, stopped: tuple[str, str] | None) -> None:
    """Say in the saga's letter why it has stopped. None: it has resumed. After the saga and its record are locked, as everyone does."""
    if stopped is None or attempt.saga.stopped != stopped[0]:
        close_letter(attempt)  # a person has seen to what had stopped it before
    if stopped is None:
        return
    connection, (reason, why) = attempt.session.connection(), stopped
    error = error_text(reason, why)
    letters.update_error(connection, attempt.claim.id, reason, error)
    letters.store_failure(
        connection,
        attempt.delivery,
        attempt.claim,
        reason=reason,
        last_error=error,
        service=attempt.runtime.settings.service,
    )


def close_letter(attempt: SagaAttempt) -> None:
    """Close the letter that reported the stop: the saga has resumed."""
    if attempt.saga.stopped is not None:
        letters.close(attempt.session.connection(), attempt.claim.id, attempt.saga.stopped)


def check_fits(attempt: SagaAttempt, error: PermanentError, cause: BaseException | None) -> None:
    """Code that fails before it has come to all that is recorded does not fit it, and undoes nothing: it stops."""
    if isinstance(cause, Misuse):
        stop(attempt, SAGA_MISMATCH, f"the code uses the saga as it cannot be used: {cause}", tries_again=True)
    if attempt.has_run:
        check_read(attempt, f"fails with {describe(cause or error)}")
        attempt.has_reached = False
        attempt.note_reached()
    elif isinstance(error, AttemptsExhausted) and attempt.saga.reached < attempt.journal.last:
        stop(attempt, SAGA_MISMATCH, sagas.NOT_REACHED, tries_again=True)


def check_read(attempt: SagaAttempt, what: str = "ends") -> None:
    """Stop unless the code has come to all that is recorded. `what` it does instead, in words."""
    if not attempt.has_run:
        return
    try:
        attempt.journal.check_read(what)
    except Mismatch as mismatch:
        stop(attempt, SAGA_MISMATCH, str(mismatch), tries_again=True)
