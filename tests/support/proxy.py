"""A TCP proxy with faults: answers that never arrive, latency, black holes, resets, refused connections.

One thread owns every socket, so a fault has taken hold when the call that asks for it returns.
"""

from __future__ import annotations

import contextlib
import fcntl
import queue
import select
import socket
import struct
import termios
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Self
from urllib.parse import urlsplit

# "requests" go from the client to the server, "replies" come back.
Direction = Literal["requests", "replies"]
DIRECTIONS: tuple[Direction, ...] = ("requests", "replies")

# Read no further ahead of a receiver that does not take it: a sender feels a stopped server through the proxy, too.
BUFFER = 1 << 20
# How long a call waits for the proxy's own thread, which never blocks.
PATIENCE = 30.0
_READABLE = select.POLLIN | select.POLLHUP | select.POLLERR


@dataclass(eq=False)
class _Stream:
    """One direction of a connection."""

    direction: Direction
    source: socket.socket
    target: socket.socket
    # what has been read: when it is due, and the bytes; none of them mean the end of the stream
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)
    size: int = 0
    ended: bool = False
    # bytes left before the connection is reset, and whether that moment has come
    left: int | None = None
    doomed: bool = False
    # the end of what was searched for a pattern: its first half may be here
    tail: bytes = b""


@dataclass(eq=False)
class _Connection:
    client: socket.socket
    server: socket.socket
    requests: _Stream
    replies: _Stream
    # the next reply is the one to be lost
    cutting: bool = False
    # bytes were swallowed: what follows makes no sense any more
    holed: bool = False
    open: bool = True

    @property
    def streams(self) -> tuple[_Stream, _Stream]:
        return self.requests, self.replies


class Proxy:
    """Forwards a port of 127.0.0.1, until a fault is requested.

    `cuts` answers were lost, `resets` connections ended by RST, `refusals` connections reset on arrival, `swallowed`
    bytes gone: a test asserts by these that its fault has happened.
    """

    @classmethod
    def before(cls, url: str) -> tuple[Self, str]:
        """A proxy before the server of this address, which names its port, and the address by way of it."""
        parts = urlsplit(url)
        assert parts.port is not None, "an address with a port"
        proxy = cls(parts.hostname or "", parts.port)
        login, at, _ = parts.netloc.rpartition("@")
        return proxy, parts._replace(netloc=f"{login}{at}127.0.0.1:{proxy.port}").geturl()

    def __init__(self, host: str, port: int) -> None:
        self.cuts = self.resets = self.refusals = self.swallowed = 0
        resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._family, self._target = resolved[0], resolved[4]
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._connections: list[_Connection] = []
        self._latency = 0.0
        self._hole: Direction | None = None
        self._limits: dict[Direction, int] = {}
        self._refusing = False
        self._pattern: bytes | None = None
        self._skip = 0
        self._orders: queue.SimpleQueue[tuple[Callable[[], object], threading.Event]] = queue.SimpleQueue()
        self._bell, self._ringer = socket.socketpair()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"proxy of {host}:{port}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ faults

    def cut_reply_to(self, pattern: bytes, *, skip: int = 0) -> None:
        """Lose the answer to the next request with these bytes, after letting them pass `skip` times.

        The server has received the request and answers it; the client only sees its connection end.
        """

        def change() -> None:
            self._pattern, self._skip = pattern, skip
            for each in self._connections:
                each.requests.tail = b""

        self._tell(change)

    def latency(self, seconds: float) -> None:
        """Hold back every byte for so many seconds, in both directions; 0 for none."""
        self._tell(lambda: setattr(self, "_latency", seconds))

    def black_hole(self, direction: Direction | None) -> None:
        """Swallow one direction, the end of a stream included, while the connections stay open.

        None lets bytes pass again and resets the connections that have lost some.
        """

        assert direction in (None, *DIRECTIONS), direction

        def change() -> None:
            self._hole = direction
            if direction is None:
                self._reset([each for each in self._connections if each.holed])

        self._tell(change)

    def reset(self) -> None:
        """End every open connection by RST, on both sides."""
        self._tell(lambda: self._reset(list(self._connections)))

    def cut_after(self, n: int, direction: Direction) -> None:
        """Reset each connection, open or new, after `n` more bytes in this direction: they arrive, no more do."""

        assert direction in DIRECTIONS, direction

        def change() -> None:
            self._limits[direction] = n
            for each in self._connections:
                self._limit(each)

        self._tell(change)

    def refuse(self, refuse: bool = True) -> None:
        """Reset new connections as soon as they are there; open ones stay."""
        self._tell(lambda: setattr(self, "_refusing", refuse))

    def heal(self) -> None:
        """Be transparent again. Connections that have lost bytes are reset; the others go on."""

        def change() -> None:
            self._pattern, self._latency, self._hole, self._refusing = None, 0.0, None, False
            self._limits.clear()
            self._reset([each for each in self._connections if each.holed])
            for each in self._connections:
                each.cutting = False
                self._limit(each)

        self._tell(change)

    def close(self) -> None:
        """End every connection and stop listening."""
        if self._thread.is_alive():
            self._tell(lambda: setattr(self, "_closing", True))
            self._thread.join(PATIENCE)

    # ------------------------------------------------------------ the thread

    def _tell(self, change: Callable[[], object]) -> None:
        done = threading.Event()
        self._orders.put((change, done))
        self._ringer.send(b"\0")
        assert done.wait(PATIENCE), "the proxy's thread does not answer"

    def _run(self) -> None:
        try:
            while not self._closing:
                ready = self._wait()
                self._accept()
                for each in list(self._connections):
                    self._serve(each, ready)
                # after what was there before the call
                if ready.get(self._bell.fileno()):
                    self._bell.recv(1)
                    change, done = self._orders.get()
                    change()
                    done.set()
        finally:
            for each in list(self._connections):
                self._end(each)
            for ours in (self._listener, self._bell, self._ringer):
                ours.close()

    def _wait(self) -> dict[int, int]:
        """Wait until something can be read, written or is due; the events by file descriptor."""
        interest = {self._bell.fileno(): select.POLLIN, self._listener.fileno(): select.POLLIN}
        now, pause = time.monotonic(), None
        for stream in (stream for each in self._connections for stream in each.streams):
            if not (stream.ended or stream.doomed) and stream.size < BUFFER:
                interest[stream.source.fileno()] = interest.get(stream.source.fileno(), 0) | select.POLLIN
            if stream.waiting and stream.waiting[0][0] <= now:
                interest[stream.target.fileno()] = interest.get(stream.target.fileno(), 0) | select.POLLOUT
            elif stream.waiting or stream.doomed:
                due = (
                    stream.waiting[0][0] if stream.waiting else now + 0.01
                )  # the kernel does not tell that all is sent
                pause = min(due - now, pause or due - now)
        poll = select.poll()
        for descriptor, events in interest.items():
            poll.register(descriptor, events)
        # rounded up: a millisecond too early would be a busy loop
        return dict(poll.poll(None if pause is None else int(pause * 1000) + 1))

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                client, _ = self._listener.accept()
                if self._refusing:
                    self.refusals += 1
                    _end(client, reset=True)
                    continue
                server = socket.socket(self._family, socket.SOCK_STREAM)
                for each in (client, server):
                    each.setblocking(False)
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                server.connect_ex(self._target)  # a server that is not there shows when it is read
                connection = _Connection(
                    client, server, _Stream("requests", client, server), _Stream("replies", server, client)
                )
                self._limit(connection)
                self._connections.append(connection)

    def _serve(self, connection: _Connection, ready: dict[int, int]) -> None:
        try:
            for stream in connection.streams:
                events = ready.get(stream.source.fileno(), 0)
                if connection.open and events & _READABLE and not (stream.ended or stream.doomed):
                    self._read(connection, stream)
            for stream in connection.streams:
                if connection.open:
                    self._write(connection, stream)
        except OSError:
            self._end(connection, reset=True)  # one side is broken, so is the other
        if all(stream.ended and not stream.waiting for stream in connection.streams):
            self._end(connection)

    def _read(self, connection: _Connection, stream: _Stream) -> None:
        try:
            data = stream.source.recv(65536)
        except BlockingIOError:
            return
        stream.ended = not data
        if stream.direction == self._hole:
            connection.holed = True
            self.swallowed += len(data)
            return
        if stream is connection.replies and connection.cutting and data:
            # the answer is here, so the request has been carried out, and this is never learnt
            self.cuts += 1
            self._end(connection)
            return
        if stream.left is not None and data:
            stream.doomed = len(data) >= stream.left
            data = data[: stream.left]
            stream.left -= len(data)
        if stream is connection.requests and self._matches(stream, data):
            connection.cutting = True
        stream.size += len(data)
        if data or stream.ended:
            stream.waiting.append((time.monotonic() + self._latency, data))

    def _write(self, connection: _Connection, stream: _Stream) -> None:
        now = time.monotonic()
        while stream.waiting and stream.waiting[0][0] <= now:
            due, data = stream.waiting[0]
            if not data:
                stream.target.shutdown(socket.SHUT_WR)
            try:
                sent = stream.target.send(data) if data else 0
            except BlockingIOError:
                return
            stream.size -= sent
            if sent < len(data):
                stream.waiting[0] = (due, data[sent:])
            else:
                stream.waiting.popleft()
        # a reset throws away what is still to be sent
        if stream.doomed and not stream.waiting and not _unsent(stream.target):
            self._reset([connection])

    def _matches(self, stream: _Stream, data: bytes) -> bool:
        if self._pattern is None:
            return False
        window, start = stream.tail + data, 0
        while (found := window.find(self._pattern, start)) >= 0:
            start = found + len(self._pattern)
            if self._skip == 0:
                self._pattern = None
                return True
            self._skip -= 1
        stream.tail = window[max(start, len(window) - len(self._pattern) + 1) :]
        return False

    def _limit(self, connection: _Connection) -> None:
        for stream in connection.streams:
            stream.left = self._limits.get(stream.direction)

    def _reset(self, connections: list[_Connection]) -> None:
        for each in connections:
            self.resets += 1
            self._end(each, reset=True)

    def _end(self, connection: _Connection, *, reset: bool = False) -> None:
        if connection.open:
            connection.open = False
            self._connections.remove(connection)
            _end(connection.client, reset=reset)
            _end(connection.server, reset=reset)


def _end(each: socket.socket, *, reset: bool) -> None:
    if reset:
        # to linger for no time: the kernel drops what is unsent and sends RST instead of FIN
        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    each.close()


def _unsent(each: socket.socket) -> int:
    """Bytes that the other side has not acknowledged."""
    return int(struct.unpack("i", fcntl.ioctl(each, termios.TIOCOUTQ, b"\0" * 4))[0])
