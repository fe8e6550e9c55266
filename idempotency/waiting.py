"""Waiting on an event loop for operations to end: by NOTIFY, with one connection and one thread for all waiters.

A waiter holds no connection. It leaves a row in Postgres, so that the end of its operation notifies, and then reads
the record once, since the end may have come before. A NOTIFY may be missed: while the connection is being replaced, or
if the end began before the row was there. So once a second the thread reads all of the process's operations in one
statement. Behind a pooler, which passes on no NOTIFY, that is all it does.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection
from contextlib import closing, nullcontext, suppress
from multiprocessing.connection import wait as ready
from socket import socketpair

from .attempt.runtime import Runtime
from .observe.logs import log
from .store import waiters
from .store.statements import describe, is_news
from .wire.keys import OperationId

# Seconds between two reads of all operations that are waited for.
POLL = 1.0
# Seconds until Postgres is asked again for a connection.
PAUSE = 1.0
# Waiters of a process. Further ones return at once: each costs a statement when it begins and when it ends.
LIMIT = 1000
# Those of one tenant, which must not take the places of all others.
LIMIT_OF_A_TENANT = 200

_Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class Ends:
    """Tells when operations have ended. One for each process; `close()` it at the end."""

    def __init__(self, runtime: Runtime, *, limit: int = LIMIT, limit_of_a_tenant: int = LIMIT_OF_A_TENANT) -> None:
        self._runtime = runtime
        self._limit = limit
        self._limit_of_a_tenant = limit_of_a_tenant
        self._lock = threading.Lock()
        self._waiting: dict[OperationId, set[_Waiter]] = {}
        self._by_digest: dict[str, OperationId] = {}
        self._ended: set[OperationId] = set()
        self._closed = threading.Event()
        self._interrupt, self._interrupted = socketpair()  # ends the thread's wait for a NOTIFY
        self._thread = threading.Thread(target=self._run, name="idempotency-ends", daemon=True)
        self._thread.start()

    async def wait(self, id: OperationId, seconds: float) -> bool | None:
        """Wait until the operation has ended, for at most so many seconds. False: not by then, as far as is known.

        None at once, without waiting, while `limit` others wait, or too many of this tenant. Raises `SQLAlchemyError` if
        Postgres cannot be asked.
        """
        loop = asyncio.get_running_loop()
        waiter = (loop, loop.create_future())
        if not self._enlist(id, waiter):
            return None
        try:
            async with asyncio.timeout(seconds):
                if not await loop.run_in_executor(self._runtime.readers, self._begin, id, seconds):
                    await waiter[1]
            return True
        except TimeoutError:
            return False
        finally:
            self._leave(id, waiter)

    def close(self) -> None:
        """Stop listening. Calls that still wait return when their time is over."""
        self._closed.set()
        self._interrupt.send(b".")
        self._thread.join(POLL + PAUSE)
        self._interrupt.close()
        self._interrupted.close()

    # ------------------------------------------------------------ waiters

    def _enlist(self, id: OperationId, waiter: _Waiter) -> bool:
        with self._lock:
            of_all = sum(map(len, self._waiting.values()))
            of_tenant = sum(len(each) for other, each in self._waiting.items() if other.tenant == id.tenant)
            if of_all >= self._limit or of_tenant >= self._limit_of_a_tenant:
                return False
            self._waiting.setdefault(id, set()).add(waiter)
            self._by_digest[waiters.digest(id)] = id
            return True

    def _leave(self, id: OperationId, waiter: _Waiter) -> None:
        with self._lock:
            waiters_of = self._waiting.get(id, set())
            waiters_of.discard(waiter)
            if not waiters_of:
                self._waiting.pop(id, None)
                self._by_digest.pop(waiters.digest(id), None)

    def _begin(self, id: OperationId, seconds: float) -> bool:
        """Ask for the NOTIFY, and only then read the record: an end that comes later finds the row."""
        with self._runtime.autocommit(id.tenant) as connection:
            waiters.add(connection, id, seconds)
            if waiters.ended(connection, [id]):
                waiters.remove(connection, [id])
                return True
        return False

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._listen()
            except Exception as error:  # of a wrong setting, too: once it is right, the waiting goes on
                if is_news(error):
                    log.warning("waiting_for_postgres", error=describe(error))
                self._closed.wait(PAUSE)

    def _listen(self) -> None:
        listener = self._runtime.listen(waiters.CHANNEL)
        with closing(listener) if listener is not None else nullcontext():
            while not self._closed.is_set():
                if listener is None:
                    self._closed.wait(POLL)
                else:
                    ready([listener.fileno(), self._interrupted], timeout=POLL)
                    for notice in listener.notifies(timeout=0):
                        self._wake_by_digest(notice.payload)
                self._poll()

    def _wake_by_digest(self, digest: str) -> None:
        with self._lock:
            id = self._by_digest.get(digest)
        if id is not None:
            self._wake([id])

    def _poll(self) -> None:
        """Wake waiters whose NOTIFY was missed, and delete the rows of operations that have ended."""
        with self._lock:
            ids, self._ended, ended = list(self._waiting), set(), self._ended
        if not (ids or ended):
            return
        with self._runtime.autocommit(*{id.tenant for id in (*ids, *ended)}) as connection:
            if ids:
                found = waiters.ended(connection, ids)
                self._wake(found)
                ended |= set(found)
            if ended:
                waiters.remove(connection, ended)

    def _wake(self, ids: Collection[OperationId]) -> None:
        with self._lock:
            told = [waiter for id in ids for waiter in self._waiting.get(id, ())]
            self._ended |= set(ids)
        for loop, future in told:
            with suppress(RuntimeError):  # its loop has ended
                loop.call_soon_threadsafe(_finish, future)


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
