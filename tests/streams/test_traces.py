"""A message of a stream in the trace of whoever has sent it; many that share a transaction, linked to theirs."""

from __future__ import annotations

import pytest

from tests.support.collector import collecting
from tests.support.processes import eventually
from tests.support.streaming import Streaming

TRACES = ("ab" * 16, "cd" * 16, "ef" * 16)
SENDER = "12" * 8


def context(trace: str) -> str:
    return f"00-{trace}-{SENDER}-01"


@pytest.mark.long
def test_one_message_is_in_its_trace_and_many_are_linked_to_theirs(rabbit: Streaming) -> None:
    with collecting() as collector:
        rabbit.environment |= {"TRACES": "tests.support.telemetry:set_up", **collector.environment("stream")}
        for number, trace in enumerate(TRACES[:2]):
            rabbit.broker.publish({"account": f"a{number}"}, traceparent=context(trace))
        rabbit.broker.publish({"account": "a2", "how": "permanent"}, traceparent=context(TRACES[2]))
        rabbit.start(rabbit.handler())
        rabbit.wait_until_handled()
        spans = collector.spans
        eventually(lambda: len([each for each in spans if each.name.startswith("process ")]) >= 3)
        eventually(lambda: [span for span in spans if span.name == "attempt"])
    alone = [span for span in spans if span.name.startswith("process ") and span.trace == TRACES[2]]
    assert [span.parent for span in alone] == [SENDER]
    (attempt,) = [span for span in spans if span.name == "attempt"]
    assert (attempt.parent, attempt.attributes["idempotency.outcome"]) == (alone[0].id, "failed")
    shared = [span for span in spans if "messaging.batch.message_count" in span.attributes]
    assert shared[0].links == tuple((trace, SENDER, "message") for trace in TRACES)
    assert {span.attributes["messaging.system"] for span in (*alone, *shared)} == {"rabbitmq"}
    assert b"no such account" not in b"".join(collector.raw)
