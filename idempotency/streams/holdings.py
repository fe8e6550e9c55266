"""The partitions that this process holds of one consumer: taken, renewed, given up, and taken away."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from ..attempt.runtime import Runtime
from ..framework import framework
from ..observe import metrics
from ..observe.crash_points import crash_point
from ..observe.logs import log
from ..store import streams
from ..store.statements import is_news
from ..store.stream_places import FORGOTTEN, Place
from ..store.streams import Held
from .declaring import Stream
from .partition import Partition

# Where a partition is: its topic and number.
At = tuple[str, int]


class Holdings:
    """What this process holds of a stream. A thread of its own renews the leases, so that a long body loses none."""

    def __init__(self, runtime: Runtime, stream: Stream) -> None:
        self.runtime = runtime
        self.stream = stream
        self._held: dict[At, Partition] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._soon = threading.Event()
        self._thread: threading.Thread | None = None
        # When the loop last began a turn, by the monotonic clock: one that hangs loses its partitions in the end.
        self.turned_at = time.monotonic()

    def all(self) -> list[Partition]:
        """All partitions that are held, in order."""
        with self._lock:
            return [self._held[at] for at in sorted(self._held)]

    def get(self, at: At) -> Partition | None:
        """The partition, if it is held."""
        return self._held.get(at)

    def take(self, at: At, *, regardless: bool, dead: frozenset[str] = frozenset()) -> Partition | None:
        """Become a partition's owner, and read where it is. None: another one's lease is not over. Raises SQLAlchemy's errors.

        It is stopped if that position is of something else of this name: then nothing is read of it.
        """
        runtime = self.runtime
        place = Place(runtime.settings.service, self.stream.name, *at)
        with runtime.autocommit() as connection:
            held = streams.take(
                connection,
                place,
                runtime.holder,
                source=self.stream.source.kind,
                lease=runtime.settings.lease,
                regardless=regardless,
                dead=dead,
            )
        if held is None:
            return None
        partition = Partition(held, suspected=self.stream.batch if held.is_from_silent else 0, said=held.stopped)
        if held.source != self.stream.source.kind:
            self.stop(partition, self._misplaced(held))
        with self._lock:
            self._held[at] = partition
        metrics.stream_partitions_taken.labels(self.stream.name).inc()
        log.info(
            "stream_partition_taken", stream=self.stream.name, place=place, position=held.position, fence=held.fence
        )
        crash_point("stream.assigned")
        return partition

    def _misplaced(self, held: Held) -> str:
        if held.source == FORGOTTEN:
            return until_moved(f"position {held.position} was forgotten by a person")
        return until_moved(
            f"position {held.position} is of {held.source} of this name, and {self.stream.source.kind} is read now"
        )

    def begin(self, partition: Partition, position: int) -> bool:
        """Keep the offset of the first message there is. False: the partition is another's."""
        with self.runtime.autocommit() as connection:
            held = streams.begin(connection, partition.held, position)
        if held is None:
            self.lose(partition)
            return False
        partition.held = held
        return True

    def has_begun(self, topic: str) -> bool:
        """Whether this consumer has a position in the topic, which an earlier process or another one has noted."""
        with self.runtime.autocommit() as connection:
            return streams.has_begun(connection, self.runtime.settings.service, self.stream.name, topic)

    def begin_topic(self, topic: str, positions: Mapping[int, int]) -> None:
        """Note where this consumer begins in all partitions that the topic has now, if it has not begun."""
        with self.runtime.transaction() as connection:
            service, source = self.runtime.settings.service, self.stream.source.kind
            streams.begin_topic(connection, service, self.stream.name, topic, positions, source=source)

    def ask_again(self, partition: Partition) -> bool:
        """After a commit without an answer: read where the partition is, under a new fence. False: it is another's."""
        with self.runtime.autocommit() as connection:
            held = streams.take_again(connection, partition.held, lease=self.runtime.settings.lease)
        if held is None:
            self.lose(partition)
            return False
        before = partition.held.position
        partition.held, partition.is_in_doubt = held, False
        # otherwise it stands where it stood, and why it has stopped is said already
        if held.position is not None and held.position != before:
            partition.moved(held.position)
        return True

    def stop(self, partition: Partition, why: str) -> None:
        """Say why a partition goes no further, for people; once."""
        if partition.stopped != why:
            with self.runtime.autocommit() as connection:
                streams.stop(connection, partition.held, why)
            partition.stopped = why
            log.error("stream_stopped", stream=self.stream.name, place=partition.place, why=why)

    def go_on(self, partition: Partition) -> None:
        """Say that a partition goes on, whose reason to stop has gone by itself. Raises SQLAlchemy's errors."""
        with self.runtime.autocommit() as connection:
            streams.stop(connection, partition.held, None)
        partition.stopped = partition.said = None
        log.info("stream_goes_on", stream=self.stream.name, place=partition.place)

    def lose(self, partition: Partition) -> None:
        """Note that another process, or a person, has the partition."""
        if not partition.is_lost:
            partition.is_lost = True
            metrics.stream_partitions_lost.labels(self.stream.name).inc()
            log.warning(
                "stream_partition_lost", stream=self.stream.name, place=partition.place, fence=partition.held.fence
            )

    def forget(self, at: At) -> None:
        """Hold a partition no longer; what is stored does not change."""
        with self._lock:
            self._held.pop(at, None)

    def give_up(self, at: At) -> None:
        """Give a partition back, so that another process need not wait for the lease. Without Postgres, it has to."""
        partition = self.get(at)
        self.forget(at)
        if partition is None or partition.is_lost:
            return
        try:
            with self.runtime.autocommit() as connection:
                streams.release(connection, partition.held)
        except (DBAPIError, PoolTimeout) as error:
            if is_news(error):
                log.warning("stream_partition_not_released", place=partition.place, error=type(error).__name__)
        log.info("stream_partition_given_up", stream=self.stream.name, place=partition.place)
        crash_point("stream.given_up")

    # ------------------------------------------------------------ leases

    def start(self) -> None:
        """Begin to renew."""
        self._thread = threading.Thread(target=self._run, name=f"stream-leases-{self.stream.name}", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Renew no longer."""
        self._ended.set()
        self._soon.set()
        if self._thread is not None:
            self._thread.join(10)

    def _run(self) -> None:
        settings = self.runtime.settings
        while not self._ended.is_set():
            self._soon.wait(settings.heartbeat)
            self._soon.clear()
            if self._ended.is_set():
                return
            try:
                if time.monotonic() - self.turned_at < settings.longest_run:
                    self.renew()
            except Exception as error:
                if not isinstance(error, DBAPIError | PoolTimeout):
                    log.exception("stream_leases_not_renewed")
                elif is_news(error):
                    log.warning("stream_leases_not_renewed", error=type(error).__name__)

    def note_end(self, partition: Partition, end: int) -> None:
        """The stream of a partition goes at least up to the offset before `end`. Stored with the next commit or renewal; the first at once."""
        is_first, partition.end = partition.end is None, max(partition.end or 0, end)
        if is_first:
            self._soon.set()

    def renew(self) -> None:
        """Renew the leases once, and note which partitions are another's by now."""
        held = {each: each.held for each in self.all() if not each.is_lost}
        if not held:
            return
        settings = self.runtime.settings
        with self.runtime.autocommit() as connection:
            ends = {each: partition.end for partition, each in held.items()}
            mine = streams.renew(connection, settings.service, self.stream.name, ends, lease=settings.lease)
        for partition, before in held.items():
            # its fence moves only in the loop's own thread, when that asks again
            if before not in mine and partition.held.fence == before.fence:
                self.lose(partition)


def until_moved(why: str) -> str:
    """Why a partition has stopped, for people, if it goes on only once one of them has moved its position."""
    return f"{why}; say with `{framework().command} stream seek` where to go on"
