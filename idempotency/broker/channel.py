"""One connection and one channel to the broker, opened when they are needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from amqp.exceptions import ChannelError, NotFound
from celery import Celery
from kombu import Connection as BrokerConnection

from ..errors import BrokerUnavailable
from ..observe.logs import log
from ..observe.unreachable import reason
from ..queues import dead_letter_queues
from .connections import BROKER_ERRORS, bounded, connect
from .queues import InQueue, counted, declare_queues, from_leader
from .silence import SilentQueues

# Seconds that a worker may take to say what it holds: Celery's own patience.
REPLY = 1.0


class BrokerChannel:
    """Opened on first use, and opened again after every error.

    `timeout`: seconds after which a socket that takes or gives nothing counts as broken.
    """

    def __init__(self, app: Celery, *, timeout: float) -> None:
        self._app = app
        self._timeout = timeout
        self._broker: BrokerConnection | None = None
        self._channel: Any = None
        self._confirms = False
        # to declarations and questions
        self.silent = SilentQueues()

    def is_fifo(self) -> bool:
        """Whether queues are first in, first out: over AMQP they are. Raises `BrokerUnavailable`."""
        with self._closing_on_errors():
            self._connect()
            return self._confirms

    def in_queue(self, queue: str) -> InQueue | None:
        """What is in a queue now; None if the broker cannot say. Raises `BrokerUnavailable`, also if only the queue is silent."""
        with self._asking() as channel:
            try:
                with self.silent.noting(queue):
                    return from_leader(channel, queue) if self._confirms else counted(channel, queue)
            except NotFound:
                return InQueue(0, 0)
            except ChannelError as error:
                log.warning("queue_not_seen", queue=queue, error=type(error).__name__)
                return None

    @property
    def may_ask_workers(self) -> bool:
        """Whether workers answer over Celery's remote control."""
        return bool(self._app.conf.worker_enable_remote_control)

    def held(self, queue: str, consumers: int, task_ids: list[str]) -> set[str] | None:
        """Which of these tasks the consumers of a queue hold, unacknowledged. None: not all of them have answered.

        Takes `REPLY` seconds. Raises `BrokerUnavailable`.
        """
        with self._closing_on_errors():
            self._connect()
            everyone = self._app.control.inspect(connection=self._broker, timeout=REPLY)
            queues = everyone.active_queues() or {}
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
        if broker is not None:
            broker.collect()

    @contextmanager
    def _closing_on_errors(self) -> Iterator[None]:
        """Close the connection after any error. Raises `BrokerUnavailable` for an error of the broker."""
        try:
            yield
        except BROKER_ERRORS as error:
            self.close()
            raise BrokerUnavailable(reason(error)) from error
        except BaseException:
            self.close()
            raise

    @contextmanager
    def _asking(self) -> Iterator[Any]:
        """A second channel for one question: an answer of "no such queue" closes it."""
        with self._closing_on_errors():
            self._connect()
            assert self._broker is not None
            channel = self._broker.channel()
            yield channel
            channel.close()  # not after an error: to close a channel that waits for a queue takes another time-out

    def _connect(self) -> Any:
        """The channel; if there is none, connect and declare the application's queues."""
        if self._channel is not None:
            return self._channel
        self._broker = connect(self._app.connection_for_write, bounded(self._app, self._timeout), connect_timeout=5)
        self._confirms = self._broker.transport.driver_type == "amqp"
        queues = list(self._app.amqp.queues.values())
        self._channel = declare_queues(self._broker, [*dead_letter_queues(queues), *queues], self.silent)
        return self._channel
