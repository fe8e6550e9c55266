"""What happens to operations without a holder: recovered, given up, purged."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
from hypothesis.stateful import rule

from idempotency.letters import storing
from idempotency.store.purge import BATCH
from idempotency.upkeep import maintenance
from idempotency.wire.keys import OperationId
from tests.model.choices import fingerprint, nth, some_amount, some_id, which
from tests.model.expected import Letter, Record, Row
from tests.model.relays import Relays

# Rows that no worker has had since their operation was due, as far as the model does not know it: by the clock of Postgres, and by
# what resend has marked.
_UNREAD = """
SELECT o.id FROM idempotency.outbox o
LEFT JOIN idempotency.records r ON (r.tenant, r.task, r.key) = (o.tenant, o.task, o.key) AND r.status = 'released'
WHERE NOT o.taken AND o.published_at >= coalesce(r.available_at, '-infinity')
"""


class Upkeep(Relays):
    """What sweeps and the consumer of dead messages do."""

    @rule()
    def recover(self) -> None:
        orphans = {
            id: record
            for id, record in self.records.items()
            if record.status == "started" and (record.lease_over or record.holder_dead)
        }
        assert maintenance.recover(self.app) == len(orphans)
        for id, record in orphans.items():
            record.release(due=True)
            self.new_rows.append(Row(id, record.fingerprint, "recover", generation=record.generation))

    @rule(id=some_id, amount=some_amount, n=st.none() | which, unknown=st.sampled_from([False, False, True]))
    def give_up(self, id: OperationId, amount: int, n: int | None, unknown: bool) -> None:
        """A message from the dead-letter queue: of an outbox row, or published without one."""
        rows = [number for number, row in self.rows.items() if row.id == id]
        number = None if n is None or not rows else nth(rows, n)
        origin = "enqueue"
        if number is not None:
            amount = 1 if self.rows[number].fingerprint == fingerprint(id, 1) else 2
            origin = self.rows[number].origin
        message, generation = self.message(id, amount), None
        if number is not None:
            generation = self.rows[number].generation
            message = message.marked(origin=origin, outbox_id=self.events[number], generation=generation)
        headers = message.headers | ({"task": "tests.support.bank.gone"} if unknown else {})
        if number is not None or not unknown:
            self.accepted.add((id, fingerprint(id, amount)))
        unread = set(self.connection.exec_driver_sql(_UNREAD).scalars())
        stored = storing.store(self.app, self.from_broker(message, headers))
        letter = Letter(
            id,
            fingerprint(id, amount),
            "unknown_task" if unknown else "rejected",
            "broker",
            None,
            row=number,
            digest=(id, amount, number, origin, unknown),
        )
        record = self.records.get(id)
        if unknown:
            if number is None:
                letter = replace(letter, id=None, fingerprint=None)
            assert self._store(letter) == (stored is not None)
            return
        if self._is_former(id, letter.fingerprint):
            assert stored is None
            row = None if number is None else self.rows[number]
            if row is not None and row.status == "published" and row.fingerprint == letter.fingerprint:
                row.settled = True
            return
        if record is not None and record.fingerprint != letter.fingerprint:
            letter = replace(letter, reason="fingerprint_mismatch", generation=record.generation)
            assert self._store(letter) == (stored is not None)
            return
        if record is not None and record.has_ended:
            assert stored is None
            return
        goes_on = record is not None and (
            record.status == "started" or (generation is not None and generation != record.generation)
        )
        waiting = self._waiting(id, letter.fingerprint, number, unread)
        if goes_on or waiting or self._is_delivered_by_another(id, letter.fingerprint, number):
            assert stored is None
            if record is not None:
                record.duplicates += 1
            self._settle_what_hides_another(number, waiting)
            return
        if record is None:
            record = self.records[id] = Record("started", fingerprint(id, amount), attempts=0)
        record.end("failed", code=record.concluded("rejected"))
        record.token = record.fence = None
        self.failures[id.key] += 1
        letter = replace(letter, generation=record.generation, reason=record.code or "")
        assert stored is not None
        # one that was stored before the task was known
        unnamed = [
            each
            for each, other in self.letters.items()
            if other.status == "open"
            and other.generation is None
            and (other.digest == letter.digest or (number is not None and other.row == number))
        ]
        if not unnamed:
            self._store(letter, ends=True)
            return
        assert stored == min(unnamed)
        self.letters[stored] = replace(
            self.letters[stored],
            id=id,
            fingerprint=letter.fingerprint,
            reason=letter.reason,
            generation=letter.generation,
        )

    def _deliveries(self, id: OperationId, fingerprint: str | None) -> dict[int, Row]:
        """The rows that may still be sent: of the latest generation last, and the newest last."""
        rows = {
            number: row
            for number, row in self.rows.items()
            if (row.id, row.fingerprint) == (id, fingerprint) and not row.settled and row.status != "failed"
        }
        return dict(sorted(rows.items(), key=lambda each: (each[1].generation, each[0])))

    def _is_delivered_by_another(self, id: OperationId, fingerprint: str | None, number: int | None) -> bool:
        rows = self._deliveries(id, fingerprint)
        if not rows:
            return False
        last, row = list(rows.items())[-1]
        is_pending = any(other.status == "pending" for each, other in rows.items() if each != number)
        return last != number or is_pending or (row.status == "pending" and not row.reserved)

    def _waiting(self, id: OperationId, fingerprint: str | None, number: int | None, unread: set[int]) -> bool:
        """Whether another message waits in its queue, or is lost and comes back."""
        lettered = {letter.row for letter in self.letters.values() if letter.status == "open"}
        return any(
            row.status == "published" and each in unread and each not in lettered and each != number
            for each, row in self._deliveries(id, fingerprint).items()
        )

    def _settle_what_hides_another(self, number: int | None, waiting: bool) -> None:
        if number is None or (row := self.rows[number]).status != "published":
            return
        others = self._deliveries(row.id, row.fingerprint).values()
        row.settled = row.settled or waiting or any(other.generation > row.generation for other in others)

    @rule(late=st.booleans())
    def purge(self, late: bool) -> None:
        """Whatever has ended by now; or long after."""
        if late:
            self._retention_passes()
        # what an earlier purge has found a reason to keep is looked at again
        self.connection.exec_driver_sql("UPDATE idempotency.records SET kept_until = NULL")
        self.connection.exec_driver_sql("UPDATE idempotency.outbox SET kept_at = NULL")
        for number in [number for number, letter in self.letters.items() if letter.status != "open" and letter.old]:
            del self.letters[number]
        gone = [id for id, record in self.records.items() if self._may_be_purged(id, record)]
        alone = [number for number, row in self.rows.items() if row.id not in gone and self._is_left_over(number, row)]
        purged = maintenance.purge_once(self.app, limit=BATCH)
        assert (purged.operations, purged.rows) == (len(gone), len(alone))
        for number in alone:
            del self.rows[number]
        for id in gone:
            del self.records[id]
            self.rows = {number: row for number, row in self.rows.items() if row.id != id}
            self.accepted = {each for each in self.accepted if each[0] != id}
            self.discarded = {each for each in self.discarded if each[0] != id}
        known = {row.id for row in self.rows.values() if not row.settled}
        known |= {letter.id for letter in self.letters.values() if letter.status == "open"}
        known |= self.records.keys()
        self.former = {(id, was): became for (id, was), became in self.former.items() if id in known}

    def _is_left_over(self, number: int, row: Row) -> bool:
        """Settled long ago, of what has ended or has no record, and without a dead letter that is open."""
        record = self.records.get(row.id)
        return (
            row.old
            and (record is None or (record.has_ended and not row.recent))
            and not any(
                letter.status == "open" and (letter.id == row.id or letter.row == number)
                for letter in self.letters.values()
            )
        )

    def _may_be_purged(self, id: OperationId, record: Record) -> bool:
        return (
            record.has_ended
            and record.expired
            and not any(letter.id == id and letter.status == "open" for letter in self.letters.values())
            and not any(
                row.recent or (not row.settled and (row.status != "published" or row.fingerprint != record.fingerprint))
                for row in self.rows.values()
                if row.id == id
            )
        )
