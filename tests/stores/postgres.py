"""Postgres behind the interface of the other stores, so that the same tests are about all of them.

Only for these tests: `IdempotentTask` does not use it, because its record and its effects are one commit.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError

from idempotency.store import claims, ends, operations
from idempotency.store.answers import Busy, Changed, Claimed, Foreign, Renewal, Stale, error_fields
from idempotency.store.ends import FailedEnd
from idempotency.stores.store import AT_ONCE, Answer, StoreBusy, Stored, Watch
from idempotency.wire.keys import OperationId
from tests.support.operations import MESSAGE, SERVICE


class PostgresStore:
    """The library's own statements, each in a transaction of its own."""

    name = "postgres"
    room = 1024 * 1024 * 1024

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def claim(
        self,
        id: OperationId,
        *,
        token: str,
        fingerprints: Sequence[str],
        holder: str,
        lease: float,
        keep: float,
        watch: Watch = AT_ONCE,
    ) -> Answer:
        for _ in range(10):
            with self.engine.connect() as connection:
                answer = claims.claim(
                    connection,
                    id,
                    service=SERVICE,
                    token=token,
                    fingerprint=fingerprints[0],
                    also=fingerprints[1:],
                    message=MESSAGE,
                    holder=holder,
                    lease=lease,
                )
            if isinstance(answer, Busy):
                return StoreBusy(answer.due_in)
            assert not isinstance(answer, Foreign | Stale)
            if not isinstance(answer, Changed):
                return answer
        raise AssertionError("the row has changed ten times under a claim")

    def renew(self, held: Sequence[Claimed], *, lease: float, keep: float) -> dict[str, Renewal]:
        with self.engine.connect() as connection:
            return claims.renew(connection, held, lease)

    def complete(self, held: Claimed, result: str, *, retention: float) -> bool:
        try:
            with self.engine.connect() as connection:
                ends.complete(connection, held, result, retention=retention, lease=60.0)
        except DBAPIError as error:
            if "division by zero" not in str(error):
                raise
            return False
        return True

    def fail(self, held: Claimed, error: str, *, retention: float) -> bool:
        end = FailedEnd(error_fields(error)["code"], error)
        try:
            with self.engine.connect() as connection:
                ends.fail(connection, held, end, retention=retention, lease=60.0)
        except DBAPIError as refused:
            if "division by zero" not in str(refused):
                raise
            return False
        return True

    def release(self, held: Claimed, *, delay: float, keep: float, give_back: bool) -> bool:
        with self.engine.connect() as connection:
            return ends.release(connection, held, delay=delay, error=None, give_back=give_back)

    def drop(self, id: OperationId) -> bool:
        raise NotImplementedError("a person replays a failed operation instead")

    def read(self, id: OperationId) -> Stored | None:
        with self.engine.connect() as connection:
            row = operations.lookup(connection, id, SERVICE)
            if row is None:
                return None
            holder = connection.execute(
                text("SELECT locked_by FROM idempotency.records WHERE (tenant, task, key) = (:tenant, :task, :key)"),
                {"tenant": id.tenant, "task": id.task, "key": id.key},
            ).scalar_one()
        return Stored(
            row.status, row.fence, row.attempts, row.fingerprint, holder or "", row.result, row.error and str(row.error)
        )

    def with_own_connections(self) -> PostgresStore:
        return self

    def close(self) -> None:
        pass
