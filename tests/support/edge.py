"""What the tests of the HTTP edge send, and what they look at afterwards."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import httpx
from sqlalchemy import Engine, Row, text

from idempotency.attempt.runtime import Runtime
from idempotency.http import IdempotencyMiddleware
from idempotency.http.asgi import Application, Receive, Scope, Send

T = TypeVar("T")
INSERT = text("INSERT INTO entries (account, amount) VALUES (:account, 1)")


@dataclass(frozen=True)
class Edge:
    """A runtime, and a connection to look past it."""

    runtime: Runtime
    engine: Engine

    def middleware(self, app: Application, **options: Any) -> IdempotencyMiddleware:
        return IdempotencyMiddleware(app, runtime=self.runtime, **options)

    def use(self, app: Application, send: Callable[[httpx.AsyncClient], Awaitable[T]], **options: Any) -> T:
        """What `send` returns, which is given a client of the application behind the middleware."""
        return asyncio.run(within(self.middleware(app, **options), send))

    def record(self, key: str) -> Row[Any] | None:
        with self.engine.connect() as connection:
            return connection.execute(
                text("SELECT * FROM idempotency.records WHERE key = :key"), {"key": key}
            ).one_or_none()

    def entries(self, account: str) -> int:
        with self.engine.connect() as connection:
            query = text("SELECT count(*) FROM entries WHERE account = :account")
            return int(connection.execute(query, {"account": account}).scalar_one())

    def letters(self, key: str) -> list[str]:
        with self.engine.connect() as connection:
            query = text("SELECT reason FROM idempotency.dead_letters WHERE key = :key ORDER BY id")
            return list(connection.execute(query, {"key": key}).scalars())


def end_lease(engine: Engine, key: str) -> None:
    """What waiting for a lease does."""
    over = "locked_until = clock_timestamp() - interval '1 s'"
    with engine.connect() as connection:
        statement = f"UPDATE idempotency.records SET {over} WHERE key = :key AND status = 'started'"
        connection.execute(text(statement), {"key": key})


async def within(app: Application, send: Callable[[httpx.AsyncClient], Awaitable[T]]) -> T:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://edge") as client:
        return await send(client)


def new_key() -> str:
    return f"key-{uuid4()}"


class Handler:
    """An ASGI application that counts its runs, writes one entry for the request's key, and answers as it is told."""

    def __init__(self, status: int = 201, body: bytes = b'{"done": true}', *headers: tuple[bytes, bytes]) -> None:
        self.status = status
        self.body = body
        self.headers = [(b"content-type", b"application/json"), *headers]
        self.runs = 0
        self.received: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.runs += 1
        self.received.append((await receive())["body"])
        attempt = scope.get("state", {}).get("idempotency")
        if attempt is not None:
            await attempt.run_sync(lambda session: session.execute(INSERT, {"account": attempt.key}))
        await self.answer(send)

    async def answer(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.body})


class Server:
    """A uvicorn process on a free port of loopback."""

    def __init__(
        self,
        environment: Mapping[str, str],
        app: str = "tests.support.edge_application:app",
        *,
        crash_directory: Path | None = None,
    ) -> None:
        own = {name: value for name, value in environment.items() if name != "CRASH_DIRECTORY"}
        if crash_directory is not None:
            own["CRASH_DIRECTORY"] = str(crash_directory)
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            listening.listen(200)
            self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            command = [sys.executable, "-m", "uvicorn", app, "--fd", str(listening.fileno()), "--log-level", "warning"]
            self.process = subprocess.Popen(command, env=own, pass_fds=[listening.fileno()])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)

    def stop(self) -> None:
        """A graceful shutdown."""
        self.process.terminate()
        self.process.wait(30)
