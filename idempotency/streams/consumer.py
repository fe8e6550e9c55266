"""The loop of one stream in one process: what comes is handled in the order of its partition, and the position follows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import islice

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from ..attempt.claim import peek
from ..attempt.endings import Ended, Finished, Release
from ..attempt.run import Outcome
from ..attempt.runtime import Runtime
from ..errors import BrokerUnavailable, IdempotencyError, MissingExtra, SettingsError
from ..framework import Framework, framework
from ..observe import metrics
from ..observe.crash_points import crash_point
from ..observe.logs import log
from ..observe.outages import Pauses
from ..observe.unreachable import reason
from ..reasons import OTHER_CELL
from ..store import dead_letters, stream_letters, streams
from ..store.answers import Busy, Completed, Failed, Foreign, Mismatch
from ..store.letters import headers_text
from ..store.statements import describe, is_news, is_refusal, where
from ..store.stream_places import Place
from ..store.streams import PartitionLost
from .alone import handle_alone
from .claimed import waits_for
from .declaring import Stream
from .holdings import Holdings
from .partition import Partition
from .preparing import Prepared, Refused, prepare_many, share
from .reader import Reader
from .refusing import refuse
from .reopened import Reopened
from .standby import Standbys
from .together import NotTogether, handle_together
from .tracing import handled

# Seconds that the loop waits for a first message, if there is nothing else to do.
PATIENCE = 0.5
# Seconds between two looks at a message that holds up its partition, failed or waiting for its next attempt: a person may have
# decided.
STOPPED_PAUSE = 2.0
# The longest wait, in seconds, for an attempt that another process holds: recovery may end it at any time.
BUSY_PAUSE = 1.0


class Consumer:
    """Handles one stream, until `stop` is set. `make_reader` connects to the broker."""

    def __init__(
        self, runtime: Runtime, stream: Stream, make_reader: Callable[[Holdings], Reader], stop: threading.Event
    ) -> None:
        self.stream = stream
        self._runtime = runtime
        self._policy = stream.policy(runtime.settings)
        self._make_reader = make_reader
        self._stop = stop
        self._holdings = Holdings(runtime, stream)
        self._reader: Reader | None = None
        self._standbys = Standbys(runtime)
        self._reopened = Reopened(runtime, stream, self._policy)
        # The partition whose turn it is, or whose error ended the turn before.
        self._last: Place | None = None

    def run(self, progressed: Callable[[], object] = lambda: None) -> None:
        """Handle messages until `stop` is set; then end the transaction that is open, and give all partitions back."""
        self._holdings.start()
        pauses = Pauses()
        try:
            while not self._stop.is_set():
                progressed()
                self._holdings.turned_at = time.monotonic()
                try:
                    self._turn()
                    pauses.end()
                except BrokerUnavailable as error:
                    self._disconnect(error)
                    self._stop.wait(pauses.next())
                except (DBAPIError, PoolTimeout) as error:
                    if is_news(error):
                        log.warning("postgres_unavailable", stream=self.stream.name, error=reason(error))
                    self._idle(pauses.next())
                except (SettingsError, MissingExtra):
                    raise
                except Exception as error:  # of a client library, say: other streams have nothing to do with it
                    log.error("stream_turn_failed", stream=self.stream.name, error=_unexpected(error))
                    self._disconnect()
                    self._stop.wait(pauses.next())
        finally:
            self._disconnect()
            self._holdings.end()

    def _disconnect(self, error: BrokerUnavailable | None = None) -> None:
        if error is not None:
            log.warning("stream_broker_unavailable", stream=self.stream.name, error=str(error))
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()
        for partition in self._holdings.all():
            self._holdings.give_up((partition.place.topic, partition.place.partition))

    def _idle(self, seconds: float) -> None:
        """Handle nothing for a while, and stay the broker's consumer meanwhile."""
        until = time.monotonic() + seconds
        while not self._stop.is_set() and (left := until - time.monotonic()) > 0:
            if self._reader is None:
                self._stop.wait(left)
                return
            try:
                self._reader.poll(min(left, PATIENCE))
            except BrokerUnavailable as error:
                self._disconnect(error)
            except (DBAPIError, PoolTimeout):
                self._stop.wait(min(left, PATIENCE))

    def _turn(self) -> None:
        if self._reader is None:
            self._reader = self._make_reader(self._holdings)
        if (why := self._standbys.behind()) is not None:
            log.warning("stream_waits_for_standby", stream=self.stream.name, why=why)
            self._idle(PATIENCE)
            return
        ready = [each for each in self._holdings.all() if each.is_ready]
        self._reader.poll(0.0 if ready or self._reopened.is_waiting else min([PATIENCE, *self._waits()]))
        for partition in self._in_turn():
            self._last = partition.place
            if partition.is_ready and not self._stop.is_set():
                self._work(partition)
            if partition.is_lost:
                self._reader.lost(partition)
        self._last = None
        if not self._stop.is_set():
            self._reopened.run_next()

    def _in_turn(self) -> list[Partition]:
        """All partitions. The one whose error ended the turn before comes last, so that it keeps no other from its turn."""
        every = self._holdings.all()
        places = [each.place for each in every]
        begin = places.index(self._last) + 1 if self._last in places else 0
        return every[begin:] + every[:begin]

    def _waits(self) -> list[float]:
        """Seconds until each partition that waits for something goes on."""
        now = time.monotonic()
        return [max(each.waits_until - now, 0.0) for each in self._holdings.all() if each.at_hand]

    # ------------------------------------------------------------ a partition's turn

    def _work(self, partition: Partition) -> None:
        before = partition.held.position
        try:
            if partition.is_in_doubt and not self._holdings.ask_again(partition):
                return
            if partition.at_hand:
                self._handle(partition)
        except PartitionLost:
            self._holdings.lose(partition)
        except (DBAPIError, PoolTimeout) as error:
            partition.is_in_doubt = True
            if not is_refusal(error):
                raise
            self._hold_up(partition, f"Postgres refuses it: {describe(error)}")
        except (BrokerUnavailable, SettingsError):
            raise
        except Exception as error:
            partition.is_in_doubt = True
            self._hold_up(partition, _unexpected(error))
        if partition.held.position != before and not partition.is_lost:
            assert self._reader is not None
            self._reader.moved(partition)

    def _hold_up(self, partition: Partition, why: str) -> None:
        """Say why a partition does not go on, and try again after a while: other partitions go on."""
        partition.wait(STOPPED_PAUSE)
        self._holdings.stop(partition, f"offset {partition.position} cannot be handled: {why}")

    def _handle(self, partition: Partition) -> None:
        crash_point("stream.fetched")
        first = partition.at_hand[0]
        alone = partition.is_alone(first.offset) or type(framework()) is not Framework
        messages = list(islice(partition.at_hand, 1 if alone else self.stream.batch))
        try:
            prepared = prepare_many(self.stream, messages, self._runtime.settings)
        except (
            SettingsError
        ) as error:  # of `cell_of`, which may be away as Postgres may: the partition stays where it is
            log.warning("stream_message_waits", stream=self.stream.name, error=str(error))
            partition.wait(BUSY_PAUSE)
            return
        shared = [] if alone else share(prepared, partition.alone)
        if shared:
            self._together(partition, shared)
        else:
            self._one(partition, prepared[0])

    def _together(self, partition: Partition, prepared: list[Prepared]) -> None:
        self._reopened.note(prepared[0].delivery.id.tenant)
        first, last = prepared[0].message.offset, prepared[-1].message.offset
        try:
            with handled(self._runtime, self.stream, [each.message for each in prepared]):
                done = handle_together(self._runtime, self.stream, self._policy, partition, prepared)
        except NotTogether as refusal:
            begins = prepared[refusal.place].message.offset
            partition.alone = range(begins, (last if refusal.by_nature else begins) + 1)
            return
        except DBAPIError as error:
            # refused at COMMIT, a lock that others hold, or a connection that a body has lost, by what it does or how long it
            # takes: alone, each message shows whether it was the cause, and its attempts are counted
            if not error.connection_invalidated:
                log.info("stream_batch_not_committed", stream=self.stream.name, error=describe(error))
            partition.alone = range(first, last + 1)
            partition.is_in_doubt = True
            if error.connection_invalidated:
                raise
            return
        partition.moved(done.position)
        metrics.completed.labels(self.stream.task).inc(done.many - done.duplicates)
        self._count("handled", done.many - done.duplicates)
        self._count("duplicate", done.duplicates)

    def _one(self, partition: Partition, prepared: Prepared | Refused) -> None:
        if isinstance(prepared, Refused):
            self._refuse(partition, prepared, goes_on=self.stream.on_failure == "continue")
            return
        self._reopened.note(prepared.delivery.id.tenant)
        try:
            # a look waits for no lock; of what has ended, it waits for a standby
            if (left := partition.due_at - time.monotonic()) > 0 and isinstance(
                peek(self._runtime, prepared.delivery), Busy
            ):
                partition.wait(min(left, STOPPED_PAUSE))
                return
            with handled(self._runtime, self.stream, [prepared.message]):
                outcome = handle_alone(self._runtime, self.stream, self._policy, prepared, partition)
        except (PartitionLost, DBAPIError, PoolTimeout):
            raise
        except IdempotencyError as error:  # in doubt for long, or stored by newer code
            log.warning("stream_message_waits", stream=self.stream.name, error=str(error))
            partition.is_in_doubt = True
            partition.wait(BUSY_PAUSE)
            return
        self._answer(partition, prepared, outcome)

    def _answer(self, partition: Partition, prepared: Prepared, outcome: Outcome) -> None:
        """What becomes of the position after one message."""
        to = prepared.message.offset + 1
        match outcome:
            case Finished():
                partition.moved(to)
                self._count("handled")
            case Completed():
                self._pass(partition, to, "duplicate")
            case Release(delay=delay):
                partition.wait_for_attempt(delay, look=STOPPED_PAUSE)
            case Busy(due_in=due_in):
                if due_in is not None:
                    partition.wait_for_attempt(due_in, look=STOPPED_PAUSE)
                elif waits_for(self._runtime, self._policy, partition, prepared.delivery.id):
                    partition.wait(min(BUSY_PAUSE, self._runtime.settings.lease / 10))
            case Mismatch(generation=generation):
                refused = Refused(prepared.message, "fingerprint_mismatch", "", prepared.delivery)
                self._refuse(partition, refused, goes_on=True, generation=generation)
            case Foreign(generation=generation, service=service):
                refused = Refused(prepared.message, "service_mismatch", service, prepared.delivery)
                self._refuse(partition, refused, goes_on=True, generation=generation)
            case Ended():
                self._failed(partition, prepared, to)
            case Failed():
                self._keep(prepared)
                self._failed(partition, prepared, to)
            case _:
                raise AssertionError(f"no outcome of a stream: {outcome!r}")

    def _keep(self, prepared: Prepared) -> None:
        """Add the message to the letter of an operation that a person has cancelled.

        Before the position moves: from then on the letter can be replayed, and nothing else has the message.
        """
        id = prepared.delivery.id
        with self._runtime.autocommit(id.tenant) as connection:
            stream_letters.keep_message(connection, id, headers_text(prepared.message.kept()))

    def _failed(self, partition: Partition, prepared: Prepared, to: int) -> None:
        """An operation has failed for good, and its letter is stored."""
        id = prepared.delivery.id
        if self.stream.on_failure == "stop":
            with self._runtime.autocommit(id.tenant) as connection:
                letter = dead_letters.open_letter(connection, id)
            if letter is not None:
                self._holdings.stop(partition, f"offset {to - 1} has failed: replay or discard dead letter {letter}")
                partition.wait(STOPPED_PAUSE)
                return
        self._pass(partition, to, "failed")

    def _pass(self, partition: Partition, to: int, counted_as: str) -> None:
        """Move the position past a message whose operation had already ended."""
        with self._runtime.autocommit() as connection:
            lease = self._runtime.settings.lease
            is_mine = streams.pass_over(connection, partition.held, to, lease=lease, end=partition.end)
        if not is_mine:
            raise PartitionLost(partition.place)
        partition.moved(to)
        self._count(counted_as)

    def _refuse(self, partition: Partition, refused: Refused, *, goes_on: bool, generation: int | None = None) -> None:
        if refuse(self._runtime, self.stream, partition, refused, goes_on=goes_on, generation=generation):
            partition.moved(refused.message.offset + 1)
            self._count("refused")
        else:
            if refused.reason == OTHER_CELL:
                advice = "replay its dead letter once idempotency_cell_of is right, or discard it"
            else:
                advice = "discard its dead letter"
            why = f"offset {refused.message.offset} is refused as {refused.reason}: {advice}"
            self._holdings.stop(partition, why)
            partition.wait(STOPPED_PAUSE)

    def _count(self, counted_as: str, many: int = 1) -> None:
        if many:
            metrics.stream_messages.labels(self.stream.name, counted_as).inc(many)


def _unexpected(error: Exception) -> str:
    """An error and where it was raised, without its text, which may quote a message."""
    return f"{type(error).__name__} at {where(error)}"
