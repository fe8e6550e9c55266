"""Time: leases, delays and retentions are over when a rule says so."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis.stateful import precondition, rule

from idempotency.wire.keys import OperationId
from tests.model.checks import Checks
from tests.support.operations import age


class Ageing(Checks):
    """Time passes by ageing rows."""

    def _age(self, id: OperationId) -> None:
        record = self.records.get(id)
        if record is None or record.has_ended:
            return
        if record.status == "started":
            age(self.connection, id, locked_until=-3600)
            record.lease_over = True
        else:
            age(self.connection, id, available_at=-3600)
            record.due = True

    def _retention_passes(self) -> None:
        for id, record in self.records.items():
            if record.has_ended:
                age(self.connection, id, expires_at=-3600)
                record.expired = True
        self.connection.exec_driver_sql(
            "UPDATE idempotency.outbox SET settled_at = settled_at - interval '90 days', "
            "published_at = published_at - interval '2 days'"
        )
        for row in self.rows.values():
            row.old = row.settled and row.status != "pending"
            row.recent, row.overdue = False, row.overdue or row.status == "published"

    @precondition(lambda self: self.rows)
    @rule(failed_before=st.sampled_from([False, False, True]))
    def the_outbox_ages(self, failed_before: bool) -> None:
        """Delays and relays' reservations are over, what was published was so long ago; or most tries are used up."""
        self.connection.exec_driver_sql(
            "UPDATE idempotency.outbox SET available_at = clock_timestamp() - interval '2 hours', "
            "relayed_until = NULL, published_at = published_at - interval '2 hours'"
        )
        for row in self.rows.values():
            row.available, row.reserved, row.overdue = True, False, True
        if failed_before:
            self.connection.exec_driver_sql("UPDATE idempotency.outbox SET attempts = 4 WHERE status = 'pending'")
            for row in self.rows.values():
                row.attempts = 4 if row.status == "pending" else row.attempts

    @precondition(lambda self: any(letter.status != "open" for letter in self.letters.values()))
    @rule()
    def closed_letters_age(self) -> None:
        self.connection.exec_driver_sql(
            "UPDATE idempotency.dead_letters SET closed_at = closed_at - interval '100 days' WHERE status <> 'open'"
        )
        for letter in self.letters.values():
            letter.old = letter.status != "open"
