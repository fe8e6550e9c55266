"""A message under the claim of a process that has died: without a relay, too, its partition goes on as soon as the death is proved."""

from __future__ import annotations

import json
from typing import Any

import pytest

from idempotency.application import settings_of
from idempotency.checks.processes import check_processes
from tests.streams.test_seek import command
from tests.support import bank as banking
from tests.support.crashing import KILL_CHILD
from tests.support.outside import OutsideWorld
from tests.support.processes import eventually
from tests.support.streaming import Streaming, until_gone


def record(streaming: Streaming, key: str) -> Any:
    rows = streaming.query("SELECT * FROM idempotency.records WHERE key = :key", key=key)
    return rows[0] if rows else None


@pytest.mark.long
def test_a_claim_of_a_dead_process_of_this_host_is_freed_without_a_relay(
    rabbit: Streaming, outside: OutsideWorld
) -> None:
    rabbit.environment["LEASE"] = "120"
    rabbit.broker.publish({"account": "a0", "how": "effect", "url": outside.url})
    rabbit.broker.publish({"account": "a1"})
    planned = rabbit.plan("effect.called", KILL_CHILD)
    process = rabbit.start()
    until_gone(planned, process)
    process.kill()
    rabbit.start()
    rabbit.wait_until_handled()
    assert rabbit.entries() == ["a0", "a1"]
    found = record(rabbit, "a0")
    assert (found.status, found.attempts, found.duplicates) == ("completed", 2, 0)
    assert list(outside.acts.values()) == [1]
    assert "stream_claim_freed" in rabbit.logs()


@pytest.mark.long
def test_a_claim_whose_holder_may_live_is_waited_for_and_said(rabbit: Streaming, outside: OutsideWorld) -> None:
    """As that of a process on another host."""
    rabbit.environment["LEASE"] = "6"
    rabbit.broker.publish({"account": "a0", "how": "effect", "url": outside.url})
    planned = rabbit.plan("effect.called", KILL_CHILD)
    process = rabbit.start()
    until_gone(planned, process)
    process.kill()
    elsewhere = "elsewhere|b|n|7|9"
    for table, column in (("records", "locked_by"), ("stream_positions", "owner")):
        rabbit.query(f"UPDATE idempotency.{table} SET {column} = '{elsewhere}' RETURNING 1")
    rabbit.query(
        "UPDATE idempotency.stream_positions SET locked_until = clock_timestamp() - interval '1 s' RETURNING 1"
    )
    rabbit.query("UPDATE idempotency.records SET locked_until = clock_timestamp() + interval '6 s' RETURNING 1")
    process = rabbit.start()
    eventually(lambda: "stream_waits_for_claim" in process.log, what=process.log)
    assert 'holder="elsewhere 7"' in process.log
    ((row,)) = json.loads(command(rabbit, "status", "--json").stdout)
    (claim,) = row["claimed_elsewhere"]
    assert (claim["holder"], claim["messages"]) == ("elsewhere 7", 1)
    assert 0 < claim["lease_left"] <= 6
    said = " ".join(command(rabbit, "status").stdout.split())
    assert "deposits: 1 message is under a claim of elsewhere 7, for" in said
    rabbit.wait_until_handled()
    assert process.log.count("stream_waits_for_claim") == 1
    found = record(rabbit, "a0")
    assert (found.status, found.attempts, found.duplicates) == ("completed", 2, 0)
    assert json.loads(command(rabbit, "status", "--json").stdout)[0]["claimed_elsewhere"] == []


@pytest.mark.long
def test_an_attempt_that_waits_for_its_time_is_not_a_duplicate_after_a_death(rabbit: Streaming) -> None:
    rabbit.environment["RETRY_BASE"] = "3"
    rabbit.broker.publish({"account": "a0", "how": "error"})
    process = rabbit.start()
    eventually(lambda: (found := record(rabbit, "a0")) is not None and found.status == "released", what=process.log)
    process.kill()
    rabbit.start()
    rabbit.wait_until_handled()
    assert record(rabbit, "a0").duplicates == 0


@pytest.mark.long
def test_what_kills_its_processes_and_those_that_would_end_it_is_left_to_the_relay(
    rabbit: Streaming,
) -> None:
    """Its claims are bounded by what the relay ends; freed at once each time, it would only come back faster."""
    rabbit.environment["LEASE"] = "120"
    rabbit.broker.publish({"account": "bad", "how": "kill"})
    for _ in range(2):
        process = rabbit.start(max_attempts=5, batch=1)
        eventually(lambda p=process: p.has_ended, what=process.log)
    rabbit.query("UPDATE idempotency.records SET attempts = 40, spent_at = 6 RETURNING 1")
    process = rabbit.start(max_attempts=5, batch=1)
    eventually(lambda: "stream_waits_for_claim" in process.log, what=process.log)
    assert record(rabbit, "bad").attempts == 40


@pytest.mark.long
def test_streams_without_a_relay_are_a_finding(rabbit: Streaming) -> None:
    def relays() -> list[str]:
        command(rabbit, "status")  # the application as the test wants it
        found = check_processes(banking.app, settings_of(banking.app))
        return [str(each) for each in found if each.subject == "relay"]

    assert relays() == []
    rabbit.handler().declared()
    (line,) = relays()
    assert "none is running, and this application has streams" in line
    rabbit.query(
        "INSERT INTO idempotency.processes (kind, name, host, pid, service, version, queues, started_at, seen_at) "
        "VALUES ('relay', 'relay', 'h', 1, 'bank', '1', '{}', clock_timestamp(), clock_timestamp()) RETURNING 1"
    )
    assert relays() == []
