"""Ending the operation of a dead message: the failed record and the letter are one commit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from ..attempt import conclusions
from ..attempt.conclusions import Concluded, NotDeclined
from ..attempt.policy import Policy
from ..attempt.runtime import Runtime
from ..errors import TransactionEnded
from ..observe import metrics
from ..observe.logs import log
from ..reasons import FINGERPRINT_MISMATCH, OF_MESSAGES, ON_FAILED_ERROR, SERVICE_MISMATCH
from ..store import edits, ends, letters, undelivered
from ..store.answers import Busy, Changed, Completed, Failed, Foreign, Mismatch
from ..store.ends import FailedEnd
from ..store.letters import BrokerLetter
from ..store.statements import repeatable
from ..store.undelivered import GivenUp, UndeliveredMessage
from .letter import refused

# How often a letter's `on_failed` may fail for lack of a lock or end its process, and how often handling a letter may
# fail for an unknown reason. With the consumer's pauses that is five minutes.
LETTER_TRIES = 8

Answer: TypeAlias = GivenUp | Completed | Failed | Mismatch | Foreign | Busy


@dataclass(frozen=True, slots=True)
class Ending:
    """A message that no worker will run, and the operation that ends with it.

    `patience`: how long to wait for each lock, as Postgres reads it. `interrupted` collects the digests of letters that
    an outage of Postgres interrupted; None: they are not needed.
    """

    runtime: Runtime
    policy: Policy
    dead: UndeliveredMessage
    arguments: Mapping[str, Any]
    letter: BrokerLetter
    patience: str
    interrupted: set[str] | None

    def commit(self) -> int | None:
        """End the operation and store the letter, in one transaction.

        Returns the letter's id; None if the message was a duplicate and there is none. Raises `OperationalError`.
        """
        try:
            return self._commit(skip=None)
        except TransactionEnded as broken:
            return self._commit(skip=str(broken))

    @repeatable
    def _commit(self, *, skip: str | None) -> int | None:
        """`skip`: why the application's part, undos and `on_failed`, is left out."""
        while True:
            with self._session() as session:
                connection = session.connection()
                wait_at_most(connection, self.patience)
                answer = undelivered.give_up(
                    connection,
                    self.dead,
                    end=self._end,
                    retention=self.policy.retention_failed,
                    lease=self.runtime.settings.lease,
                )
                if isinstance(answer, Changed):
                    continue
                stored, concluded = self._store(connection, answer, skip)
                letters.forget_tries(connection, self.letter.digest)
                session.commit()
                if concluded is not None:
                    metrics.count_failed(self.dead.id.task, concluded.error.code)
                return stored

    @property
    def _end(self) -> FailedEnd:
        return FailedEnd(self.letter.reason, self.letter.last_error)

    def _store(self, connection: Connection, answer: Answer, skip: str | None) -> tuple[int | None, Concluded | None]:
        letter = replace(self.letter, fingerprint=self.dead.fingerprint)
        match answer:
            case GivenUp():
                return self._conclude(connection, answer, skip)
            case Mismatch() if self._is_of_edited(connection):
                return None, None
            case Mismatch(generation):
                return letters.store_message(connection, refused(letter, generation, FINGERPRINT_MISMATCH)), None
            case Foreign(generation):
                return letters.store_message(connection, refused(letter, generation, SERVICE_MISMATCH)), None
            case Busy():
                undelivered.count_copy(connection, self.dead)
        return None, None

    def _is_of_edited(self, connection: Connection) -> bool:
        """Whether this is a copy of a message that a person has edited: its operation goes on without it."""
        fingerprints = [self.dead.fingerprint, *self.dead.also]
        if edits.became(connection, self.dead.id, fingerprints) is None:
            return False
        if self.dead.message_id is not None:
            edits.settle(connection, self.dead.id, fingerprints, self.dead.message_id)
        return True

    def _conclude(self, connection: Connection, ended: GivenUp, skip: str | None) -> tuple[int | None, Concluded]:
        letter, id = self.letter, self.dead.id
        has_part = self.policy.on_failed is not None or conclusions.has_undo(ended.effects)
        if skip is None and has_part and not self._may_try():
            skip = "it has ended its process too often"
        concluded = conclusions.conclude(
            connection,
            id,
            NotDeclined(OF_MESSAGES[letter.reason], letter.reason),
            entries=ended.effects,
            arguments=self.arguments,
            attempts=ended.attempts,
            on_failed=self.policy.on_failed,
            skip=skip,
        )
        if concluded.end != self._end:
            ends.conclude(connection, id, concluded.end, fence=ended.fence)
        stored = letters.store_end(
            connection,
            replace(
                letter,
                reason=concluded.reason if skip is None else ON_FAILED_ERROR,
                last_error=concluded.end.error,
                generation=ended.generation,
                fingerprint=ended.fingerprint,
                attempts=ended.attempts,
                first_error=ended.first_error,
            ),
        )
        return stored, concluded

    def _may_try(self) -> bool:
        """Whether the application's part may run once more for this letter. Counts the try."""
        letter, counts = self.letter, True
        if self.interrupted and letter.digest in self.interrupted:
            self.interrupted.discard(letter.digest)
            counts = False
        with self.runtime.autocommit() as connection:
            tries = letters.count_try(connection, letter.digest, counts=counts)
        if tries > LETTER_TRIES:
            log.error("on_failed_error", task=letter.task, key=letter.key, tries=tries - 1)
        return tries <= LETTER_TRIES

    @contextmanager
    def _session(self) -> Iterator[Session]:
        """The session that stores the letter. If an outage ends it, that is noted: it was not the letter's fault."""
        with Session(self.runtime.engine) as session:
            connection = session.connection()
            try:
                yield session
            except OperationalError:
                if connection.invalidated and self.interrupted is not None:
                    self.interrupted.add(self.letter.digest)
                raise


def wait_at_most(connection: Connection, patience: str) -> None:
    """Limit how long this transaction waits for each lock."""
    connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{patience}'")
