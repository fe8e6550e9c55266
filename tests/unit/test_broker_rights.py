"""The rights in RabbitMQ, computed from queues and settings of different kinds. What the server makes of them is in integration/."""

from __future__ import annotations

import re
from typing import Any

import pytest
from celery import Celery
from kombu import Exchange, Queue

from idempotency.broker.rights import APPLICATION, BEAT, FLOWER, KINDS, RELAY, WORKER, definitions, rights_of
from idempotency.errors import SettingsError
from idempotency.queues import quorum_queue

MAILBOX = "celery.pidbox"


def application(*queues: Queue, broker: str = "amqp://localhost/shop", **settings: Any) -> Celery:
    app = Celery("shop", broker=broker, set_as_current=False)
    app.conf.update(task_queues=list(queues or [quorum_queue("a.b")]), worker_enable_remote_control=False, **settings)
    return app


def given(app: Celery, kind: str, right: str) -> str:
    (found,) = definitions(app, "shop", {kind: "secret"})["permissions"]
    return str(found[right])


def test_a_name_is_matched_as_a_whole_and_not_as_a_pattern() -> None:
    read = given(application(), WORKER, "read")
    assert re.search(read, "a.b")
    assert not any(re.search(read, name) for name in ("axb", "a.b.c", "xa.b", "a.b.dead_letters"))
    assert re.search(given(application(), RELAY, "read"), "a.b.dead_letters")


@pytest.mark.parametrize("kind", KINDS)
def test_no_user_reads_a_mailbox_unless_remote_control_is_on(kind: str) -> None:
    off, on = application(), application()
    on.conf.worker_enable_remote_control = True
    assert not re.search(given(off, kind, "read"), MAILBOX)
    assert not re.search(given(off, kind, "configure"), f"one@host.{MAILBOX}")
    assert bool(re.search(given(on, kind, "read"), MAILBOX)) is (kind == WORKER)
    assert bool(re.search(given(on, kind, "write"), MAILBOX)) is (kind in (WORKER, RELAY, FLOWER))


def test_celery_publishes_past_a_direct_exchange() -> None:
    assert not re.search(given(application(), APPLICATION, "write"), "amq.default")
    direct = application(Queue("plain", Exchange("plain", type="direct"), routing_key="plain"))
    assert given(direct, BEAT, "write") == r"^(amq\.default)$"


def test_routing_keys_are_limited_where_they_are_single_ones() -> None:
    keys = rights_of(application(), "shop")[APPLICATION].keys
    assert re.search(keys["tasks"], "a.b")
    assert not re.search(keys["tasks"], "c")
    later = keys["celery_delayed_27"]
    assert re.search(later, "0." * 27 + "1.a.b")
    assert not re.search(later, "a.b")
    every = Queue("every", Exchange("all", type="topic"), routing_key="#")
    assert rights_of(application(quorum_queue("a"), every), "shop")[APPLICATION].keys.keys() == {"tasks"}


def test_events_of_callers_are_sent_only_if_they_are_on() -> None:
    assert not re.search(given(application(), APPLICATION, "write"), "celeryev")
    assert re.search(given(application(task_send_sent_event=True), APPLICATION, "write"), "celeryev")


def test_redis_as_the_broker_has_no_such_users() -> None:
    with pytest.raises(SettingsError, match="for RabbitMQ"):
        definitions(application(broker="redis://localhost"), "shop", {WORKER: "secret"})
