"""Relays, also those that another has overtaken, and what the broker has lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import precondition, rule

from idempotency.broker.batch import Published, Refusal
from idempotency.relay import relay as relaying
from idempotency.relay.resend import resend_lost
from idempotency.store import outbox
from tests.model.ageing import Ageing
from tests.model.choices import nth, some_answers, which
from tests.model.expected import Letter, Row


class Relays(Ageing):
    """What relays do."""

    @rule(answers=st.none() | some_answers)
    def relay_leases(self, answers: list[str] | None) -> None:
        """A relay takes what is due, and may stop before the broker's answers."""
        due = {
            number
            for number, row in self.rows.items()
            if row.status == "pending" and row.available and not row.reserved
        }
        service = self.runtime.settings.service
        options = {"service": service, "batch": relaying.BATCH, "seconds": relaying.RESERVATION, "silent": []}
        reserved = self.connection.exec_driver_sql(outbox._RESERVE_ROWS, options).all()
        assert {row.id for row in reserved} == due
        for number in due:
            self.rows[number].reserved = True
        # in an order that is the same in every run of a program
        reserved = sorted(reserved, key=lambda row: (str(self.rows[row.id].id), row.id))
        if answers is not None:
            self._mark(reserved, answers)
        elif reserved:
            self.batches.append(reserved)

    @precondition(lambda self: self.batches)
    @rule(n=which, answers=some_answers)
    def relay_marks(self, n: int, answers: list[str]) -> None:
        """The answers come late: another relay may have sent the same rows meanwhile."""
        batch = nth(self.batches, n)
        self.batches.remove(batch)
        self._mark(batch, answers)

    @precondition(lambda self: any(row.status == "pending" for row in self.rows.values()))
    @rule(answers=some_answers, failed_before=st.booleans())
    def relay_is_overtaken(self, answers: list[str], failed_before: bool) -> None:
        """A relay stops after the broker's answer; another one sends its rows, and then the first one goes on."""
        self.the_outbox_ages(failed_before)
        kept = len(self.batches)
        self.relay_leases(None)
        self.the_outbox_ages(failed_before)
        self.relay_leases(["confirmed"])
        for batch in self.batches[kept:]:
            self.batches.remove(batch)
            self._mark(batch, answers)

    def _mark(self, batch: Sequence[Any], answers: list[str]) -> None:
        result, waiting = Published(), []
        for index, reserved in enumerate(batch):
            answer = answers[index % len(answers)]
            row = self.rows.get(reserved.id)
            own = answer == "own fault"
            if answer == "confirmed":
                result.confirmed.append(reserved.message_id)
            elif answer != "none":
                result.refused[reserved.message_id] = Refusal(answer, own)
            if row is None or row.status != "pending":
                continue
            if (row.generation, row.resends, row.attempts) != (
                reserved.generation,
                reserved.resends,
                reserved.attempts,
            ):
                continue  # about an earlier publication
            row.reserved = False
            if answer == "confirmed":
                row.status, row.overdue, row.recent = "published", False, True
            elif own and reserved.attempts + 1 >= relaying.OWN_ERRORS:
                row.status, row.settled, row.attempts = "failed", True, row.attempts + 1
                self._store(Letter(row.id, row.fingerprint, "unpublishable", "relay", None, row=reserved.id))
            elif answer != "none":
                row.attempts, row.available = row.attempts + 1, False
                waiting.append(reserved.message_id)
        self.relay._mark(self.runtime, list(batch), result)
        # its back-off is a second, which may or may not have passed by the next step
        self.connection.exec_driver_sql(
            "UPDATE idempotency.outbox SET available_at = clock_timestamp() + interval '10 min' "
            "WHERE status = 'pending' AND message_id = ANY(%(ids)s)",
            {"ids": waiting},
        )

    @rule(empty=st.sampled_from([True, True, False]), late=st.booleans())
    def resend(self, empty: bool, late: bool) -> None:
        """With queues that are empty, or that hold everything; at once, or long after the publish."""
        if late:
            self.the_outbox_ages(failed_before=False)
        settled = [row for row in self.rows.values() if self._is_over(row)]
        for row in settled:
            row.settled = True
        for number, row in self.rows.items():
            record = self.records.get(row.id)
            if record is None or record.fingerprint == row.fingerprint:
                continue
            if row.status == "published" and not row.settled and row.overdue:
                row.settled = True
                reason = "fingerprint_mismatch"
                self._store(Letter(row.id, row.fingerprint, reason, "relay", record.generation, row=number))
        lacking = [row for number, row in self._newest() if self._waits(number, row) and row.overdue] if empty else []
        done = resend_lost(self.app, lambda queue: 0 if empty else 1000)
        assert (done.settled, done.resent) == (len(settled), len(lacking))
        for row in lacking:
            row.status, row.origin, row.available, row.reserved = "pending", "resend", True, False
            row.resends += 1

    def _is_over(self, row: Row) -> bool:
        record = self.records.get(row.id)
        return (
            row.status == "published"
            and not row.settled
            and record is not None
            and record.has_ended
            and record.fingerprint == row.fingerprint
        )

    def _newest(self) -> Iterable[tuple[int, Row]]:
        open_ = [(number, row) for number, row in self.rows.items() if not row.settled and row.status != "failed"]
        open_.sort(key=lambda each: each[1].generation)  # and by number, in which they are
        return {(row.id, row.fingerprint): (number, row) for number, row in open_}.values()

    def _waits(self, number: int, row: Row) -> bool:
        record = self.records.get(row.id)
        return (
            row.status == "published"
            and (record is None or (record.status == "released" and record.due))
            and not any((letter.status, letter.row) == ("open", number) for letter in self.letters.values())
        )
