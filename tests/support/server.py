"""Processes of the application over HTTP, on one socket that outlives them: killed and restarted at the same address."""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import Engine

from idempotency.store import tenants
from tests.support.processes import START_WITHIN, eventually


class Server:
    """`uvicorn` processes that accept from one socket. Kept by the test, it holds requests while none of them runs."""

    def __init__(self, environment: Mapping[str, str], *, factory: str = "tests.support.server:create_app") -> None:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=200)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._environment = dict(environment)
        self._factory = factory
        self._log = Path(tempfile.mkstemp(prefix="server-", suffix=".log")[1])
        self.processes: list[subprocess.Popen[bytes]] = []

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def start(self, **environment: str) -> subprocess.Popen[bytes]:
        """One more process; returns when it accepts requests."""
        number = self._socket.fileno()
        command = [sys.executable, "-m", "uvicorn", "--factory", self._factory, "--fd", str(number)]
        begun = self.log.count("Application startup complete")
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                [*command, "--log-level", "info", "--no-access-log"],
                env=self._environment | environment,
                pass_fds=(number,),
                stdout=log,
                stderr=log,
            )
        self.processes.append(process)
        eventually(
            lambda: self.log.count("Application startup complete") > begun or process.poll() is not None,
            timeout=START_WITHIN,
            what="server ready",
        )
        assert process.poll() is None, self.log[-3000:]
        return process

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait(60)
        self._socket.close()
        self._log.unlink(missing_ok=True)


@contextmanager
def serving(environment: Mapping[str, str], **options: Any) -> Iterator[Server]:
    """A server with one process."""
    server = Server(environment, **options)
    try:
        server.start()
        yield server
    finally:
        server.stop()


def api_key(engine: Engine, tenant: str, scopes: Sequence[str] = ("*",)) -> str:
    """A new key of a tenant."""
    id = secrets.token_hex(4)
    key = f"ik_{id}_{secrets.token_urlsafe(32)}"
    with engine.begin() as connection:
        tenants.create(connection, id, tenant=tenant, name="tests", scopes=scopes, key=key, expires_at=None)
    return key


def client(server: Server, key: str) -> httpx.Client:
    """A client with a tenant's key."""
    return httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {key}"}, timeout=30)


def create_app() -> Any:
    """The application, with the crash points that tests plan."""
    from api.application import create_app
    from tests.support import crashing

    crashing.install()
    return create_app()


def create_unlimited_app() -> Any:
    """The application, without the limits on how often operators may ask."""
    from api.application import create_app
    from api.limits import RateLimit

    RateLimit.take = lambda self, caller: 0  # type: ignore[method-assign]
    return create_app()
