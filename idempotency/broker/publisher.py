"""Publishing a batch, and saying exactly which of its messages the broker has confirmed.

Confirms are pipelined: all messages of a batch are on their way before the first confirm is awaited. A channel lives
only as long as nothing goes wrong on it: py-amqp does not match confirms to messages, so after any error a late
confirm could be taken for another message's.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from amqp.exceptions import AccessRefused, AMQPError, ChannelError, NotFound, PreconditionFailed
from amqp.serialization import dumps as amqp_dumps
from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery
from kombu import Connection as BrokerConnection
from kombu.exceptions import KombuError

from ..errors import BrokerUnavailable
from ..observe.crash_points import crash_point
from ..observe.logs import log
from ..queues import dead_letter_queues
from ..store.outbox import Lane
from ..wire.message import MARKER_HEADER, OUTBOX_HEADER, Message

# What else is in the frame of the headers: the frame's own bytes and nine properties of at most 256 each.
_BESIDE_HEADERS = 4096


# How long a worker may take to say what it holds, in seconds: Celery's own patience.
REPLY = 1.0


@dataclass(frozen=True, slots=True)
class Seen:
    """A queue as the broker sees it: messages ready, and consumers; what these hold is not counted."""

    ready: int
    consumers: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why one message was not taken. `own` says that it can never be: its queue is not to blame, nor the broker."""

    error: str
    own: bool
    is_missing_exchange: bool = False


@dataclass(slots=True)
class Published:
    """What became of a batch so far; a message in neither is open."""

    confirmed: list[str] = field(default_factory=list)
    refused: dict[str, Refusal] = field(default_factory=dict)
    # of messages that have an order; behind the first refusal in a lane nothing of it is sent
    lanes: dict[str, Lane] = field(default_factory=dict)
    stopped: set[Lane] = field(default_factory=set)

    def refuse(self, id: str, refusal: Refusal) -> None:
        self.refused[id] = refusal
        if (lane := self.lanes.get(id)) is not None:
            self.stopped.add(lane)

    def waits(self, id: str) -> bool:
        """Whether a message of its lane that goes before it was refused."""
        return self.lanes.get(id) in self.stopped

    def open(self, batch: Iterable[tuple[str, Message]]) -> list[tuple[str, Message]]:
        answered = {*self.confirmed, *self.refused}
        return [(id, message) for id, message in batch if id not in answered]

    def keep_order(self) -> None:
        """Forget what came of messages behind the first of their lane that was not confirmed: they go again."""
        confirmed, behind = set(self.confirmed), set()
        broken: set[Lane] = set()
        for id, lane in self.lanes.items():
            if lane in broken:
                behind.add(id)
            elif id not in confirmed:
                broken.add(lane)
        self.confirmed = [id for id in self.confirmed if id not in behind]
        self.refused = {id: refusal for id, refusal in self.refused.items() if id not in behind}


class Publisher:
    """One connection and one channel to the broker, opened on first use and after every error anew."""

    def __init__(self, app: Celery, *, confirm_timeout: float) -> None:
        self._app = app
        self._timeout = confirm_timeout
        self._broker: BrokerConnection | None = None
        self._channel: Any = None
        # of the batch under way: tags the broker owes us, and what it sent back
        self._tag = 0
        self._awaited: dict[int, str] = {}
        self._returned: dict[str, str] = {}
        self._nacked: set[int] = set()

    def publish(self, batch: list[tuple[str, Message]], result: Published) -> None:
        """Publish messages under their ids and note in `result` what is certain. Raises `BrokerUnavailable`."""
        with self._closing_on_errors():
            self._connect()  # apart: a refused login blames none of the messages
            try:
                self._pipelined(batch, result)
            except Exception as error:
                if isinstance(error, _OF_NO_MESSAGE) and not isinstance(error, ChannelError):
                    raise
                self.close()
                if len(batch) == 1:
                    # too large: what RabbitMQ answers; or no error of the broker's at all
                    own = isinstance(error, PreconditionFailed) or not isinstance(error, ChannelError)
                    is_missing = isinstance(error, NotFound)
                    result.refuse(batch[0][0], Refusal(f"{type(error).__name__}: {error}"[:300], own, is_missing))
                    return
                # One of them broke the channel. Alone, each shows whether it was the one.
                missing: dict[Any, Refusal] = {}
                for id, message in result.open(batch):
                    exchange = message.route.get("exchange", "")
                    if (refusal := missing.get(exchange)) is not None:
                        if not result.waits(id):
                            result.refuse(id, refusal)
                        continue
                    self.publish([(id, message)], result)
                    if exchange and id in result.refused and result.refused[id].is_missing_exchange:
                        missing[exchange] = result.refused[id]

    def depth(self, queue: str) -> int:
        """Messages ready in a queue; 0 when it is gone. Raises `BrokerUnavailable`."""
        with self._closing_on_errors():
            self._connect()
            assert self._broker is not None
            try:
                with self._broker.channel() as channel:
                    return int(channel.queue_declare(queue, passive=True).message_count)
            except ChannelError:
                return 0

    def is_fifo(self) -> bool:
        """Whether queues hand out first what came first: over AMQP they do. Raises `BrokerUnavailable`."""
        with self._closing_on_errors():
            self._connect()
            return bool(self._confirms)

    def look(self, queue: str) -> Seen | None:
        """What is in a queue now; None if the broker cannot say. Raises `BrokerUnavailable`."""
        with self._closing_on_errors():
            self._connect()
            assert self._broker is not None
            try:
                with self._broker.channel() as channel:
                    declared = channel.queue_declare(queue, passive=True)
                    if declared.message_count:
                        return Seen(declared.message_count, declared.consumer_count)
                    # "0 messages, 0 consumers" is also what RabbitMQ says about a quorum queue without a leader. A get
                    # goes to the leader, or fails.
                    if (message := channel.basic_get(queue, no_ack=False)) is not None:
                        channel.basic_reject(message.delivery_tag, requeue=True)
                        return Seen(1, declared.consumer_count)
                    return Seen(0, channel.queue_declare(queue, passive=True).consumer_count)
            except NotFound:
                return Seen(0, 0)
            except ChannelError as error:
                log.warning("queue_not_seen", queue=queue, error=type(error).__name__)
                return None

    def mark(self, queue: str, marker: str, *, priority: int) -> None:
        """Send a marker behind everything that this queue holds in the class of this priority. Raises `BrokerUnavailable`.

        To every Celery worker it is a task that does nothing; one with our guard notes that it has arrived.
        """
        task = Message.composed(
            self._app, "celery.accumulate", (), {}, task_id=marker, headers={MARKER_HEADER: marker}, ignore_result=True
        )
        message = Message(task.headers, task.body, {"exchange": "", "routing_key": queue}, {"priority": priority})
        self.publish([(marker, message.marked(origin="enqueue", outbox_id=marker))], Published())

    def held(self, queue: str, consumers: int, task_ids: list[str]) -> set[str] | None:
        """Which of these tasks the consumers of a queue hold, unacknowledged. None: not all of them have answered.

        Takes `REPLY` seconds. Raises `BrokerUnavailable`.
        """
        with self._closing_on_errors():
            self._connect()
            everybody = self._app.control.inspect(connection=self._broker, timeout=REPLY)
            queues = everybody.active_queues() or {}
            workers = [name for name, served in queues.items() if queue in (each["name"] for each in served)]
            if len(workers) != consumers:
                return None
            these = self._app.control.inspect(workers, connection=self._broker, timeout=REPLY, limit=len(workers))
            answers = these.query_task(*task_ids) or {}
            if not set(workers) <= set(answers):
                return None
            return {id for worker in workers for id in answers[worker]}

    def close(self) -> None:
        """Drop the channel and the connection without a handshake: a broker that hangs must not hang us."""
        broker, self._broker, self._channel = self._broker, None, None
        self._tag = 0
        if broker is not None:
            broker.collect()

    @contextmanager
    def _closing_on_errors(self) -> Iterator[None]:
        """After any error the connection is a new one. Raises `BrokerUnavailable` for those of the broker."""
        try:
            yield
        except _BROKER_ERRORS as error:
            self.close()
            raise BrokerUnavailable(type(error).__name__) from error
        except BaseException:
            self.close()
            raise

    def _pipelined(self, batch: list[tuple[str, Message]], result: Published) -> None:
        channel = self._connect()
        sent: dict[int, str] = {}
        self._awaited.clear()
        self._returned.clear()
        self._nacked.clear()
        try:
            for id, message in batch:
                if result.waits(id):
                    continue
                try:
                    prepared, options = self._put_together(channel, message)
                except SoftTimeLimitExceeded:
                    raise
                except Exception as error:
                    # a KeyError: a queue that this application does not have, and another deployment of it may
                    own = not isinstance(error, KeyError)
                    result.refuse(id, Refusal(f"{type(error).__name__}: {error}"[:300], own))
                    continue
                try:
                    channel.basic_publish(prepared, **options)
                except _NOT_ENCODED as error:
                    # py-amqp encodes a message before it writes the first byte of it: the channel is as it was
                    result.refuse(id, Refusal(f"{type(error).__name__}: {error}"[:300], own=True))
                    continue
                self._tag += 1
                sent[self._tag] = id
                if self._confirms:
                    self._awaited[self._tag] = id  # its confirm may come while the next message is sent
            crash_point("relay.published")
            deadline = time.monotonic() + self._timeout
            assert self._broker is not None
            while self._awaited:
                if (left := deadline - time.monotonic()) <= 0:
                    raise TimeoutError("no confirm")
                self._broker.drain_events(timeout=left)
        finally:
            self._note(sent, result)

    def _put_together(self, channel: Any, message: Message) -> tuple[Any, dict[str, Any]]:
        """What `basic_publish` is given for a message. Whatever this raises is of this message alone."""
        exchange, routing_key = message.destination(self._app)
        properties = {name: value for name, value in message.properties.items() if name != "priority"}
        prepared = channel.prepare_message(
            message.body,
            message.properties.get("priority"),
            "application/json",
            "utf-8",
            message.headers,
            {**properties, "delivery_mode": 2},
        )
        options = {"exchange": exchange, "routing_key": routing_key}
        # without confirms (Redis) a command that was answered has been carried out
        if self._confirms:
            self._check_frame(message)
            options["mandatory"] = message.route.get("mandatory", True)
        return prepared, options

    def _check_frame(self, message: Message) -> None:
        """All headers share one frame, and for one too large the broker ends the connection: of every message."""
        assert self._broker is not None
        limit = self._broker.connection.frame_max - _BESIDE_HEADERS
        # A character is four bytes at most; nearly no message has so many that they need to be counted.
        if len(repr(message.headers)) > limit // 4 and (size := len(amqp_dumps("F", [message.headers]))) > limit:
            raise ValueError(f"headers: at most {limit} bytes, got {size}")

    def _note(self, sent: dict[int, str], result: Published) -> None:
        for tag, id in sent.items():
            if tag in self._awaited or id in result.refused:
                continue
            if id in self._returned:
                result.refuse(id, Refusal(self._returned[id], own=False))
            elif tag in self._nacked:
                result.refuse(id, Refusal("nacked by the broker", own=False))
            else:
                result.confirmed.append(id)

    def _connect(self) -> Any:
        if self._channel is None:
            options = {**self._app.conf.broker_transport_options}
            self._broker = self._app.connection_for_write(connect_timeout=5, transport_options=options)
            self._confirms = self._broker.transport.driver_type == "amqp"
            if self._confirms:
                # we count confirms ourselves; and a socket that takes nothing for this long belongs to a dead broker
                options |= {
                    "confirm_publish": False,
                    "read_timeout": self._timeout,
                    "write_timeout": self._timeout,
                }
                self._broker.transport_options = options
            self._broker.connect()
            channel = self._broker.channel()
            queues = list(self._app.amqp.queues.values())
            for queue in [*dead_letter_queues(queues), *queues]:
                try:
                    queue(channel).declare()
                except (PreconditionFailed, AccessRefused) as error:
                    # declared otherwise, or by somebody else: it is there, which is all that a message needs
                    log.warning("queue_differs", queue=queue.name, error=type(error).__name__)
                    channel = self._broker.channel()
            if self._confirms:
                self._tag = 0
                channel.confirm_select()
                channel.events["basic_ack"].add(self._on_ack)
                channel.events["basic_nack"].add(self._on_nack)
                channel.events["basic_return"].add(self._on_return)
            self._channel = channel
        return self._channel

    def _on_ack(self, tag: int, multiple: bool) -> None:
        for each in [each for each in self._awaited if each <= tag] if multiple else [tag]:
            self._awaited.pop(each, None)

    def _on_nack(self, tag: int, multiple: bool) -> None:
        for each in [each for each in self._awaited if each <= tag] if multiple else [tag]:
            if self._awaited.pop(each, None) is not None:
                self._nacked.add(each)

    def _on_return(self, error: Exception, exchange: str, routing_key: str, message: Any) -> None:
        # an unroutable message comes back before its confirm
        id = message.properties["application_headers"][OUTBOX_HEADER]
        self._returned[id] = f"{error}"[:300]


_BROKER_ERRORS = (AMQPError, KombuError, OSError, socket.timeout)
_OF_NO_MESSAGE = (SoftTimeLimitExceeded, *_BROKER_ERRORS)
# What py-amqp raises for a message it cannot encode, as far as it is known; after any other error the channel is new.
_NOT_ENCODED = (LookupError, ValueError, TypeError, ArithmeticError, RecursionError, struct.error)
