"""The threads in which keyed requests are carried out: a bounded number, a bounded wait for one, and a share for each tenant."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import TypeVar

from ..wire.keys import OperationId
from .answers import unavailable
from .problems import Refused

T = TypeVar("T")
# Threads that one operation may have: one that has perhaps lost it, and one that takes it over. A client that sends a
# request whose record is locked again and again must not use them all.
PER_OPERATION = 2


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A request that waits for a thread, on its own event loop."""

    id: OperationId
    loop: asyncio.AbstractEventLoop
    turn: asyncio.Future[None]

    def wake(self) -> None:
        if not self.turn.done():
            self.turn.set_result(None)


class Threads:
    """At most `concurrency` threads; a request waits for one for `patience` seconds.

    With `tenants`, a tenant gets a further thread only while more are free than it has: one alone gets half of them, two
    a third each, and there is always one for another. Requests may come from several event loops.
    """

    def __init__(self, concurrency: int, patience: float, *, tenants: bool) -> None:
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="idempotency-http")
        self._patience = patience
        self._tenants = tenants
        self._lock = Lock()
        self._free = concurrency
        self._held: Counter[str | OperationId] = Counter()
        self._waiting: list[_Waiting] = []

    async def run(self, id: OperationId, work: Callable[[], T], peek: Callable[[], Awaitable[T | None]]) -> T:
        """Run `work` in a thread, to its end even if this call is cancelled. Raises `Refused` if none becomes free.

        If none is free at once, `peek` may answer without one.
        """
        with self._lock:
            is_taken = self._take(id)
        if not is_taken:
            if (known := await peek()) is not None:
                return known
            await self._wait(id)

        def held() -> T:
            try:
                return work()
            finally:
                self._release(id)

        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._pool, held))

    def _take(self, id: OperationId) -> bool:
        taken = self._held[id.tenant] if self._tenants else 0
        if self._free <= taken or self._held[id] >= PER_OPERATION:
            return False
        self._free -= 1
        self._held.update((id, id.tenant))
        return True

    async def _wait(self, id: OperationId) -> None:
        loop = asyncio.get_running_loop()
        waiting = _Waiting(id, loop, loop.create_future())
        with self._lock:
            if self._take(id):
                return
            self._waiting.append(waiting)
        try:
            async with asyncio.timeout(self._patience):
                await waiting.turn
        except BaseException as error:
            with self._lock:
                if waiting in self._waiting:
                    self._waiting.remove(waiting)
                else:  # its turn has come meanwhile
                    self._give_back(id)
            if isinstance(error, TimeoutError):
                raise Refused(unavailable("Too many requests are being carried out. This one was not begun.")) from None
            raise

    def _release(self, id: OperationId) -> None:
        with self._lock:
            self._give_back(id)

    def _give_back(self, id: OperationId) -> None:
        self._count_back(id)
        for waiting in list(self._waiting):
            if self._free and self._take(waiting.id):
                self._waiting.remove(waiting)
                try:
                    waiting.loop.call_soon_threadsafe(waiting.wake)
                except RuntimeError:  # its loop is closed
                    self._count_back(waiting.id)

    def _count_back(self, id: OperationId) -> None:
        self._free += 1
        self._held.subtract((id, id.tenant))
        for name in (id, id.tenant):
            if not self._held[name]:
                del self._held[name]
