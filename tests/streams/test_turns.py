"""What one message or one partition does to the others: they have their turns, and what fails is counted."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text

from idempotency.streams import Handling
from tests.streams.conftest import Make
from tests.support.processes import eventually
from tests.support.streaming import Streaming, insert


def loses_its_transaction(streaming: Streaming, stream: Handling) -> None:
    """As with a body that calls a slow server, behind a pooler that ends idle transactions."""
    backend = stream.session.execute(text("SELECT pg_backend_pid()")).scalar_one()
    with streaming.engine.connect() as another:
        another.execute(text(f"SELECT pg_terminate_backend({backend}, 2000)"))


@pytest.mark.parametrize("neighbours", [pytest.param(0, marks=pytest.mark.long), 3])
def test_a_handler_that_loses_its_transaction_at_the_end_is_counted_as_any_error(
    rabbit: Streaming, neighbours: int
) -> None:
    ran: list[int] = []

    def handle(stream: Handling, event: Any) -> None:
        insert(stream, event["account"])
        if event["account"] == "slow":
            ran.append(stream.message.offset)
            loses_its_transaction(rabbit, stream)

    rabbit.broker.publish({"account": "slow"})
    accounts = [f"a{number}" for number in range(neighbours)]
    for account in accounts:
        rabbit.broker.publish({"account": account})
    with rabbit.handled_by(handle, max_attempts=2):
        rabbit.wait_until_handled()
    assert len(ran) in (3, 4)  # once or twice together, and two attempts
    assert rabbit.letters() == [("attempts_exhausted", "open")]
    assert rabbit.entries() == accounts


def test_a_partition_whose_turn_ends_in_an_error_keeps_no_other_from_its_own(make_streaming: Make) -> None:
    """The others come first in the next turn, so that one whose every turn ends so costs them a pause, and no more."""
    streaming = make_streaming("rabbitmq", partitions=2)

    def handle(stream: Handling, event: Any) -> None:
        insert(stream, event["account"])
        if event["account"] == "slow":
            loses_its_transaction(streaming, stream)

    with streaming.handled_by(handle) as consumer:
        together = consumer._together

        def never_counted(partition: Any, prepared: Any) -> None:
            try:
                together(partition, prepared)
            finally:
                partition.alone = range(0)

        consumer._together = never_counted  # type: ignore[method-assign]
        eventually(lambda: len(streaming.positions()) == 2)
        streaming.broker.publish({"account": "slow"}, 0)
        eventually(lambda: streaming.positions()[0] == 0)
        for number in range(3):
            streaming.broker.publish({"account": f"b{number}"}, 1)
        eventually(lambda: streaming.positions()[1] == 3, timeout=20)
        assert streaming.entries() == ["b0", "b1", "b2"]
        assert streaming.positions()[0] == 0
