"""A pytest plugin for the suite of `asgi-idempotency-header`, in that suite's own environment.

With EDGE_SUITE_SIDE=ours, its middleware is ours, behind an adapter: the names of its options and of the header that
marks a replay are translated, and nothing else. EDGE_SUITE_OUTCOMES names the file for each test's outcome.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from idempotency_header_middleware import middleware  # type: ignore[import-not-found]
from starlette.applications import Starlette

_add_middleware = Starlette.add_middleware
_outcomes: dict[str, str] = {}


def _add_at_any_time(self: Starlette, *args: Any, **kwargs: Any) -> None:
    """The suite changes the middleware between its tests, which Starlette has refused since it was written."""
    self.middleware_stack = None
    _add_middleware(self, *args, **kwargs)


Starlette.add_middleware = _add_at_any_time  # type: ignore[method-assign]


def _ours() -> Any:
    from idempotency.attempt.runtime import Runtime
    from idempotency.http import IdempotencyMiddleware
    from idempotency.settings import Settings

    runtime = Runtime(Settings.read({"database_url": os.environ["DATABASE_URL"]}))

    class Adapter:
        def __init__(self, app: Any, *, applicable_methods: list[str], **_: Any) -> None:
            self._inner = IdempotencyMiddleware(app, runtime=runtime, methods=applicable_methods)

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            async def renamed(message: Any) -> None:
                if message["type"] == "http.response.start":
                    names = {b"idempotency-replayed": b"idempotent-replayed"}
                    message = message | {
                        "headers": [(names.get(name, name), value) for name, value in message["headers"]]
                    }
                await send(message)

            await self._inner(scope, receive, renamed)

    return Adapter


if os.environ["EDGE_SUITE_SIDE"] == "ours":
    middleware.IdempotencyHeaderMiddleware = _ours()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        _outcomes[report.nodeid.removeprefix("tests/")] = report.outcome


def pytest_sessionfinish() -> None:
    with open(os.environ["EDGE_SUITE_OUTCOMES"], "w") as file:
        json.dump(_outcomes, file)
