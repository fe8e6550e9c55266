"""What a handler leaves in the transaction that messages of a stream share: nothing that another message gets."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import BigInteger, Column, MetaData, Table, Text, insert

from idempotency.streams import Handling
from tests.streams.conftest import kafka_cluster as kafka_cluster
from tests.streams.conftest import make_streaming as make_streaming
from tests.streams.conftest import rabbit as rabbit
from tests.support import bank, streaming
from tests.support.streaming import Handler, Streaming

ENTRIES = Table("entries", MetaData(), Column("account", Text), Column("amount", BigInteger))


def translated(stream: Handling, event: Any) -> str:
    if event["account"] == "a0":
        stream.session.connection(execution_options={"schema_translate_map": {None: "other"}})
    stream.session.execute(insert(ENTRIES), {"account": event["account"], "amount": 1})
    return str(event["account"])


def saved(stream: Handling, event: Any) -> str:
    account = event["account"]
    if account == "a0":
        stream.session.connection().begin_nested()
    else:
        stream.session.execute(bank.INSERT, {"account": account, "amount": 7})
        stream.session.rollback()
    stream.session.execute(bank.INSERT, {"account": account, "amount": 1})
    return str(account)


class Mine(Handler):
    """One of these two, also where the process that is forked from has not imported this."""

    def declared(self) -> Any:
        streaming.HANDLERS.update({"translated": translated, "saved": saved})
        return super().declared()


@pytest.mark.long
def test_options_of_the_connection_hold_for_one_message(rabbit: Streaming) -> None:
    with rabbit.engine.connect() as connection:
        connection.exec_driver_sql(
            "CREATE SCHEMA other; CREATE TABLE other.entries (LIKE public.entries INCLUDING ALL)"
        )
    rabbit.broker.publish_many(3)
    rabbit.start(Mine(rabbit.broker.source(), handler="translated"))
    rabbit.wait_until_handled()
    assert rabbit.entries() == ["a1", "a2"]
    assert [row.account for row in rabbit.query("SELECT account FROM other.entries")] == ["a0"]


@pytest.mark.long
def test_a_savepoint_that_one_has_left_is_rolled_back_to_by_no_other(rabbit: Streaming) -> None:
    rabbit.broker.publish_many(3)
    rabbit.start(Mine(rabbit.broker.source(), handler="saved"))
    rabbit.wait_until_handled()
    assert rabbit.entries() == ["a0", "a1", "a2"]
