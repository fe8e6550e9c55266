"""What endpoints answer to do harm, and deliveries beside a purge or behind others."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Engine, text

from idempotency.application import close_runtime
from idempotency.attempt.runtime import Runtime
from idempotency.operate import webhooks as operate
from idempotency.store import forgetting
from idempotency.store import webhooks as stored
from idempotency.testing import Outbox
from idempotency.webhooks import posting
from idempotency.webhooks.posting import Sender
from tests.support.receiver import Receiver, answering, dripping
from tests.support.tasks import transactional


def test_a_chunk_of_a_negative_size_does_not_lift_the_limit_of_an_answer(
    receiver: Receiver,
    sender: Sender,
) -> None:
    """`http.client` takes a size of "-1" for "to the end"."""
    sent = 64 * 1024 * 1024

    def body() -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n"
        for _ in range(sent // 65536):
            yield b"x" * 65536

    with dripping(str(receiver.ca_file).removesuffix(".crt"), body) as url:
        tracemalloc.start()
        try:
            assert sender.post(url, {}, "{}").status == 200
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert most < 8 * 1024 * 1024


def test_whatever_a_chunk_size_is_the_status_counts(receiver: Receiver, sender: Sender) -> None:

    def body() -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nxxxxx\r\n0\r\n\r\n"

    with dripping(str(receiver.ca_file).removesuffix(".crt"), body) as url:
        assert sender.post(url, {}, "{}").status == 200


@pytest.mark.parametrize(
    "retry_after", ["Mon, 01 Jan 99999999999999999999 00:00:00 GMT", "Fri, 31 Dec 9999 23:59:59 -2359", "1" * 5000]
)
def test_an_odd_retry_after_raises_nothing(receiver: Receiver, sender: Sender, retry_after: str) -> None:
    """A year that no clock has, or a number without end."""
    receiver.answer = answering(503, **{"Retry-After": retry_after})
    assert sender.post(receiver.url, {}, '{"type": "x"}').status == 503


def test_a_redelivery_beside_the_purge_is_not_deleted_by_it(
    happen: Callable[..., str],
    register: Callable[..., operate.NewEndpoint],
    outbox: Outbox,
    runtime: Runtime,
    engine: Engine,
    receiver: Receiver,
    rows: Callable[[str], Any],
) -> None:
    register()
    happen()
    outbox.run()
    (delivery,) = rows("deliveries")
    assert delivery.status == "delivered"
    with engine.begin() as connection:
        connection.execute(text("UPDATE idempotency.webhook_deliveries SET ended_at = ended_at - interval '900 days'"))
    service = runtime.settings.service

    with transactional(engine).begin() as connection, transactional(engine).begin() as purging:
        assert stored.reopen(connection, service, delivery.id) is not None
        assert not forgetting.deliveries(purging, service, retention=86400.0, limit=100)
    assert [each.status for each in rows("deliveries")] == ["waiting"]


@pytest.mark.long
def test_waiting_for_another_attempt_uses_up_no_delivery(
    shop: Celery,
    happen: Callable[..., str],
    register: Callable[..., operate.NewEndpoint],
    outbox: Outbox,
    engine: Engine,
    rows: Callable[[str], Any],
) -> None:
    """While an endpoint fails, its deliveries wait for each other, for longer than `defer_budget`."""
    endpoint = register()
    happen()
    with engine.connect() as connection:
        connection.execute(text("UPDATE idempotency.webhook_endpoints SET failing_since = clock_timestamp()"))
        under_way = """
            INSERT INTO idempotency.webhook_deliveries (id, tenant, service, endpoint_id, task, event_type, body)
            SELECT 'msg_other', tenant, service, id, 'webhooks.deliver', 'order.paid', '{}'
            FROM idempotency.webhook_endpoints WHERE id = :id;
            INSERT INTO idempotency.webhook_attempts (delivery_id, endpoint_id, tenant, redelivery, begun_at)
            SELECT 'msg_other', id, tenant, 0, clock_timestamp() + interval '1 hour'
            FROM idempotency.webhook_endpoints WHERE id = :id"""
        for statement in under_way.split(";"):
            connection.execute(text(statement), {"id": endpoint.id})
    shop.conf.update(idempotency_defer_budget=1.0)  # as after 12 hours
    close_runtime(shop)
    with pytest.raises(AssertionError, match="130 deliveries"):  # it waits for ever
        outbox.run(may_fail=True, limit=130)
    query = "SELECT count(*) FROM idempotency.webhook_attempts WHERE delivery_id <> 'msg_other'"
    with engine.connect() as connection:
        assert connection.execute(text(query)).scalar_one() == 0
    assert {each.status for each in rows("deliveries")} == {"waiting"}


@pytest.mark.long
def test_names_that_hang_hold_up_no_endpoint_given_by_address(
    receiver: Receiver,
    sender: Sender,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An address needs no look-up, so name servers that hang do not hold it up."""
    monkeypatch.setattr(posting, "RESOLVE_TIMEOUT", 0.2)
    hangs = threading.Event()
    slow = replace(sender, resolve=lambda host, port: (hangs.wait(20) and []) or [])
    try:
        for number in range(posting.RESOLVERS):
            slow.post(f"https://hooks{number}.example/", {}, "{}")
        assert sender.post(receiver.url, {}, '{"type": "x"}').status == 204
    finally:
        hangs.set()


def test_an_answer_to_a_challenge_that_nests_is_taken_as_plain_text() -> None:
    from idempotency.webhooks.challenge import _answered

    assert _answered(b"[" * 4000) == b"[" * 4000


@pytest.mark.long
def test_an_endpoint_that_is_slow_and_accepts_has_not_all_workers(
    happen: Callable[..., str],
    register: Callable[..., operate.NewEndpoint],
    outbox: Outbox,
    runtime: Runtime,
    engine: Engine,
    rows: Callable[[str], Any],
) -> None:
    register()
    for _ in range(32):
        happen()
    while outbox.waiting[0].task == "webhooks.fan_out":
        row = outbox._next()
        assert row is not None
        outbox._deliver(row)
    under_way = 0
    for delivery in rows("deliveries"):
        with transactional(engine).begin() as connection:
            begun = stored.begin_attempt(connection, delivery.id, 0, most=10, longest=20.0)
        under_way += isinstance(begun, stored.Begun)
    assert under_way == stored.AT_ONCE
