"""Publishing a batch, and saying exactly which of its messages the broker has confirmed.

Confirms are pipelined: all messages of a batch are on their way before the first confirm is awaited.

A queue that confirms nothing is left alone for a while, if the broker accepts a new connection. Then one message is sent to see
whether it answers, on a channel of its own: while the first message that a channel sends to a queue waits for that queue's
leader, RabbitMQ processes nothing else on the channel.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from amqp.exceptions import ChannelError, NotFound, PreconditionFailed
from amqp.serialization import dumps as amqp_dumps
from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery
from pydantic import SecretStr

from ..errors import BrokerUnavailable
from ..observe.crash_points import crash_point
from ..observe.logs import log
from ..store.outbox import Lane
from ..wire.fitness import first_unfit
from ..wire.headers import COPIES, FINGERPRINT_HEADER, MARKER_HEADER, SIGNATURE_HEADER
from ..wire.limits import beyond_limits
from ..wire.message import Message
from ..wire.signing import sign
from .batch import Published, Refusal
from .channel import BrokerChannel
from .confirms import Confirms
from .connections import BROKER_ERRORS
from .silence import SilentQueues

# Seconds to wait for the confirms of a batch. A queue that gives none by then is left alone (`broker/silence.py`); the broker
# counts as unavailable only if it accepts no new connection.
CONFIRM_TIMEOUT = 10.0
# Bytes of the headers' frame that are not headers: the frame's own, and nine properties of at most 256 each.
_BESIDE_HEADERS = 4096
_OF_NO_MESSAGE = (SoftTimeLimitExceeded, *BROKER_ERRORS)
# What py-amqp raises for a message it cannot encode, as far as is known; after any other error the channel is a new one.
_NOT_ENCODED = (LookupError, ValueError, TypeError, ArithmeticError, RecursionError, struct.error)


@dataclass(slots=True)
class _Plan:
    """Of a batch: what is sent, what tries a silent queue, by its name, and what is held for one."""

    sent: list[tuple[str, Message]] = field(default_factory=list)
    tries: dict[str, tuple[str, Message]] = field(default_factory=dict)
    held: dict[str, str] = field(default_factory=dict)


class Publisher(BrokerChannel):
    """Publishes with confirms over its own connection. `confirm_timeout`: seconds to wait for the confirms of one batch.

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
        self._sending: Confirms | None = None
        # queues that confirm nothing; some of them still answer questions
        self.unconfirming = SilentQueues()

    def publish(self, batch: list[tuple[str, Message]], result: Published) -> None:
        """Publish messages under their ids and note in `result` what is certain, and which queues are silent.

        Raises `BrokerUnavailable`.
        """
        with self._closing_on_errors():
            self._connect()  # outside the try: a refused login is no message's fault
            try:
                self._pipelined(batch, result)
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
        result = Published()
        self.publish([(marker, message.marked(origin="enqueue", outbox_id=marker))], result)
        if result.held:
            raise BrokerUnavailable(f"queue {queue}: no confirm")

    def close(self) -> None:
        super().close()
        self._sending = None

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
        plan = self._planned(batch, result)
        self._connect()
        assert self._sending is not None
        main, tries = self._sending, dict[str, Confirms]()
        main.begin()
        try:
            for id, message in plan.sent:
                if not result.waits(id) and (refusal := self._send(main, id, message)) is not None:
                    result.refuse(id, refusal)
            for queue, (id, message) in plan.tries.items():
                assert self._broker is not None
                tries[queue] = Confirms(self._broker.channel(), are_given=self._confirms)
                if (refusal := self._send(tries[queue], id, message)) is not None:
                    result.refuse(id, refusal)
            crash_point("relay.published")
            self._await_confirms(main, tries)
        finally:
            for each in (main, *tries.values()):
                each.note(result)
        for id, queue in plan.held.items():
            result.hold(id, queue)
        self._conclude(batch, result, main, tries)

    def _planned(self, batch: list[tuple[str, Message]], result: Published) -> _Plan:
        """What of a batch is sent to which queues. Of a lane nothing is sent behind a message that is held, or tries its queue."""
        plan, silent = _Plan(), self.unconfirming
        if not silent:
            plan.sent = batch
            return plan
        begun: set[Lane | None] = set()
        stopped: set[Lane] = set()
        for id, message in batch:
            lane = result.lanes.get(id)
            if lane in stopped or result.waits(id):
                continue
            try:
                queue = message.queue(self._app)
            except Exception:
                queue = ""  # sending it says why
            if queue not in silent:
                plan.sent.append((id, message))
                begun.add(lane)
                continue
            if silent.are_left_alone or queue in plan.tries or (lane is not None and lane in begun):
                plan.held[id] = queue
            else:
                plan.tries[queue] = id, message
            if lane is not None:
                stopped.add(lane)
        return plan

    def _conclude(
        self, batch: list[tuple[str, Message]], result: Published, main: Confirms, tries: dict[str, Confirms]
    ) -> None:
        """Which queues answer and which do not, once the confirms of a batch have been awaited."""
        for queue, one in tries.items():
            if one.are_all_there:
                self.unconfirming.answered(queue)
                one.channel.close()
        unconfirmed = main.awaited.union(*(one.awaited for one in tries.values()))
        if unconfirmed:
            self._leave_alone({id: message.queue(self._app) for id, message in batch if id in unconfirmed}, result)
        elif main.has_nacked:
            # To a channel whose first message came while a queue had no leader, RabbitMQ 3.10 nacks every further one.
            self.close()

    def _leave_alone(self, unconfirmed: dict[str, str], result: Published) -> None:
        """Nothing was heard of these. The broker is there if it takes a new connection; then it is their queues."""
        queues = dict.fromkeys(unconfirmed.values())
        self.close()
        self.silent.note(*queues)  # which are not declared now
        self._connect()
        pause = self.unconfirming.note(*queues)
        log.warning("queue_silent", queues=", ".join(queues), retry_seconds=pause)
        for id, queue in unconfirmed.items():
            result.hold(id, queue)

    def _send(self, over: Confirms, id: str, message: Message) -> Refusal | None:
        """Send one message. Returns why it cannot be sent, with the channel as it was."""
        try:
            prepared, options = self._put_together(over.channel, message)
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:
            # a KeyError: a queue that this application does not have, though another deployment of it may
            return Refusal.by(error, own=not isinstance(error, KeyError))
        try:
            over.channel.basic_publish(prepared, **options)
        except _NOT_ENCODED as error:
            # py-amqp encodes a message before it writes the first byte of it
            return Refusal.by(error, own=True)
        over.sent(id)
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

    def _await_confirms(self, main: Confirms, tries: dict[str, Confirms]) -> None:
        """Wait until all are confirmed, at most `confirm_timeout`, and less where only silent queues are left."""
        began, usual = time.monotonic(), self._timeout
        while waiting := [
            *([usual] if main.awaited else []),
            *(self.unconfirming.patience(usual) for one in tries.values() if one.awaited),
        ]:
            if (left := began + max(waiting) - time.monotonic()) <= 0:
                return
            assert self._broker is not None
            with suppress(TimeoutError):
                self._broker.drain_events(timeout=left)

    def _connect(self) -> Any:
        channel = super()._connect()
        if self._sending is None:
            self._sending = Confirms(channel, are_given=self._confirms)
        return channel
