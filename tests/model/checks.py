"""What must hold after each step: everything stored is the model, and nothing accepted is forgotten."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from hypothesis.stateful import invariant
from sqlalchemy import text

from idempotency.wire.keys import OperationId
from tests.model.world import World

STORED = text("""
SELECT (SELECT coalesce(json_agg(json_build_array(
            tenant, task, key, status, fingerprint, token, generation, attempts, duplicates, effects,
            revoked_generation, result, error::jsonb ->> 'code', coalesce(locked_until < clock_timestamp(), false),
            coalesce(available_at <= clock_timestamp(), false), coalesce(expires_at < clock_timestamp(), false),
            fence)), '[]') FROM idempotency.records),
       (SELECT coalesce(json_agg(json_build_array(
            id, tenant, task, key, fingerprint, origin, status,
            status = 'pending' AND available_at <= clock_timestamp(),
            status = 'pending' AND coalesce(relayed_until > clock_timestamp(), false),
            status = 'published' AND published_at < clock_timestamp() - interval '1 hour',
            settled_at IS NOT NULL, attempts, resends, generation, message_id) ORDER BY id), '[]') FROM idempotency.outbox),
       (SELECT coalesce(json_agg(json_build_array(
            id, tenant, task, key, fingerprint, reason, source, generation, status,
            coalesce(closed_at < clock_timestamp() - interval '90 days', false), outbox_id)
            ORDER BY id), '[]') FROM idempotency.dead_letters),
       (SELECT coalesce(json_agg(account), '[]') FROM entries),
       (SELECT coalesce(json_agg(account), '[]') FROM failures)
""")


class Checks(World):
    """Compared after every step."""

    @invariant()
    def check(self) -> None:
        self.what_is_stored_is_the_model()
        self.nothing_accepted_is_forgotten()
        self.a_failure_has_its_letter()

    def what_is_stored_is_the_model(self) -> None:
        stored = self.connection.execute(STORED).one()
        seen: dict[OperationId, int] = {}
        for tenant, task, key, *columns, fence in stored[0]:
            id = OperationId(tenant, task, key)
            columns[6] = {name: effect["state"] for name, effect in columns[6].items()}
            assert id in self.records, f"unexpected record {id} {columns}"
            assert tuple(columns) == self.records[id].shown(), str(id)
            seen[id] = fence
        assert seen.keys() == self.records.keys()
        for id, fence in seen.items():
            record = self.records[id]
            if record.fence is None:
                assert fence > self.highest.get(id, 0)
                self.highest[id] = record.fence = fence
            assert fence == record.fence

        rows = {number: (id_of(*id), *columns) for number, *id, columns in split(stored[1], 3)}
        self.events = {number: columns[-1] for number, columns in rows.items()}
        adopt(self.rows, self.new_rows, {number: columns[:-1] for number, columns in rows.items()})
        letters = {number: (id_of(*id), *columns) for number, *id, columns in split(stored[2], 3)}
        adopt(self.letters, self.new_letters, {number: columns[:-1] for number, columns in letters.items()})
        for number, columns in letters.items():
            self.letters[number].row = columns[-1]
        assert Counter(stored[3]) == self.entries
        assert Counter(stored[4]) == self.failures

    def nothing_accepted_is_forgotten(self) -> None:
        """What was accepted has a record, is on its way, or is known to people; whatever the transitions were."""
        for id, mine in self.accepted - self.discarded:
            record = self.records.get(id)
            has_record = record is not None and (record.fingerprint == mine or self._is_former(id, mine))
            is_on_its_way = any(
                (row.id, row.fingerprint, row.settled) == (id, mine, False) for row in self.rows.values()
            )
            is_told = any(
                (letter.id, letter.fingerprint, letter.status) == (id, mine, "open") for letter in self.letters.values()
            )
            assert has_record or is_on_its_way or is_told, f"lost: {id} {mine}"

    def a_failure_has_its_letter(self) -> None:
        """One for each generation, open until a person has closed it."""
        letters = Counter(
            (letter.id, letter.fingerprint, letter.generation, letter.reason)
            for letter in self.letters.values()
            if letter.status == "open" and letter.generation is not None
        )
        assert not [kind for kind, number in letters.items() if number > 1]
        told = {kind[:3] for kind in letters}
        for id, record in self.records.items():
            if record.status == "failed":
                assert (id, record.fingerprint, record.generation) in told | self.discarded, f"no letter: {id}"


def id_of(tenant: str | None, task: str | None, key: str | None) -> OperationId | None:
    return None if tenant is None or task is None or key is None else OperationId(tenant, task, key)


def split(rows: Iterable[list[Any]], ids: int) -> Iterator[tuple[Any, ...]]:
    for number, *columns in rows:
        yield number, *columns[:ids], columns[ids:]


def adopt(known: dict[int, Any], new: list[Any], stored: dict[int, tuple[Any, ...]]) -> None:
    """Give what the model expects to be new its id, and compare everything."""
    # ids that one statement gives out to several operations may be in any order, and a program has to be repeatable
    for number in sorted(stored.keys() - known.keys(), key=lambda number: (str(stored[number][0]), number)):
        found = next((each for each in new if each.shown() == stored[number]), None)
        assert found is not None, f"unexpected: {stored[number]}; expected as new: {[each.shown() for each in new]}"
        new.remove(found)
        known[number] = found
    assert not new, f"missing: {[each.shown() for each in new]}"
    assert {number: each.shown() for number, each in known.items()} == stored
