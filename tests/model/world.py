"""The library and the model side by side: what both know, and how a transition is made."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from celery import Celery
from hypothesis.stateful import RuleBasedStateMachine
from kombu import Message as BrokerMessage
from kombu.serialization import prepare_accept_content
from sqlalchemy import Connection
from sqlalchemy.exc import DataError

from idempotency.application import runtime_of
from idempotency.attempt.runtime import Runtime
from idempotency.operate.change import Shown
from idempotency.relay.relay import Relay
from idempotency.store.answers import Claimed
from idempotency.wire.delivery import Delivery
from idempotency.wire.headers import KEY_HEADER, TENANT_HEADER
from idempotency.wire.keys import OperationId
from idempotency.wire.message import Message
from tests.model.choices import fingerprint
from tests.model.expected import Holder, Letter, Record, Row

CLEAN = """
WITH a AS (DELETE FROM idempotency.records), b AS (DELETE FROM idempotency.outbox),
     c AS (DELETE FROM idempotency.discards), f AS (DELETE FROM idempotency.former_fingerprints), d AS (DELETE FROM entries), e AS (DELETE FROM failures)
DELETE FROM idempotency.dead_letters
"""


@contextlib.contextmanager
def finishing(runtime: Runtime, matches: bool) -> Iterator[Connection]:
    """A transaction of effects and record; nothing of it stays unless the finishing statement has matched."""
    if matches:
        with runtime.engine.begin() as connection:
            yield connection
    else:
        with pytest.raises(DataError, match="division by zero"), runtime.engine.begin() as connection:
            yield connection


class World(RuleBasedStateMachine):
    """The library and the model, side by side."""

    def __init__(self, app: Celery, connection: Connection) -> None:
        super().__init__()
        self.app, self.connection, self.runtime = app, connection, runtime_of(app)
        connection.exec_driver_sql(CLEAN)
        self.relay = Relay(app)
        self.tokens = 0
        self.records: dict[OperationId, Record] = {}
        self.rows: dict[int, Row] = {}  # by outbox id
        self.letters: dict[int, Letter] = {}
        self.new_rows: list[Row] = []  # the database has not told us their ids yet
        self.new_letters: list[Letter] = []
        self.entries: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.highest: dict[OperationId, int] = {}  # fence, also of records that were purged
        self.events: dict[int, str] = {}
        self.accepted: set[tuple[OperationId, str]] = set()
        self.former: dict[tuple[OperationId, str], str] = {}  # before an edit, and what the record's became
        self.discarded: set[tuple[Any, ...]] = set()  # what people gave up, also where the letter was purged
        # holders that may act, and may have been overtaken
        self.holders: list[Holder] = []
        self.batches: list[Sequence[Any]] = []
        self.seen: list[Shown] = []

    @property
    def queue(self) -> str:
        return str(self.app.conf.task_default_queue)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Connection]:
        with self.runtime.engine.begin() as connection:
            yield connection

    def finishing(self, matches: bool) -> contextlib.AbstractContextManager[Connection]:
        return finishing(self.runtime, matches)

    def message(self, id: OperationId, amount: int) -> Message:
        return Message.composed(
            self.app,
            id.task,
            (),
            {"account": id.key, "amount": amount},
            task_id=f"{id.tenant}-{id.key}-{amount}",
            headers={KEY_HEADER: id.key, TENANT_HEADER: id.tenant},
        )

    def delivery(self, id: OperationId, amount: int) -> Delivery:
        message = self.message(id, amount)
        return Delivery(id, fingerprint(id, amount), {}, "task-id", message.to_text(), message.headers, self.queue)

    def from_broker(self, message: Message, headers: dict[str, Any]) -> BrokerMessage:
        return BrokerMessage(
            body=message.body.encode(),
            headers=headers,
            content_type="application/json",
            content_encoding="utf-8",
            delivery_info={"exchange": "", "routing_key": self.queue},
            accept=prepare_accept_content(["json"]),
            channel=None,
        )

    def _held(self, held: Claimed) -> Record | None:
        """The record, if this claim is still the one that counts."""
        record = self.records.get(held.id)
        if record is None or (record.status, record.fence, record.token) != ("started", held.fence, held.token):
            return None
        return record

    def _is_former(self, id: OperationId, fingerprint: str | None) -> bool:
        """Whether a person has edited its operation since it was asked for with this fingerprint."""
        record = self.records.get(id)
        return record is not None and self.former.get((id, fingerprint or "")) == record.fingerprint

    def _store(self, letter: Letter, *, ends: bool = False) -> bool:
        """Expect a letter, unless one that is open stands for it; one that ends an operation has to be there."""
        known = [*self.letters.values(), *self.new_letters]
        if not ends and any(other.status == "open" and other.is_same_as(letter) for other in known):
            return False
        self.new_letters.append(letter)
        return True
