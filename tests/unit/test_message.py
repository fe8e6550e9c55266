"""A message as text: what is kept of a delivery, and where it goes the next time."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from celery import Celery, chain
from celery.app.task import Context
from hypothesis import given
from hypothesis import strategies as st
from kombu import Exchange, Queue
from kombu.transport.native_delayed_delivery import calculate_routing_key
from kombu.utils.json import loads

from idempotency.queues import quorum_queue
from idempotency.wire.headers import (
    GENERATION_HEADER,
    KEY_HEADER,
    ORIGIN_HEADER,
    OUTBOX_HEADER,
    TENANT_HEADER,
    WAITS_HEADER,
    all_headers,
    is_brokers,
)
from idempotency.wire.limits import too_much_to_send
from idempotency.wire.message import Message
from idempotency.wire.signing import is_covered

MARKS = {KEY_HEADER: "order-1", TENANT_HEADER: "acme"}


@pytest.fixture
def app() -> Celery:
    app = Celery("messages", broker="memory://", set_as_current=False)
    app.conf.update(
        task_queues=[quorum_queue("money"), quorum_queue("mail.out", exchange="post")],
        task_default_queue="money",
        task_default_exchange="tasks",
        task_default_exchange_type="topic",
        task_default_routing_key="money",
        task_routes={"send": {"queue": "mail.out"}},
        task_create_missing_queues=False,
    )

    @app.task(name="pay", shared=False)
    def pay(*args: Any, **kwargs: Any) -> None: ...

    @app.task(name="send", shared=False)
    def send(*args: Any, **kwargs: Any) -> None: ...

    app.finalize()
    return app


def delivered(message: Message, app: Celery, *, extra: dict[str, Any] | None = None, **info: Any) -> Context:
    """Celery's request for this message, put together as a worker does."""
    exchange, routing_key = message.destination(app)
    args, kwargs, embedded = loads(message.body)
    delivery = {"exchange": exchange, "routing_key": routing_key, "redelivered": False, "priority": None} | info
    request = {
        **message.headers,
        **(extra or {}),
        "properties": message.properties,
        "reply_to": message.properties.get("reply_to"),
        "correlation_id": message.properties.get("correlation_id"),
        "hostname": "worker@host",
        "delivery_info": delivery,
        **embedded,
    }
    return Context(request, args=args, kwargs=kwargs, called_directly=False)


def composed(app: Celery, *args: Any, name: str = "pay", **options: Any) -> Message:
    return Message.composed(app, name, args, {"currency": "EUR"}, task_id="t-1", headers=MARKS, **options)


# ---------------------------------------------------------------- what is kept


LONG, MANY = {"tracestate": "x" * 127_000, "colour": "blue"}, {f"x{number}": 1 for number in range(1950)}


@pytest.mark.parametrize("added", [LONG, MANY, {"argsrepr": "x" * 127_000}, {"deep": {"er": ["x" * 127_000]}}])
def test_headers_that_could_not_be_sent_again_are_not_kept(app: Celery, added: dict[str, Any]) -> None:
    """A broker takes more than a relay sends, which adds its own."""
    sent = composed(app, 1)
    context = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"}
    kept = Message.delivered(delivered(sent, app, extra=added | context | {"headers": sent.headers | added | context}))
    assert too_much_to_send(kept.headers) is None
    covered = {name for name in sent.headers if is_covered(name) and sent.headers[name] is not None}
    assert covered <= kept.headers.keys()
    assert kept.headers.keys() & (added.keys() - {"argsrepr"}) == set()
    assert kept.headers["traceparent"] == context["traceparent"]


def test_a_callers_headers_are_all_kept_if_they_can_be_sent(app: Celery) -> None:
    sent = composed(app, 1)
    given = {"colour": "blue", "long": "x" * 100_000}
    kept = Message.delivered(delivered(sent, app, extra=given | {"headers": sent.headers | given}))
    assert given.items() <= kept.headers.items()


# ---------------------------------------------------------------- as text

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.dictionaries(st.text(), JSON, max_size=4)


TARGETS = st.text().filter(lambda name: name != "mandatory")
ROUTES = st.dictionaries(TARGETS, st.text(), max_size=4) | st.just({"exchange": "e", "mandatory": False})


@given(FIELDS, st.text(), ROUTES, FIELDS)
def test_a_message_comes_back_from_its_text(
    headers: dict[str, Any], body: str, route: dict[str, Any], properties: dict[str, Any]
) -> None:
    message = Message(headers, body, route, properties)
    text = message.to_text()
    assert Message.from_text(text) == message
    assert Message.from_text(text).to_text() == text
    assert "\0" not in text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not JSON"),
        pytest.param("[" * 100_000, "not JSON", id="too deep"),
        ("[]", "not an object"),
        ({"headers": None}, "headers: must be an object"),
        ({"body": {}}, "body: must be text"),
        ({"route": []}, "route: must be an object"),
        ({"properties": 1}, "properties: must be an object"),
        ({"route": {"queue": 7}}, "route.queue: must be text"),
        ({"route": {"exchange": "e", "routing_key": None}}, "route.routing_key: must be text"),
        ({"route": {"mandatory": "no"}}, "route.mandatory: must be true or false"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_text_that_is_no_message_is_refused_by_the_name_of_its_field(text: str | dict[str, Any], why: str) -> None:
    if isinstance(text, dict):
        text = json.dumps(json.loads(Message({}, "", {}, {}).to_text()) | text)
    with pytest.raises(ValueError, match=f"^{re.escape(why)}$"):
        Message.from_text(text)


def test_a_field_that_is_missing_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match=r"^body: must be text$"):
        Message.from_text('{"headers": {}}')


def test_the_arguments_stay_the_text_that_was_sent(app: Celery) -> None:
    message = composed(app, 1e16, -0.0, "a\u0000b\ud800", {"b": 1, "a": 2})
    assert Message.from_text(message.to_text()).body == message.body
    assert repr(loads(message.body)[0]) == repr([1e16, -0.0, "a\u0000b\ud800", {"b": 1, "a": 2}])


# ---------------------------------------------------------------- composed


def test_a_composed_message_is_what_apply_async_would_send(app: Celery) -> None:
    message = composed(app, "p1", 5)
    assert message.headers["task"] == "pay"
    assert message.headers["id"] == message.headers["root_id"] == "t-1"
    assert message.properties == {"correlation_id": "t-1"}
    args, kwargs, embedded = loads(message.body)
    assert (args, kwargs) == (["p1", 5], {"currency": "EUR"})
    assert set(embedded) == {"callbacks", "errbacks", "chain", "chord"}


def test_a_composed_message_carries_its_key_and_no_time_of_the_broker(app: Celery) -> None:
    message = composed(app, "p1")
    assert message.headers.items() >= MARKS.items()
    assert not {"eta", "expires"} & set(message.headers)


def test_a_composed_message_goes_where_the_routes_or_the_call_say(app: Celery) -> None:
    assert composed(app).destination(app) == ("tasks", "money")
    assert composed(app, name="send").destination(app) == ("post", "mail.out")
    assert composed(app, queue="mail.out").destination(app) == ("post", "mail.out")


def test_the_priority_is_kept_and_absent_when_none_is_given(app: Celery) -> None:
    assert composed(app, priority=7).properties["priority"] == 7
    assert composed(app, priority=0).properties["priority"] == 0
    assert "priority" not in composed(app).properties


# ---------------------------------------------------------------- delivered


def test_a_delivered_message_is_the_one_that_was_sent(app: Celery) -> None:
    sent = composed(app, "p1", 5)
    again = Message.delivered(delivered(sent, app))
    assert again.body == sent.body
    assert again.destination(app) == sent.destination(app)
    assert again.properties == sent.properties
    assert again.headers.items() >= {name: value for name, value in sent.headers.items() if value is not None}.items()


def test_delivering_again_and_again_changes_nothing_more(app: Celery) -> None:
    once = Message.delivered(delivered(composed(app, "p1", 5, priority=3), app, priority=3))
    twice = Message.delivered(delivered(once, app, priority=3))
    assert twice == once
    assert twice.to_text() == once.to_text()


def test_the_task_id_and_the_operation_s_key_are_kept(app: Celery) -> None:
    message = Message.delivered(delivered(composed(app), app))
    assert message.headers["id"] == message.properties["correlation_id"] == "t-1"
    assert message.headers.items() >= MARKS.items()


def test_callbacks_and_the_rest_of_a_chain_are_kept(app: Celery) -> None:
    following = chain(app.signature("send", args=("b",)), app.signature("send", args=("c",))).tasks
    sent = composed(
        app,
        "p1",
        callbacks=[app.signature("send", args=("done",))],
        errbacks=[app.signature("send", args=("failed",))],
        chain=list(reversed(following)),
        chord=app.signature("send", args=("all",)),
        group_id="g-1",
        group_index=3,
    )
    message = Message.delivered(delivered(sent, app))
    embedded = loads(message.body)[2]
    assert embedded == loads(sent.body)[2]
    assert [task["args"] for task in embedded["chain"]] == [["c"], ["b"]]
    assert embedded["callbacks"][0]["args"] == ["done"]
    assert embedded["errbacks"][0]["args"] == ["failed"]
    assert embedded["chord"]["args"] == ["all"]
    assert (message.headers["group"], message.headers["group_index"]) == ("g-1", 3)


def test_priority_reply_and_time_limits_are_kept(app: Celery) -> None:
    sent = composed(app, reply_to="reply-queue", time_limit=30, soft_time_limit=20)
    request = delivered(sent, app, priority=7)
    request.reply_to = "reply-queue"
    message = Message.delivered(request)
    assert message.properties == {"correlation_id": "t-1", "priority": 7, "reply_to": "reply-queue"}
    assert message.headers["timelimit"] == [30, 20]


def test_the_broker_s_marks_and_those_of_an_earlier_delivery_are_not_kept(app: Celery) -> None:
    extra = {
        "x-death": [{"count": 1, "queue": "money"}],
        "x-delivery-count": 3,
        "x-acquired-count": 4,
        ORIGIN_HEADER: "recover",
        OUTBOX_HEADER: "e-1",
        "trace-id": "abc",
        WAITS_HEADER: 2,
    }
    message = Message.delivered(delivered(composed(app), app, extra=extra))
    assert not [name for name in message.headers if name.startswith("x-")]
    assert ORIGIN_HEADER not in message.headers
    assert OUTBOX_HEADER not in message.headers
    # headers of the application, and ours that belong to the operation, are
    assert message.headers["trace-id"] == "abc"
    assert message.headers[WAITS_HEADER] == 2
    assert message.headers.items() >= MARKS.items()


def test_a_delivery_without_routing_goes_to_the_default_exchange(app: Celery) -> None:
    request = delivered(composed(app), app)
    request.delivery_info = None
    assert Message.delivered(request).destination(app) == ("", "")


# ---------------------------------------------------------------- marks of the outbox


def test_a_first_delivery_is_marked_with_its_row_alone(app: Celery) -> None:
    message = composed(app)
    marked = message.marked(origin="enqueue", outbox_id="e-1")
    assert marked.headers == message.headers | {OUTBOX_HEADER: "e-1", GENERATION_HEADER: 1}
    assert OUTBOX_HEADER not in message.headers


@pytest.mark.parametrize("origin", ["retry", "recover", "resend", "replay"])
def test_a_later_delivery_says_where_it_comes_from(app: Celery, origin: str) -> None:
    marked = composed(app).marked(origin=origin, outbox_id="e-1")
    assert marked.headers[ORIGIN_HEADER] == origin
    assert marked.headers[OUTBOX_HEADER] == "e-1"


# ---------------------------------------------------------------- destinations


@pytest.mark.parametrize(
    ("binding", "key", "matches"),
    [
        ("payments.#", "payments.eu.de", True),
        ("payments.#", "payments", True),
        ("payments.*", "payments.eu", True),
        ("payments.*", "payments.eu.de", False),
        ("#.eu", "payments.eu", True),
        ("payments.#", "paymentsx.eu", False),
    ],
)
def test_a_message_that_came_by_a_pattern_goes_back_to_the_queue_it_came_from(
    app: Celery, binding: str, key: str, matches: bool
) -> None:
    app.amqp.queues.add(Queue("bound", Exchange("topics", type="topic"), routing_key=binding))
    delayed, sent = Message({}, "", {"delayed": key}, {}), {"exchange": "topics", "routing_key": key}
    assert (delayed.queue(app) == "bound", Message({}, "", sent, {}).queue(app) == "bound") == (matches, matches)
    if matches:
        assert delayed.destination(app) == ("", "bound")
    else:
        with pytest.raises(KeyError):
            delayed.destination(app)


@pytest.mark.parametrize(("name", "exchange", "seconds"), [("money", "tasks", 1), ("mail.out", "post", 90_000)])
def test_a_native_delayed_delivery_goes_back_to_its_queue(app: Celery, name: str, exchange: str, seconds: int) -> None:
    request = delivered(
        composed(app),
        app,
        exchange="celery_delayed_delivery",
        routing_key=calculate_routing_key(seconds, name),
    )
    message = Message.from_text(Message.delivered(request).to_text())
    assert message.destination(app) == (exchange, name)


def test_a_queue_that_the_application_does_not_have_is_a_key_error(app: Celery) -> None:
    assert composed(app, queue="mail.out").destination(app) == ("post", "mail.out")
    for route in ({"queue": "nowhere"}, {"delayed": "nowhere"}):
        with pytest.raises(KeyError, match="nowhere"):
            Message({}, "", route, {}).destination(app)


def test_a_route_that_names_nothing_is_the_fault_of_the_message(app: Celery) -> None:
    with pytest.raises(ValueError, match="route: must name a queue, or an exchange"):
        Message({}, "", {}, {}).destination(app)


def test_a_route_without_a_queue_is_taken_as_it_is(app: Celery) -> None:
    message = Message({}, "", {"exchange": "elsewhere", "routing_key": "a.b"}, {})
    assert message.destination(app) == ("elsewhere", "a.b")


def test_nested_headers_are_read_too_except_ours() -> None:
    nested = {"trace": "nested", "baggage": "b", KEY_HEADER: "nested", "CC": ["elsewhere"]}
    assert all_headers({"headers": nested, "trace": "t", "CC": ["elsewhere"]}) == {
        "trace": "t",
        "baggage": "b",
        "headers": nested,
    }
    assert all_headers({"trace": "t", "headers": None}) == {"trace": "t", "headers": None}


@pytest.mark.parametrize("name", ["x-request-id", "x-amzn-trace-id", "x", "death", "traceparent"])
def test_a_senders_header_is_not_the_brokers(name: str) -> None:
    assert not is_brokers(name)
    assert is_brokers("x-death")
    assert is_brokers("x-first-death-queue")
