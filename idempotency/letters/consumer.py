"""The consumer of the dead-letter queues: what the broker gave up is stored as a dead letter, and its operation ends.

The letter and the failed record are one commit, and the message is acknowledged only after it: after a crash in
between the message is redelivered, which makes no second row. If the operation is running or has ended, the message was
a duplicate and gets no letter. A message that was rejected without a visible defect (by a worker from before a deploy,
say) is retried for a while before its operation ends. Any number of consumers may run; the relay runs one.

What another application has sent is not ended here: it is forwarded to the queue that this one's relay has declared for
it, and acknowledged once the broker has confirmed it.

Messages come from anywhere, so their headers may hold anything. If anything goes wrong with one message, it stays
unacknowledged until its next try while others go on.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from celery import Celery
from kombu import Connection as BrokerConnection
from kombu import Message as BrokerMessage
from kombu.serialization import prepare_accept_content
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from ..application import runtime_of
from ..broker.connections import BROKER_ERRORS, bounded, connect
from ..broker.queues import declare_queues, forward, points_to_shared
from ..broker.silence import SilentQueues
from ..errors import SettingsError
from ..observe.crash_points import crash_point
from ..observe.logs import log
from ..observe.outages import Pauses
from ..observe.unreachable import reason
from ..queues import SHARED_DEAD_LETTERS, dead_letter_queue, dead_letter_queues, forwarded_dead_letters
from ..store.statements import confirm, describe, is_news
from ..wire.arriving import bound_what_arrives
from .ending import LETTER_TRIES
from .owner import is_left_to_others, owner_of
from .storing import LOCK_PATIENCE, store, store_unhandled

# Seconds between polls of an empty queue.
POLL = 1.0
# Messages per pass.
BATCH = 200
# Seconds after which a broker, or one of its queues, that answers nothing counts as silent.
TIMEOUT = 10.0
# Seconds after which a pass starts no further letter, so that the loop gives its sign of life and sees `stop`. Retried
# letters get half of it; each pass handles at least one retried and one new letter.
PASS = 5.0
# How long a new letter waits for one lock. Those behind it wait too, and few locks last.
FIRST_PATIENCE = "500ms"
# A letter that cannot be stored although Postgres answers (a lock, say) stays unacknowledged while others go on. It is
# tried again in the next pass, then after HELD_PAUSE seconds, doubling up to HELD_CAP: a lock that was held for a
# day delays it by minutes more.
HELD_PAUSE = 5.0
HELD_CAP = 600.0
# How many are kept in memory. Beyond that the one held longest is parked: it stays unacknowledged, but only its delivery
# tag is kept. If it were requeued now it would come first again (RabbitMQ 3) and block the letters behind it. Parked
# letters are requeued once the queue is empty: a batch at a time, or PARKED_TRIES while memory is full.
HELD_LIMIT = 2_000
PARKED_TRIES = 20
# With this many parked, no new letters are taken; the broker keeps an entry for each.
PARKED_LIMIT = 100_000


@dataclass(slots=True, eq=False)
class _Taken:
    """A message that is not acknowledged yet."""

    message: BrokerMessage
    queue: str
    due: float = 0.0  # by time.monotonic()
    tries: int = 0
    surprises: int = 0  # of these tries, those that failed neither for Postgres nor for a lock


class DeadLetterConsumer:
    """Consumes the dead-letter queues, on its own connection to the broker."""

    def __init__(self, app: Celery) -> None:
        app.loader.import_default_modules()
        app.finalize()
        bound_what_arrives()
        self._app = app
        self._broker: BrokerConnection | None = None
        self._channel: Any = None
        self._held: list[_Taken] = []
        # delivery tags
        self._parked: list[Any] = []
        self._silent = SilentQueues()
        # names of the queues that it takes from
        self._queues: list[str] = []
        # digests of letters that an outage of Postgres interrupted: that try does not count
        self._interrupted: set[str] = set()

    def run(self, stop: threading.Event, periodic: Callable[[], object] = lambda: None) -> None:
        """Consume until `stop` is set. `periodic` is called between passes, even while the broker is away."""
        pauses = Pauses()
        while not stop.is_set():
            taken, pause = 0, POLL
            try:
                periodic()
                taken = self.run_once()
                pauses.end()
            except OperationalError as error:
                self.close()
                pause = pauses.next()
                if is_news(error):
                    log.warning("postgres_unavailable", error=reason(error))
            except BROKER_ERRORS as error:
                self.close()
                log.warning("broker_unavailable", error=reason(error))
            except Exception:  # an unexpected error must not end the thread
                self.close()
                log.exception("dead_letter_pass_failed")
            if not taken:
                stop.wait(pause)
        self.close()

    def run_once(self, *, limit: int = BATCH) -> int:
        """Take messages until the queues are empty or `PASS` is over. Returns how many, including those held for later.

        Only AMQP brokers keep dead letters. A letter that cannot be stored now stays unacknowledged until its next try
        and does not delay the others.
        """
        if self._app.connection_for_read().transport.driver_type != "amqp":
            return 0
        with runtime_of(self._app).autocommit() as connection:
            # Take nothing while Postgres is away: each requeue counts towards a delivery limit.
            connection.exec_driver_sql("SELECT 1")
        channel, taken, began = self._connect(), 0, time.monotonic()
        accept = prepare_accept_content(["json"])
        for again in sorted((held for held in self._held if held.due <= began), key=lambda held: held.due):
            self._held.remove(again)
            self._handle(again)
            if time.monotonic() - began >= PASS / 2:
                break
        queues = self._silent.in_turn(self._queues)
        while queues and taken < limit and len(self._parked) < PARKED_LIMIT:
            if taken and time.monotonic() - began >= PASS:
                break
            for queue in list(queues):  # in turns, so that a long queue does not delay the next one
                with self._silent.noting(queue):  # the next pass goes on with the others
                    raw = channel.basic_get(queue, no_ack=False)
                if raw is None:
                    queues.remove(queue)
                    continue
                message = channel.message_to_python(raw)
                message.accept = accept
                taken += 1
                self._handle(_Taken(message, queue))
        if not taken:
            self._unpark()
        return taken

    def _handle(self, taken: _Taken) -> None:
        try:
            is_left = not self._forwarded_or_stored(taken)
            with runtime_of(self._app).autocommit() as connection:
                confirm(connection)  # that it was stored or needs no letter, which may only have been read
        except Exception as error:
            with runtime_of(self._app).autocommit() as connection:
                connection.exec_driver_sql("SELECT 1")  # raises if Postgres is away: not the letter's fault
            taken.surprises += not isinstance(error, _NOT_THE_LETTERS)
            self._hold(taken, error)
            return
        if is_left:
            self._parked.append(taken.message.delivery_tag)
            return
        crash_point("dead_letter.stored")
        taken.message.ack()

    def _forwarded_or_stored(self, taken: _Taken) -> bool:
        """Bring a message where it belongs. False: it is left to other applications for now."""
        service = runtime_of(self._app).settings.service
        owner = owner_of(self._app, taken.message, taken.queue)
        if owner not in (None, service) and self._forward(taken, str(owner)):
            return True
        if owner != service and is_left_to_others(self._app, taken.message):
            return False
        if owner in (None, service) and taken.surprises < LETTER_TRIES:
            patience = LOCK_PATIENCE if taken.tries else FIRST_PATIENCE
            store(self._app, taken.message, self._interrupted, patience=patience)
        else:  # perhaps of an unknown application: this one must not end the operation that it names
            store_unhandled(self._app, taken.message)
        return True

    def _forward(self, taken: _Taken, owner: str) -> bool:
        """Send a message of another application to the queue where that one looks for it. False: it has none."""
        assert self._broker is not None
        target = forwarded_dead_letters(owner)
        if not forward(self._broker, taken.message, target):
            return False
        log.warning("dead_letter_forwarded", queue=taken.queue, to=target)
        return True

    def _hold(self, taken: _Taken, error: Exception) -> None:
        pause = HELD_PAUSE * 2 ** min(taken.tries - 1, 20) if taken.tries else 0.0
        taken.due = time.monotonic() + min(pause, HELD_CAP)
        taken.tries += 1
        self._held.append(taken)
        if len(self._held) > HELD_LIMIT:
            self._parked.append(self._held.pop(0).message.delivery_tag)
        if isinstance(error, _NOT_THE_LETTERS):
            log.warning("dead_letter_waits", error=describe(error), times=taken.tries)
        else:
            # not the error's text, which may quote the message
            place = traceback.extract_tb(error.__traceback__)[-1]
            at = f"{place.filename.rpartition('/')[2]}:{place.lineno}"
            log.error("dead_letter_not_handled", error=type(error).__name__, at=at, times=taken.tries)

    def _unpark(self) -> None:
        returning = self._parked[: BATCH if len(self._held) < HELD_LIMIT else PARKED_TRIES]
        for tag in returning:
            self._channel.basic_reject(tag, requeue=True)
        del self._parked[: len(returning)]

    def close(self) -> None:
        """Drop the connection; the broker requeues what was not acknowledged."""
        broker, self._broker, self._channel = self._broker, None, None
        self._held, self._parked = [], []
        if broker is not None:
            broker.collect()

    def _connect(self) -> Any:
        if self._channel is None:
            self._broker = connect(self._app.connection_for_read, bounded(self._app, TIMEOUT), connect_timeout=5)
            own, service = list(self._app.amqp.queues.values()), runtime_of(self._app).settings.service
            queues = [*dead_letter_queues(own), dead_letter_queue(forwarded_dead_letters(service))]
            self._channel = declare_queues(self._broker, queues, self._silent)
            if points_to_shared(self._channel, own, self._silent):
                queues.append(dead_letter_queue(SHARED_DEAD_LETTERS))
                self._channel = declare_queues(self._broker, queues[-1:], self._silent)
            self._queues = list(dict.fromkeys(queue.name for queue in queues))
        return self._channel


def consume_once(app: Celery) -> int:
    """Consume the dead-letter queues until they are empty. Returns how many messages were taken.

    What could not be stored now is counted too, and is back in its queue afterwards.
    """
    consumer, total = DeadLetterConsumer(app), 0
    try:
        while taken := consumer.run_once():
            total += taken
    finally:
        consumer.close()
    return total


# The database's or the set-up's fault, never one letter's.
_NOT_THE_LETTERS = (OperationalError, PoolTimeout, SettingsError)
