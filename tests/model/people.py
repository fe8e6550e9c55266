"""What people do after they were shown an operation or a letter, which may have changed since."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import precondition, rule
from sqlalchemy import text

from idempotency.attempt.effects import Happened
from idempotency.errors import ChangeRefused, DiscardRefused, IdempotencyError, OperationNotFound, ReplayRefused
from idempotency.operate import discard
from idempotency.operate.archive import archive, restore
from idempotency.operate.cancel import cancel
from idempotency.operate.change import Change, Shown, read
from idempotency.operate.edit import edit
from idempotency.operate.people import Person
from idempotency.operate.release import release
from idempotency.operate.resolve import resolve_effect
from idempotency.store import claims, dead_letters
from idempotency.wire.keys import OperationId
from tests.model.choices import fingerprint, nth, some_amount, some_id, which
from tests.model.claims import Claims
from tests.model.expected import Letter, Record, Row


class People(Claims):
    """What people do."""

    @rule(id=some_id)
    def look(self, id: OperationId) -> None:
        try:
            shown = read(self.connection, id, self.runtime.settings.service)
        except OperationNotFound:
            assert id not in self.records
            assert not any(row.id == id and not row.settled and row.status != "failed" for row in self.rows.values())
        else:
            record = self.records.get(id)
            assert shown.status == ("accepted" if record is None else record.status)
            self.seen.append(shown)

    @precondition(lambda self: self.seen)
    @rule(n=which, what=st.sampled_from(["cancel", "cancel", "release", "resolve"]))
    def change(self, n: int, what: str) -> None:
        """What a person was shown; it may have changed since."""
        shown = nth(self.seen, n)
        match what:
            case "cancel":
                self._cancel(shown)
            case "release":
                self._take_from_its_holder(shown)
            case "resolve":
                self._resolve_effect(shown)

    def _cancel(self, shown: Shown) -> None:
        record = self.records.get(shown.id)
        owed = [row for row in self.rows.values() if row.id == shown.id and not row.settled and row.status != "failed"]
        if shown.status == "accepted":
            may = record is None and bool(owed)
        else:
            may = record is not None and (record.status, record.fence) == (shown.status, shown.fence)
            may = may and shown.status == "released"
            may = may and record is not None and not (record.outside("begun") or record.outside("done"))
        with refused(not may, ChangeRefused):
            cancel(self.app, shown, Change("ana", "no longer wanted"))
        if may:
            if record is None:
                record = self.records[shown.id] = Record("released", owed[0].fingerprint, attempts=0)
            record.end("failed", code="cancelled")
            record.fence = None
            for row in self.rows.values():  # what was to come later goes at once
                if (row.id, row.fingerprint, row.status) == (shown.id, record.fingerprint, "pending"):
                    row.available = True
            for letter in self.letters.values():  # what its message has died of is over
                is_over = shown.status == "accepted" or letter.reason == "unpublishable"
                if letter.id == shown.id and letter.status == "open" and is_over:
                    letter.status = "replayed"
            self.failures[shown.id.key] += 1
            self._store(Letter(shown.id, record.fingerprint, "cancelled", "operation", record.generation), ends=True)

    def _take_from_its_holder(self, shown: Shown) -> None:
        record = self.records.get(shown.id)
        may = record is not None and (record.status, record.fence) == (shown.status, shown.fence)
        may = may and shown.status == "started"
        with refused(not may, ChangeRefused):
            release(self.app, shown, Change("ana", "hangs"))
        if record is not None and may:
            record.release(due=True)
            self._supersede(shown.id, record.fingerprint)
            self.new_rows.append(Row(shown.id, record.fingerprint, "retry", generation=record.generation))

    def _resolve_effect(self, shown: Shown) -> None:
        record = self.records.get(shown.id)
        may = (
            record is not None
            and (shown.status, record.status, record.fence) == ("failed", "failed", shown.fence)
            and "charge" not in record.steps
            and (record.effects.get("charge") == "begun" or "charge" in record.resolved)
        )
        with refused(not may, ChangeRefused):
            resolve_effect(self.app, shown, "charge", Happened(1), Change("ana", "looked"))
        if record is not None and may:
            record.effects["charge"] = "done"
            record.resolved.add("charge")
            record.fence = None

    @rule(id=some_id, amount=some_amount, remembered=st.booleans())
    def revoke(self, id: OperationId, amount: int, remembered: bool) -> None:
        record = self.records.get(id)
        may = (
            record is not None
            and record.fingerprint == fingerprint(id, amount)
            and not record.has_ended
            and (record.revoked is None or not remembered)
        )
        assert (
            claims.revoke(
                self.connection,
                id,
                fingerprint(id, amount),
                service=self.runtime.settings.service,
                remembered=remembered,
            )
            == may
        )
        if record is not None and may:
            record.revoked = record.generation

    @precondition(lambda self: self.letters)
    @rule(n=which, twice=st.booleans())
    def replay(self, n: int, twice: bool) -> None:
        number = nth(list(self.letters), n)
        for _ in range(1 + twice):
            self._replay(number)

    def _replay(self, number: int) -> None:
        letter = self.letters[number]
        record = None if letter.id is None else self.records.get(letter.id)
        reopens = (
            record is not None
            and (record.status, record.generation) == ("failed", letter.generation)
            and record.fingerprint == letter.fingerprint
        )
        # its delivery could not be published, and nothing else brings it
        waits = record is not None and record.status == "released" and letter.reason == "unpublishable"
        may = letter.status == "open" and letter.fingerprint is not None and (reopens or waits or record is None)
        # its message is for a task that is gone, whatever its row says
        may = may and not self._is_archived(number) and letter.reason != "unknown_task"
        with refused(not may, ReplayRefused), self.transaction() as connection:
            dead_letters.replay(connection, number, service=self.runtime.settings.service, app=self.app)
        if not may:
            return
        if record is not None and reopens:
            record.release(due=True)
            if record.revoked is None:  # what a worker remembers was revoked before
                record.revoked = record.generation
            record.generation += 1
            record.attempts, record.code = 0, None
            record.expired = False
        letter.status = "replayed"
        assert letter.id is not None
        assert letter.fingerprint is not None
        generation = 1 if record is None else record.generation
        row = None if letter.row is None else self.rows.get(letter.row)
        if row is not None and row.status == "failed":  # goes again itself, in its place
            row.status, row.origin, row.attempts, row.generation = "pending", "replay", 0, generation
            row.available, row.settled, row.reserved, row.resends = True, False, False, 0
        else:
            self.new_rows.append(Row(letter.id, letter.fingerprint, "replay", generation=generation))

    @precondition(lambda self: self.letters)
    @rule(n=which, asks=st.booleans(), approves=st.sampled_from(["ana", "bo", "bo", None]))
    def discard(self, n: int, asks: bool, approves: str | None) -> None:
        number = nth(list(self.letters), n)
        if asks:
            self._ask_to_discard(number, "ana")
        if approves is not None:
            self._discard(number, approves)

    def _ask_to_discard(self, number: int, person: str) -> None:
        letter = self.letters[number]
        may = letter.status == "open" and letter.asked_by is None and not self._is_open(letter)
        may = may and not self._is_archived(number)
        with refused(not may, DiscardRefused), self.transaction() as connection:
            discard.request(connection, Person(person, "operator"), number, "not worth it")
        if may:
            letter.asked = (person, letter.reason, letter.generation)

    def _discard(self, number: int, person: str) -> None:
        letter = self.letters[number]
        is_needed = self._is_the_last_way_on(letter) or self._is_the_last_way_to_begin(letter)
        may = letter.status == "open" and letter.asked_by not in (None, person) and not is_needed
        with refused(not may, DiscardRefused), self.transaction() as connection:
            discard.approve(connection, Person(person, "admin"), number, app=self.app)
        if not may:
            return
        letter.status = "discarded"
        self.discarded |= {(letter.id, letter.fingerprint), (letter.id, letter.fingerprint, letter.generation)}
        for row_number, row in self.rows.items():
            record = self.records.get(row.id)
            without_row = letter.row is None and (row.id, row.fingerprint) == (letter.id, letter.fingerprint)
            named = row_number == letter.row or without_row
            if named and row.status == "published" and (record is None or record.fingerprint != row.fingerprint):
                row.settled = True

    @precondition(lambda self: self.letters)
    @rule(n=which, restores=st.booleans())
    def put_away(self, n: int, restores: bool) -> None:
        """Into the archive, or out of it: nothing else changes, as all checks say."""
        number = nth(list(self.letters), n)
        letter, was = self.letters[number], self._is_archived(number)
        if restores:
            may = letter.status == "open" and was
        else:
            may = letter.status == "open" and not was and letter.asked_by is None and not self._is_open(letter)
        with refused(not may, ChangeRefused):
            (restore if restores else archive)(self.app, number, Change("ana", "not now", is_verified=True))
        assert self._is_archived(number) == (was if not may else not restores)

    @precondition(lambda self: self.letters)
    @rule(n=which)
    def edit(self, n: int) -> None:
        """The other amount, where nothing has been done yet."""
        number = nth(list(self.letters), n)
        letter, id = self.letters[number], self.letters[number].id
        amount = 2 if id is not None and letter.fingerprint == fingerprint(id, 1) else 1
        may = self._may_edit(number)
        key = "" if id is None else id.key
        corrected = json.dumps({"kwargs": {"account": key, "amount": amount}})
        # of a task that is not known it takes a token, too
        with refused(not may, IdempotencyError):
            edit(self.app, number, corrected, Change("ana", "a typing error"))
        if not may or id is None:
            return
        old, new = letter.fingerprint, fingerprint(id, amount)
        assert old is not None
        letter.fingerprint = new
        if (record := self.records.get(id)) is not None:
            record.fingerprint = new
        row = None if letter.row is None else self.rows.get(letter.row)
        if row is not None and (not row.settled or row.status == "failed"):
            row.fingerprint = new
        self.former = {
            (other, was): new if other == id and became == old else became
            for (other, was), became in [*self.former.items(), ((id, old), new)]
            if (other, was) != (id, new)
        }
        self.accepted.discard((id, old))
        self.accepted.add((id, new))

    def _may_edit(self, number: int) -> bool:
        letter = self.letters[number]
        if letter.id is None or letter.status != "open" or letter.asked_by is not None or self._is_archived(number):
            return False
        if letter.reason in ("fingerprint_mismatch", "unknown_task"):
            return False
        others = [each for each in self.letters.values() if each is not letter and each.id == letter.id]
        if any(each.status == "open" and each.reason != "fingerprint_mismatch" for each in others):
            return False
        if any(row.id == letter.id and not row.settled and at != letter.row for at, row in self.rows.items()):
            return False
        record = self.records.get(letter.id)
        if record is None:
            return letter.generation is None
        return (
            (record.status, record.generation) == ("failed", letter.generation)
            and record.fingerprint == letter.fingerprint
            and not record.effects
        )

    def _is_archived(self, number: int) -> bool:
        query = text("SELECT archived_at IS NOT NULL AND status = 'open' FROM idempotency.dead_letters WHERE id = :id")
        return bool(self.connection.execute(query, {"id": number}).scalar_one())

    def _is_the_last_way_on(self, letter: Letter) -> bool:
        """Whether its request has an effect of unknown outcome, is running, or has no row that will deliver it."""
        if self._is_open(letter):
            return True
        record = self._record_of(letter)
        if record is None or record.has_ended:
            return False
        request = (letter.id, record.fingerprint)
        waiting = [row for row in self.rows.values() if not row.settled and row.status != "failed"]
        return record.status == "started" or request not in [(row.id, row.fingerprint) for row in waiting]

    def _is_the_last_way_to_begin(self, letter: Letter) -> bool:
        """Whether its operation, whose task has an `on_failed`, has not begun and has no other row that will deliver it."""
        row = None if letter.row is None else self.rows.get(letter.row)
        if letter.id is None or letter.id in self.records or row is None or row.id != letter.id:
            return False
        others = [each for each in self.rows.values() if each is not row and each.id == letter.id]
        is_unsettled = not row.settled or row.status == "failed"
        return is_unsettled and all(each.settled or each.status == "failed" for each in others)

    def _is_open(self, letter: Letter) -> bool:
        """Whether its request has an effect of unknown outcome."""
        record = self._record_of(letter)
        return record is not None and record.outside("begun")

    def _record_of(self, letter: Letter) -> Record | None:
        """The record of its request."""
        record = None if letter.id is None else self.records.get(letter.id)
        return None if record is None or letter.fingerprint not in (None, record.fingerprint) else record


@contextlib.contextmanager
def refused(is_refused: bool, error: type[Exception]) -> Iterator[None]:
    if is_refused:
        with pytest.raises(error):
            yield
    else:
        yield
