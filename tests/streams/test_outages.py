"""What a stream does when Postgres or its standby, the broker, or the messages themselves are not there."""

from __future__ import annotations

import signal
import time
from urllib.parse import urlsplit

import pytest
from sqlalchemy.engine import make_url

from idempotency import streams
from idempotency.operate.change import Change
from idempotency.operate.replay import replay
from idempotency.operate.seek import seek_stream
from tests.streams.conftest import Make
from tests.streams.test_letters import newest
from tests.support import bank
from tests.support.processes import eventually
from tests.support.proxy import Proxy
from tests.support.streaming import NAME, Handler, KafkaBroker, Streaming, configure

pytestmark = pytest.mark.long

CHANGE = Change("ann", "messages are gone", is_verified=True)


def test_a_position_that_retention_has_overtaken_stops_and_skips_nothing(make_streaming: Make) -> None:
    """In RabbitMQ, files are deleted once there is a newer one; in Kafka, what is older than a time."""
    rabbit = make_streaming("rabbitmq", **{"x-stream-max-segment-size-bytes": 2000, "x-max-length-bytes": 4000})
    kafka = make_streaming("kafka", apart=True)
    for streaming in (rabbit, kafka):
        streaming.broker.publish_many(10)
        process = streaming.start()
        streaming.wait_until_handled()
        assert process.end() == 0
    for first in range(0, 2000, 500):  # a file that has just been begun may be all that is left, and have nothing in it
        rabbit.broker.publish_many(500, first=first + 100)
        time.sleep(0.1)
    kafka.broker.publish_many(50, first=100)
    assert isinstance(kafka.broker, KafkaBroker)
    kafka.broker.cluster.delete_before(kafka.broker.topic, 0, 40)
    for streaming in (rabbit, kafka):
        streaming.start()
    rabbit.broker.publish_many(3, first=9000)
    for streaming in (rabbit, kafka):
        streaming.wait_until_stopped("position 10")
        assert "retention has overtaken it" in streaming.stopped()
        assert len(streaming.entries()) == 10
    # a person says where to go on
    configure(kafka.environment)
    seek_stream(bank.app, NAME, kafka.broker.topic, 0, 40, CHANGE, take=True)
    kafka.wait_until_handled()
    assert kafka.entries()[10:] == [f"a{number}" for number in range(130, 150)]
    assert kafka.stopped() == ""


def test_retention_that_overtakes_a_partition_which_waits_for_a_letter_is_noticed(make_streaming: Make) -> None:
    """Kafka says it once, and what is at hand comes first."""
    kafka = make_streaming("kafka")
    topic = kafka.broker.topic
    source = streams.kafka(topic, group=topic, options={"session.timeout.ms": "60000"})
    kafka.environment["LEASE"] = "60"
    kafka.broker.publish({"account": "bad", "how": "permanent unless told"})
    kafka.broker.publish({"account": "a1"})
    kafka.broker.flush()
    process = kafka.start(Handler(source, options={"on_failure": "stop"}))
    kafka.wait_until_stopped("offset 0 has failed")
    process.signal(signal.SIGSTOP)
    time.sleep(1.0)  # the fetch that is under way is answered
    kafka.broker.publish_many(50, first=100)
    assert isinstance(kafka.broker, KafkaBroker)
    kafka.broker.cluster.delete_before(topic, 0, 40)
    process.signal(signal.SIGCONT)
    time.sleep(2.0)  # it hears of that now
    assert "offset 0 has failed" in kafka.stopped()
    (kafka.directory / "told").touch()
    configure(kafka.environment)
    replay(bank.app, newest(kafka), CHANGE)
    kafka.wait_until_stopped("position 2, and Kafka has the offsets 40")
    assert sorted(kafka.entries()) == ["a1", "bad"]
    assert kafka.positions() == {0: 2}


@pytest.mark.long
def test_what_was_recreated_is_noticed(rabbit: Streaming) -> None:
    rabbit.broker.publish_many(10)
    process = rabbit.start()
    rabbit.wait_until_handled()
    assert process.end() == 0
    rabbit.broker.recreate()
    rabbit.broker.publish_many(3, first=50)
    rabbit.start()
    rabbit.wait_until_stopped("recreated")
    assert len(rabbit.entries()) == 10


def test_offsets_that_the_broker_uses_itself_are_no_lost_messages(make_streaming: Make) -> None:
    """At the beginning of each file RabbitMQ has an entry of its own."""
    rabbit = make_streaming("rabbitmq", **{"x-stream-max-segment-size-bytes": 8_000})
    accounts = rabbit.broker.publish_many(800)
    process = rabbit.start()
    eventually(lambda: len(rabbit.entries()) == 800, what=process.log)
    assert "stream_gap" in process.log
    assert rabbit.entries() == accounts
    assert rabbit.stopped() == ""
    (position,) = rabbit.positions().values()
    assert position is not None
    assert position > 800


def test_a_stream_waits_for_postgres_and_stays_in_its_group(streaming: Streaming) -> None:
    url = make_url(streaming.environment["DATABASE_URL"])
    assert url.host is not None
    assert url.port is not None
    with Proxy(url.host, url.port) as proxy:
        through = url.set(host="127.0.0.1", port=proxy.port)
        streaming.environment["DATABASE_URL"] = through.render_as_string(hide_password=False)
        accounts = streaming.broker.publish_many(5)
        process = streaming.start()
        streaming.wait_until_handled()
        proxy.refuse()
        proxy.reset()
        accounts += streaming.broker.publish_many(20, first=10)
        eventually(lambda: "postgres_unavailable" in process.log, what=process.log)
        proxy.heal()
        streaming.wait_until_handled()
        assert streaming.entries() == accounts
        assert process.end() == 0
    assert process.log.count("stream_partition_taken") <= 2  # of RabbitMQ's, the connection and the lease may have gone


@pytest.mark.few(2)
@pytest.mark.parametrize("skip", [0, 1, 2])
def test_a_commit_whose_answer_is_lost_is_not_made_again(rabbit: Streaming, skip: int) -> None:
    url = make_url(rabbit.environment["DATABASE_URL"])
    assert url.host is not None
    assert url.port is not None
    with Proxy(url.host, url.port) as proxy:
        through = url.set(host="127.0.0.1", port=proxy.port)
        rabbit.environment["DATABASE_URL"] = through.render_as_string(hide_password=False)
        rabbit.start(batch=4)
        eventually(lambda: rabbit.owners().get(0), what=rabbit.logs())
        proxy.cut_reply_to(b"COMMIT", skip=skip)
        accounts = rabbit.broker.publish_many(20)
        rabbit.wait_until_handled()
        assert proxy.cuts == 1
        assert rabbit.entries() == accounts


def test_a_stream_waits_for_postgres_and_the_broker_at_once(rabbit: Streaming) -> None:
    url = make_url(rabbit.environment["DATABASE_URL"])
    broker = urlsplit(rabbit.environment["BROKER_URL"])
    assert url.host
    assert url.port
    assert broker.hostname
    with Proxy(url.host, url.port) as postgres, Proxy(broker.hostname, broker.port or 5672) as rabbitmq:
        through = url.set(host="127.0.0.1", port=postgres.port)
        rabbit.environment["DATABASE_URL"] = through.render_as_string(hide_password=False)
        netloc = f"{broker.netloc.rpartition('@')[0]}@127.0.0.1:{rabbitmq.port}"
        rabbit.environment["BROKER_URL"] = broker._replace(netloc=netloc).geturl()
        accounts = rabbit.broker.publish_many(5)
        process = rabbit.start()
        rabbit.wait_until_handled()
        postgres.refuse()
        postgres.reset()
        eventually(lambda: "postgres_unavailable" in process.log, what=process.log)
        rabbitmq.refuse()
        rabbitmq.reset()
        eventually(lambda: "stream_broker_unavailable" in process.log, what=process.log, timeout=30)
        accounts += rabbit.broker.publish_many(5, first=100)
        postgres.heal()
        rabbitmq.heal()
        rabbit.wait_until_handled()
        assert rabbit.entries() == accounts
        assert process.end() == 0
