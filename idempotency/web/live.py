"""The page of flow, kept up to date by server-sent events. Without them, reload."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from .desk import visitor_of
from .flow import seen
from .shown import render

# Seconds between two looks; and for which one stream lasts: the browser begins another, which asks for the session again.
EVERY, LONGEST = 5.0, 600.0
# The most streams of this process at a time.
MOST = 100
_open = 0
# Threads that all streams take at a time.
_looking = asyncio.Semaphore(4)


async def live(request: Request) -> Response:
    """What has changed, as the HTML of the page's tables."""
    if _open >= MOST:
        return PlainTextResponse("too many pages are open; this one does not change by itself\n", 503)
    return StreamingResponse(_events(request), media_type="text/event-stream")


async def _events(request: Request) -> AsyncIterator[str]:
    global _open
    _open += 1
    until, last = time.monotonic() + LONGEST, ""
    try:
        yield f"retry: {int(EVERY * 1000)}\n\n"
        while time.monotonic() < until and time.time() < visitor_of(request).until:
            async with _looking:
                shown = await run_in_threadpool(lambda: render(request, "flow_tables.html", **seen(request)))
            if shown != last:
                yield "".join(f"data: {line}\n" for line in shown.splitlines()) + "\n"
                last = shown
            else:
                yield ": the same\n\n"  # so that a connection that is gone is noticed
            await asyncio.sleep(EVERY)
    finally:
        _open -= 1


routes = [Route("/live", live)]
