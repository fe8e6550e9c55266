"""Publishing a batch, and saying exactly which of its messages the broker has confirmed.

Confirms are pipelined: all messages of a batch are on their way before the first confirm is awaited. A channel lives
only as long as nothing goes wrong on it: py-amqp does not match confirms to messages, so after any error a late
confirm could be mistaken for another message's.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from amqp.exceptions import ChannelError, NotFound, PreconditionFailed
from amqp.serialization import dumps as amqp_dumps
from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery
from pydantic import SecretStr

from ..observe.crash_points import crash_point
from ..wire.fitness import first_unfit
from ..wire.headers import COPIES, FINGERPRINT_HEADER, MARKER_HEADER, OUTBOX_HEADER, SIGNATURE_HEADER
from ..wire.limits import beyond_limits
from ..wire.message import Message
from ..wire.signing import sign
from .batch import REFUSAL_LIMIT, Published, Refusal
from .channel import BROKER_ERRORS, BrokerChannel

# Bytes of the headers' frame that are not headers: the frame's own, and nine properties of at most 256 each.
_BESIDE_HEADERS = 4096
_OF_NO_MESSAGE = (SoftTimeLimitExceeded, *BROKER_ERRORS)
# What py-amqp raises for a message it cannot encode, as far as is known; after any other error the channel is a new one.
_NOT_ENCODED = (LookupError, ValueError, TypeError, ArithmeticError, RecursionError, struct.error)


class Publisher(BrokerChannel):
    """Publishes with confirms over a separate channel. `confirm_timeout`: seconds to wait for those of a batch.

    Every message is signed with the first of the `secrets`, if there are any. `first_published`: when what is copied was,
    in seconds since 1970; None: these messages are no copies.
    """

    def __init__(
        self,
        app: Celery,
        *,
        confirm_timeout: float,
        secrets: Sequence[SecretStr] = (),
        first_published: float | None = None,
    ) -> None:
        super().__init__(app, timeout=confirm_timeout)
        self._secrets = secrets
        self._first_published = first_published
        # of the batch under way: the tags whose confirms are awaited, and what was sent back or nacked
        self._tag = 0
        self._awaited: dict[int, str] = {}
        self._returned: dict[str, str] = {}
        self._nacked: set[int] = set()

    def publish(self, batch: list[tuple[str, Message]], result: Published) -> None:
        """Publish messages under their ids and note in `result` what is certain. Raises `BrokerUnavailable`."""
        with self._closing_on_errors():
            self._connect()  # outside the try: a refused login is no message's fault
            try:
                self._pipelined(batch, result)
                if self._nacked:
                    # To a channel whose first message came while a queue had no leader, RabbitMQ 3.10 nacks every further one.
                    self.close()
            except Exception as error:
                if isinstance(error, _OF_NO_MESSAGE) and not isinstance(error, ChannelError):
                    raise
                self.close()
                self._one_by_one(batch, result, error)

    def mark(self, queue: str, marker: str, *, priority: int) -> None:
        """Send a marker behind everything that this queue holds in the class of this priority. Raises `BrokerUnavailable`.

        To every Celery worker it is a task that does nothing; a worker with our guard notes that it has arrived.
        """
        task = Message.composed(
            self._app, "celery.accumulate", (), {}, task_id=marker, headers={MARKER_HEADER: marker}, ignore_result=True
        )
        message = Message(task.headers, task.body, {"exchange": "", "routing_key": queue}, {"priority": priority})
        self.publish([(marker, message.marked(origin="enqueue", outbox_id=marker))], Published())

    def close(self) -> None:
        super().close()
        self._tag = 0

    def _one_by_one(self, batch: list[tuple[str, Message]], result: Published, error: Exception) -> None:
        """A message of this batch broke the channel. On its own, each shows whether it was the one."""
        if len(batch) == 1:
            # too large: RabbitMQ's PreconditionFailed; or not an error of the broker at all
            own = isinstance(error, PreconditionFailed) or not isinstance(error, ChannelError)
            result.refuse(batch[0][0], Refusal.by(error, own=own, is_missing_exchange=isinstance(error, NotFound)))
            return
        missing: dict[Any, Refusal] = {}
        for id, message in result.open(batch):
            exchange = message.route.get("exchange", "")
            if exchange not in missing:
                self.publish([(id, message)], result)
                if exchange and id in result.refused and result.refused[id].is_missing_exchange:
                    missing[exchange] = result.refused[id]
            elif not result.waits(id):
                result.refuse(id, missing[exchange])

    def _pipelined(self, batch: list[tuple[str, Message]], result: Published) -> None:
        channel = self._connect()
        sent: dict[int, str] = {}
        self._awaited.clear()
        self._returned.clear()
        self._nacked.clear()
        try:
            for id, message in batch:
                if not result.waits(id) and (refusal := self._send(channel, id, message, sent)) is not None:
                    result.refuse(id, refusal)
            crash_point("relay.published")
            self._await_confirms()
        finally:
            self._note(sent, result)

    def _send(self, channel: Any, id: str, message: Message, sent: dict[int, str]) -> Refusal | None:
        """Send one message and note its tag. Returns why it cannot be sent, with the channel as it was."""
        try:
            prepared, options = self._put_together(channel, message)
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:
            # a KeyError: a queue that this application does not have, though another deployment of it may
            return Refusal.by(error, own=not isinstance(error, KeyError))
        try:
            channel.basic_publish(prepared, **options)
        except _NOT_ENCODED as error:
            # py-amqp encodes a message before it writes the first byte of it
            return Refusal.by(error, own=True)
        self._tag += 1
        sent[self._tag] = id
        if self._confirms:
            self._awaited[self._tag] = id  # its confirm may come while the next message is sent
        return None

    def _put_together(self, channel: Any, message: Message) -> tuple[Any, dict[str, Any]]:
        """What `basic_publish` is given for a message. Anything that this raises concerns this message alone."""
        exchange, routing_key = message.destination(self._app)
        # one that arrived with them, or was stored by an earlier version
        message = replace(
            message, headers={each: value for each, value in message.headers.items() if each not in COPIES}
        )
        if self._secrets:
            at = time.time() if self._first_published is None else self._first_published
            signature = sign(message.headers, message.body, self._secrets[0], at=at)
            message = replace(message, headers=message.headers | {SIGNATURE_HEADER: signature})
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
        self._check_arrival(message)
        return prepared, options

    def _check_arrival(self, message: Message) -> None:
        """Raise `ValueError` for what no worker would take: what was stored before callers were refused it, say."""
        why = beyond_limits(message.headers, None, body_limit=0)
        if why is None and FINGERPRINT_HEADER in message.headers:  # else no task's of ours
            why = first_unfit(message.headers, self._app.timezone)
        if why is not None:
            raise ValueError(why)

    def _check_frame(self, message: Message) -> None:
        """Raise `ValueError` for headers that do not fit into one frame: the broker would close the whole connection."""
        assert self._broker is not None
        limit = self._broker.connection.frame_max - _BESIDE_HEADERS
        # A character is four bytes at most; almost no message has so many that they need to be counted.
        if len(repr(message.headers)) > limit // 4 and (size := len(amqp_dumps("F", [message.headers]))) > limit:
            raise ValueError(f"headers: at most {limit} bytes, got {size}")

    def _await_confirms(self) -> None:
        deadline = time.monotonic() + self._timeout
        assert self._broker is not None
        while self._awaited:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError("no confirm")
            self._broker.drain_events(timeout=left)

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
        if self._channel is not None:
            return self._channel
        channel = super()._connect()
        if self._confirms:
            self._tag = 0
            channel.confirm_select()
            channel.events["basic_ack"].add(self._on_ack)
            channel.events["basic_nack"].add(self._on_nack)
            channel.events["basic_return"].add(self._on_return)
        return channel

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
        self._returned[id] = f"{error}"[:REFUSAL_LIMIT]
