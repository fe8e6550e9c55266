"""The threads in which keyed requests are claimed and committed: a bounded number, and a bounded wait for one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from .answers import unavailable
from .problems import Refused

T = TypeVar("T")


class Threads:
    """At most `concurrency` threads; a request waits for one for `patience` seconds."""

    def __init__(self, concurrency: int, patience: float) -> None:
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="idempotency-http")
        self._free = asyncio.Semaphore(concurrency)
        self._patience = patience

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread, to its end even if this call is cancelled. Raises `Refused` if none becomes free."""
        try:
            async with asyncio.timeout(self._patience):
                await self._free.acquire()
        except TimeoutError:
            raise Refused(unavailable("Too many requests are being carried out. This one was not begun.")) from None
        working = asyncio.get_running_loop().run_in_executor(self._pool, work)
        working.add_done_callback(lambda _: self._free.release())
        return await asyncio.shield(working)
