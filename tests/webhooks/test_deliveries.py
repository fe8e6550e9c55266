"""Deliveries: each event once for each endpoint, under one id, until it is accepted or given up."""

from __future__ import annotations

import json
import os
import signal
import threading
import warnings
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Engine, text
from standardwebhooks import Webhook

from idempotency.attempt.runtime import Runtime
from idempotency.errors import ChangeRefused, OperationNotFound
from idempotency.observe import crash_points
from idempotency.operate import webhooks as operate
from idempotency.operate.cancel import cancel
from idempotency.operate.change import Change, read
from idempotency.store import waking
from idempotency.store import webhooks as stored
from idempotency.testing import Outbox
from idempotency.testing.inline import Ran
from idempotency.webhooks import posting, tasks
from idempotency.webhooks.posting import Answer, Failure
from idempotency.wire.keys import OperationId
from tests.support import operations as op
from tests.support.receiver import Receiver, Request, answering

ANN = Change("ann", "test")
Rows = Callable[[str], Any]
Happen = Callable[..., str]
Register = Callable[..., operate.NewEndpoint]


def step(outbox: Outbox) -> Ran:
    """The next delivery alone."""
    row = outbox._next()
    assert row is not None
    return outbox._deliver(row)[0]


def statuses(rows: Rows) -> list[tuple[str, str | None]]:
    return [(row.status, row.given_up_because) for row in rows("deliveries")]


def attempts(rows: Rows) -> list[Any]:
    return [row.status or row.error for row in rows("attempts")]


def test_an_event_is_delivered_once_to_each_endpoint_that_wants_it(
    happen: Happen, register: Register, outbox: Outbox, receiver: Receiver, rows: Rows
) -> None:
    first, second = register("acme", "order.*", path="/a"), register("acme", "order.paid", path="/b?x=1")
    register("acme", "payment.*", path="/c")
    register("other", "*", path="/d")
    event = happen("order.paid", order_id="o1", name="Zoë")
    outbox.run()
    by_path = {request.path: request for request in receiver.webhooks}
    assert sorted(by_path) == ["/a", "/b?x=1"]
    for path, endpoint in (("/a", first), ("/b?x=1", second)):
        request = by_path[path]
        assert request.id == tasks.delivery_id(event, endpoint.id)
        document = Webhook(endpoint.verifier).verify(request.body, request.headers)
        assert (document["type"], document["data"]) == ("order.paid", {"order_id": "o1", "name": "Zoë"})
    assert (statuses(rows), attempts(rows)) == ([("delivered", None)] * 2, [204, 204])
    assert len({request.id for request in receiver.webhooks}) == 2


@pytest.mark.long
def test_tenants_get_their_own_events_alone(
    happen: Happen, register: Register, outbox: Outbox, receiver: Receiver
) -> None:
    register("acme", path="/acme")
    register("other", path="/other")
    happen(tenant="other", order_id="o1")
    happen(tenant="nobody", order_id="o2")
    outbox.run()
    assert [(request.path, request.document["data"]["order_id"]) for request in receiver.webhooks] == [("/other", "o1")]


@pytest.mark.long
def test_attempts_come_later_and_later_under_one_id_and_then_it_is_given_up(
    happen: Happen, register: Register, outbox: Outbox, receiver: Receiver, engine: Engine, rows: Rows
) -> None:
    register()
    receiver.answer = answering(500)
    happen()
    step(outbox)
    pauses = []
    with engine.connect() as connection:
        for number in range(1, tasks.ATTEMPTS + 1):
            ran = step(outbox)
            assert (len(receiver.webhooks), ran.status) == (
                number,
                "released" if number < tasks.ATTEMPTS else "completed",
            )
            if number < tasks.ATTEMPTS:
                id = OperationId("acme", "webhooks.deliver", ran.key)
                pauses.append(op.seconds_from_now(connection, id, "available_at"))
    for pause, planned in zip(pauses, tasks.PAUSES, strict=True):
        assert planned * 0.8 - 5 < pause < planned * 1.2
    assert sum(tasks.PAUSES) > 3 * 24 * 3600
    assert len({request.id for request in receiver.webhooks}) == 1
    assert len({request.body for request in receiver.webhooks}) == 1
    assert ran.result == {"given_up": "attempts_exhausted", "attempts": 10}
    assert (statuses(rows), attempts(rows)) == ([("given_up", "attempts_exhausted")], [500] * 10)
    assert outbox.run() == []


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("status", "header", "expected"),
    [
        (429, "7200", 7200.0),
        (503, "in an hour", 3600.0),
        (503, "999999999999", tasks.LONGEST_PAUSE),
        (503, "1", tasks.PAUSES[0]),
        (429, "soon", tasks.PAUSES[0]),
        (429, "-5", tasks.PAUSES[0]),
        (500, "7200", tasks.PAUSES[0]),
    ],
)
def test_retry_after_is_honoured_within_limits(
    happen: Happen, register: Register, outbox: Outbox, receiver: Receiver, engine: Engine, status: int, header: str,
    expected: float,
) -> None:  # fmt: skip
    register()
    if header == "in an hour":  # of this moment, and not of when the tests were collected
        header = format_datetime(datetime.now(UTC) + timedelta(hours=1))
    receiver.answer = answering(status, Retry_After=header)
    happen()
    step(outbox)
    id = OperationId("acme", "webhooks.deliver", step(outbox).key)
    with engine.connect() as connection:
        assert op.seconds_from_now(connection, id, "available_at") == pytest.approx(expected, rel=0.25, abs=30)


def test_a_redirect_is_a_failure_and_is_not_followed(
    happen: Happen, register: Register, outbox: Outbox, receiver: Receiver, rows: Rows
) -> None:
    register()
    receiver.answer = answering(307, Location=f"{receiver.url}/elsewhere")
    happen()
    step(outbox), step(outbox)
    assert [request.path for request in receiver.webhooks] == ["/hooks"]
    assert attempts(rows) == [307]


def test_an_endpoint_that_is_gone_gets_nothing_more(
    happen: Happen, register: Register, outbox: Outbox, receiver: Receiver, rows: Rows, runtime: Runtime
) -> None:
    register(path="/gone")
    receiver.answer = answering(410)
    happen(order_id="o1"), happen(order_id="o2")
    outbox.run()
    happen(order_id="o3")
    outbox.run()
    assert len(receiver.webhooks) == 1
    (endpoint,) = rows("endpoints")
    assert (endpoint.status, endpoint.disabled_because) == ("disabled", "gone")
    assert sorted(statuses(rows)) == [("given_up", "endpoint_disabled"), ("given_up", "gone")]
    with runtime.autocommit() as connection:
        assert [row.id for row in stored.disabled_by_itself(connection, "bank")] == [endpoint.id]


def test_an_endpoint_that_fails_for_long_enough_is_disabled_and_one_success_forgives(
    shop: Celery, happen: Happen, register: Register, outbox: Outbox, receiver: Receiver, engine: Engine, rows: Rows
) -> None:
    register()

    def given_up(number: int) -> None:
        receiver.answer = answering(500)
        for _ in range(number):
            happen()
            outbox.run()

    def age() -> None:
        with engine.connect() as connection:
            connection.execute(
                text("UPDATE idempotency.webhook_endpoints SET failing_since = failing_since - interval '4 days'")
            )

    given_up(4)  # not for long enough
    assert rows("endpoints")[0].status == "enabled"
    receiver.answer = answering(200)
    happen()
    outbox.run()
    assert (rows("endpoints")[0].failing_since, rows("endpoints")[0].given_up) == (None, 0)
    given_up(1)
    age()
    given_up(1)  # for long enough, but not often enough
    assert rows("endpoints")[0].status == "enabled"
    given_up(1)
    assert (rows("endpoints")[0].status, rows("endpoints")[0].disabled_because) == ("disabled", "failing")


def test_an_endpoint_that_fails_has_one_attempt_at_a_time(
    happen: Happen, register: Register, outbox: Outbox, receiver: Receiver, engine: Engine, rows: Rows
) -> None:
    """Or the deliveries that wait for a dead one would hold all workers, each for a time-out."""
    register()
    receiver.answer = answering(500)
    happen(), happen()
    step(outbox), step(outbox), step(outbox)
    with engine.connect() as connection:
        connection.execute(text("UPDATE idempotency.webhook_attempts SET ended_at = NULL"))
    ran = step(outbox)
    assert (ran.status, len(receiver.webhooks)) == ("released", 1)
    with engine.connect() as connection:
        wait = op.seconds_from_now(connection, OperationId("acme", "webhooks.deliver", ran.key), "available_at")
        assert 10 < wait < 50
        assert op.record(connection, OperationId("acme", "webhooks.deliver", ran.key)).attempts == 0
        connection.execute(text("UPDATE idempotency.webhook_attempts SET begun_at = begun_at - interval '1 minute'"))
    receiver.answer = answering(200)
    outbox.run()
    assert statuses(rows) == [("delivered", None)] * 2


def step_in_a_process_that_dies(outbox: Outbox, point: str) -> None:
    """The next delivery alone, in a process that is killed at this point."""
    row = outbox._next()
    assert row is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: this process has threads
        child = os.fork()
    if child == 0:
        try:
            crash_points.install(lambda name: os.kill(os.getpid(), signal.SIGKILL) if name == point else None)
            outbox._deliver(row)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


@pytest.mark.few(1)
@pytest.mark.parametrize("point", ["webhook.recorded", "webhook.posted"])
def test_a_crash_around_the_post_leads_to_a_repeat_under_the_same_id(
    shop: Celery, happen: Happen, register: Register, outbox: Outbox, receiver: Receiver, engine: Engine, rows: Rows,
    point: str,
) -> None:  # fmt: skip
    register()
    happen()
    step(outbox)
    step_in_a_process_that_dies(outbox, point)
    with engine.connect() as connection:
        op.recover_now(shop, connection)
    outbox.run()
    posted = 1 if point == "webhook.recorded" else 2
    assert (len(receiver.webhooks), len({request.id for request in receiver.webhooks})) == (posted, 1)
    assert attempts(rows) == [None, 204]
    assert statuses(rows) == [("delivered", None)]


def test_a_redelivery_keeps_the_id(
    shop: Celery, happen: Happen, register: Register, outbox: Outbox, receiver: Receiver, rows: Rows
) -> None:
    register()
    happen()
    outbox.run()
    (delivery,) = rows("deliveries")
    assert operate.redeliver(shop, ANN, delivery.id) == 1
    assert operate.redeliver(shop, ANN, delivery.id) == 1  # it waits already
    outbox.run()
    assert operate.redeliver(shop, ANN, delivery.id) == 2
    outbox.run()
    assert [request.id for request in receiver.webhooks] == [delivery.id] * 3
    assert [row.redelivery for row in rows("attempts")] == [0, 1, 2]
    with pytest.raises(OperationNotFound):
        operate.redeliver(shop, ANN, "msg_unknown")


def test_what_waits_for_its_next_attempt_is_delivered_now(
    shop: Celery, happen: Happen, register: Register, outbox: Outbox, receiver: Receiver, engine: Engine, rows: Rows
) -> None:
    register()
    receiver.answer = answering(503, Retry_After="7200")
    happen()
    step(outbox)
    id = OperationId("acme", "webhooks.deliver", step(outbox).key)
    (delivery,) = rows("deliveries")
    with engine.connect() as connection:
        shown = stored.delivery(connection, "bank", delivery.id)
        assert shown is not None
        assert shown.next_attempt_at > datetime.now(UTC) + timedelta(hours=1)
        assert operate.redeliver(shop, ANN, delivery.id) == 0
        assert op.seconds_from_now(connection, id, "available_at") <= 0
        receiver.answer = answering(204)
        outbox.run()
        shown = stored.delivery(connection, "bank", delivery.id)
    assert shown is not None
    assert (shown.status, shown.next_attempt_at, len(receiver.webhooks)) == ("delivered", None, 2)


def test_what_is_being_attempted_is_not_redelivered_at_that_moment(
    shop: Celery, happen: Happen, register: Register, outbox: Outbox, receiver: Receiver, rows: Rows
) -> None:
    """Its next attempt would still be hours away, whatever the command had said."""
    register()
    happen()
    step(outbox)
    (delivery,) = rows("deliveries")
    refused: list[str] = []

    def slow(request: Request) -> Any:
        with pytest.raises(ChangeRefused) as error:
            operate.redeliver(shop, ANN, delivery.id)
        refused.append(str(error.value))
        return answering(503, Retry_After="7200")(request)

    receiver.answer = slow
    step(outbox)
    assert refused == [f"{delivery.id}: an attempt is under way, or ends just now; look again"]


def test_a_redelivery_that_meets_the_end_of_an_attempt_is_refused(
    shop: Celery, happen: Happen, register: Register, outbox: Outbox, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    register()
    happen()
    step(outbox)
    (delivery,) = rows("deliveries")
    wake = waking.wake

    def late(*args: Any) -> None:
        running = threading.Thread(target=outbox.run)  # commits before the record's lock is had
        running.start()
        running.join(20)
        wake(*args)

    monkeypatch.setattr(waking, "wake", late)
    with pytest.raises(ChangeRefused, match="or ends just now; look again"):
        operate.redeliver(shop, ANN, delivery.id)


def test_a_cancelled_delivery_is_given_up_visibly(
    shop: Celery, happen: Happen, register: Register, outbox: Outbox, rows: Rows, engine: Engine
) -> None:
    register()
    happen()
    step(outbox)
    (delivery,) = rows("deliveries")
    with engine.connect() as connection:
        found = read(connection, OperationId("acme", "webhooks.deliver", f"{delivery.id}:0"), "bank")
    cancel(shop, found, ANN)
    assert statuses(rows) == [("given_up", "cancelled")]


def test_a_secret_is_replaced_while_both_sign_and_never_logged(
    happen: Happen, register: Register, outbox: Outbox, receiver: Receiver, runtime: Runtime,
    caplog: pytest.LogCaptureFixture, engine: Engine,
) -> None:  # fmt: skip
    caplog.set_level("DEBUG")
    endpoint = register(path="/hooks/secret-in-the-path")
    new = operate.rotate_secret(runtime, ANN, endpoint.id, keep=60)
    happen(card="4242-of-a-card")
    outbox.run()
    (request,) = receiver.webhooks
    for verifier in (new, endpoint.verifier):
        Webhook(verifier).verify(request.body, request.headers)
    latest = operate.rotate_secret(runtime, ANN, endpoint.id, keep=0)
    happen()
    outbox.run()
    (signature,) = receiver.webhooks[1].headers["webhook-signature"].split(" ")
    Webhook(latest).verify(receiver.webhooks[1].body, receiver.webhooks[1].headers)
    receiver.answer = answering(500)
    happen(card="4242-of-a-card")
    step(outbox), step(outbox)
    with engine.connect() as connection:
        kept = connection.execute(text("SELECT string_agg(a::text, ' ') FROM idempotency.audit a")).scalar_one()
        kept += connection.execute(
            text("SELECT string_agg(a::text, ' ') FROM idempotency.webhook_attempts a")
        ).scalar_one()
        kept += connection.execute(text("SELECT string_agg(r.error, ' ') FROM idempotency.records r")).scalar_one()
    said = caplog.text + kept + repr(endpoint)
    for secret in (endpoint.verifier[6:], new[6:], latest[6:], "4242-of-a-card", "secret-in-the-path", signature):
        assert secret not in said


def test_a_redelivery_to_a_disabled_endpoint_is_refused(
    shop: Celery, happen: Happen, register: Register, outbox: Outbox, rows: Rows, runtime: Runtime
) -> None:
    endpoint = register()
    happen()
    outbox.run()
    operate.disable_endpoint(runtime, ANN, endpoint.id)
    with pytest.raises(ChangeRefused, match="is disabled; enable that first"):
        operate.redeliver(shop, ANN, rows("deliveries")[0].id)


def test_what_is_posted_says_no_more_than_a_status_and_a_kind_of_failure() -> None:
    assert str(Answer(500, None, 3, body=b"secret")) == "status 500"
    assert str(Answer(None, Failure.TIMEOUT, 3)) == "no answer (timeout)"
    assert "secret" not in repr(Answer(500, None, 3, body=b"secret"))


def test_a_body_is_the_same_json_for_everybody(
    receiver: Receiver, happen: Happen, register: Register, outbox: Outbox
) -> None:
    register()
    happen("payment.captured", amount=10, text="\u2028 <b> \ud800"[:-1])
    outbox.run()
    (request,) = receiver.webhooks
    assert request.body.isascii()
    assert set(json.loads(request.body)) == {"type", "timestamp", "data"}
    assert request.headers["content-type"] == "application/json"
    assert posting.BODY_LIMIT <= 65536
    assert isinstance(request, Request)
