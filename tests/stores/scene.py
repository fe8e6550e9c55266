"""A store with keys of its own, and what a test does to its records behind the library's back: time passes by ageing them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

from sqlalchemy import text

from idempotency.store import purge
from idempotency.store.answers import Claimed, error_text
from idempotency.stores.dynamodb import DynamoDBStore
from idempotency.stores.redis import RedisStore
from idempotency.stores.store import Answer, Store, StoreBusy, Watch
from idempotency.wire.keys import OperationId
from tests.stores.postgres import PostgresStore
from tests.support.operations import SERVICE, age

LEASE = 60.0
KEEP = 86_400.0
RETENTION = 3600.0
FINGERPRINT = "v1:same"
ERROR = error_text("no_account", "no such account")


def new_id(tenant: str = "default", task: str = "tests.stores.charge") -> OperationId:
    return OperationId(tenant, task, uuid4().hex)


class Ageing(Protocol):
    """Makes time pass for one operation."""

    def lease_over(self, id: OperationId) -> None: ...
    def due(self, id: OperationId) -> None: ...
    def forgotten(self, id: OperationId) -> None: ...


@dataclass
class Scene:
    """One store, its ageing, and claims as deliveries make them."""

    store: Store
    ageing: Ageing
    # what each message has seen, by its key: a second claim by the same message is told
    seen: dict[OperationId, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.store.name

    def claim(
        self,
        id: OperationId,
        *,
        token: str | None = None,
        fingerprint: str = FINGERPRINT,
        also: tuple[str, ...] = (),
        lease: float = LEASE,
        holder: str = "host|1",
        seen: str = "",
        patience: float = math.inf,
        rest: Callable[[float], object] = time.sleep,
    ) -> Answer:
        return self.store.claim(
            id,
            token=token or uuid4().hex,
            fingerprints=[fingerprint, *also],
            holder=holder,
            lease=lease,
            keep=KEEP,
            watch=Watch(seen, rest, patience),
        )

    def claim_again(self, id: OperationId, **options: Any) -> Answer:
        """Claim as a message that comes back: if the operation is held, once more with what was seen."""
        answer = self.claim(id, **options)
        return self.claim(id, seen=answer.seen, **options) if isinstance(answer, StoreBusy) and answer.seen else answer

    def started(self, id: OperationId | None = None, **options: Any) -> Claimed:
        answer = self.claim(id or new_id(), **options)
        assert isinstance(answer, Claimed), answer
        return answer

    def taken_over(self, id: OperationId, **options: Any) -> Claimed:
        """The claim of another process, once the lease is over."""
        self.ageing.lease_over(id)
        answer = self.claim_again(id, **options)
        assert isinstance(answer, Claimed), answer
        return answer

    def released(self, id: OperationId | None = None, *, delay: float = 600.0, give_back: bool = False) -> Claimed:
        held = self.started(id)
        assert self.store.release(held, delay=delay, keep=KEEP, give_back=give_back)
        return held

    def completed(self, id: OperationId | None = None, result: str = '{"b": 1, "a": 2}') -> Claimed:
        held = self.started(id)
        assert self.store.complete(held, result, retention=RETENTION)
        return held

    def failed(self, id: OperationId | None = None) -> Claimed:
        held = self.started(id)
        assert self.store.fail(held, ERROR, retention=RETENTION)
        return held

    def state(self, id: OperationId) -> str | None:
        stored = self.store.read(id)
        return None if stored is None else stored.state


class AgeingPostgres:
    def __init__(self, store: PostgresStore) -> None:
        self._engine = store.engine

    def lease_over(self, id: OperationId) -> None:
        with self._engine.connect() as connection:
            age(connection, id, locked_until=-1)

    def due(self, id: OperationId) -> None:
        with self._engine.connect() as connection:
            age(connection, id, available_at=-1)

    def forgotten(self, id: OperationId) -> None:
        with self._engine.connect() as connection:
            age(connection, id, expires_at=-1)
            # a person has seen to what failed, and nothing is on its way any more
            names = {"tenant": id.tenant, "task": id.task, "key": id.key}
            mine = "WHERE (tenant, task, key) = (:tenant, :task, :key)"
            connection.execute(text(f"DELETE FROM idempotency.dead_letters {mine}"), names)
            connection.execute(text(f"DELETE FROM idempotency.outbox {mine}"), names)
            purge.operations(connection, SERVICE, horizon=0.0, limit=1000)


class AgeingRedis:
    def __init__(self, store: RedisStore) -> None:
        self._store = store

    def lease_over(self, id: OperationId) -> None:
        self._store._client.pexpire(self._store._keys(id)[0], 0)

    due = lease_over

    def forgotten(self, id: OperationId) -> None:
        self._store._client.pexpire(self._store._keys(id)[1], 0)


class AgeingDynamoDB:
    """A watcher of an item waits for its lease, so that is made short. The times are the item's own."""

    def __init__(self, store: DynamoDBStore) -> None:
        self._store = store

    def lease_over(self, id: OperationId) -> None:
        self._set(id, "lease", 0.001)

    def due(self, id: OperationId) -> None:
        self._set(id, "available_at", time.time() - 1)

    def forgotten(self, id: OperationId) -> None:
        self._set(id, "expires_at", time.time() - 1)

    def _set(self, id: OperationId, attribute: str, value: float) -> None:
        self._store._client.update_item(
            TableName=self._store._table,
            Key=self._store._key(id),
            UpdateExpression=f"SET {attribute} = :value",
            ConditionExpression="attribute_exists(id)",
            ExpressionAttributeValues={":value": {"N": repr(value)}},
        )
