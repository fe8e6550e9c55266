"""F22 and F23: the web server that carries out a request is killed or frozen, and its client asks another one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import Engine
from sqlalchemy.engine import make_url

from tests.faults.conftest import SeenCell
from tests.faults.marks import each
from tests.faults.scene import PATIENCE, POINTS
from tests.support import crashing
from tests.support.edge import Server, end_lease
from tests.support.operations import Record
from tests.support.outside import OutsideWorld
from tests.support.processes import eventually
from tests.support.proxy import Proxy

KEY = "request-1"
LEASE = "3"


class Web:
    """Two servers, of which the first one carries out the request, and a client."""

    def __init__(self, environment: dict[str, str], database: str, engine: Engine, outside: OutsideWorld) -> None:
        url = make_url(database)
        self.proxy = Proxy(url.host or "", url.port or 5432)
        self.directory = Path(environment["CRASH_DIRECTORY"])
        self.outside = outside
        self._engine = engine
        common = environment | {"OUTSIDE_URL": outside.url, "LEASE": LEASE}
        through = url.set(host="127.0.0.1", port=self.proxy.port).render_as_string(hide_password=False)
        self.first = Server(common | {"DATABASE_URL": through}, crash_directory=self.directory)
        self.second = Server(common | {"DATABASE_URL": database}, crash_directory=None)
        self.client = ThreadPoolExecutor(1)

    def ask(self, server: Server) -> httpx.Response:
        headers = {"idempotency-key": KEY}
        return httpx.post(f"{server.url}/payments", headers=headers, json={"account": KEY}, timeout=PATIENCE)

    def bring_to(self, phase: str, is_committed: Callable[[], bool]) -> Future[httpx.Response]:
        """Send the request to the first server, which is then held in this phase."""
        point = POINTS[phase]
        crashing.plan(self.directory, point, crashing.HOLD)
        asked = self.client.submit(self.ask, self.first)
        eventually((self.directory / f"{point}.held").exists, timeout=PATIENCE, what=f"{point} reached")
        if phase == "P5":
            self.proxy.black_hole("replies")
            self.let_go(phase)
            eventually(is_committed, timeout=PATIENCE, what="committed, reply swallowed")
        return asked

    def let_go(self, phase: str) -> None:
        (self.directory / f"{POINTS[phase]}.go").touch()

    def ask_again(self) -> httpx.Response:
        """What the second server answers, once it is no longer asked to wait."""
        end_lease(self._engine, KEY)
        return eventually(lambda: None if (answer := self.ask(self.second)).status_code in (409, 503) else answer)

    def close(self) -> None:
        for server in (self.first, self.second):
            server.kill()
        self.client.shutdown()
        self.proxy.close()


@pytest.fixture
def web(environment: dict[str, str], database: str, engine: Engine, outside: OutsideWorld) -> Iterator[Web]:
    web = Web(environment, database, engine, outside)
    yield web
    web.close()


def seen(phase: str, web: Web, record: Record, *, is_stale_alive: bool) -> str:
    """The letter: attempts and calls as they are left behind."""
    found: Any = record(KEY)
    assert found.status == "completed"
    (calls,) = web.outside.calls.values()
    if found.attempts == 1:
        return {"P5": "U", "P6": "D"}.get(phase, "R")
    if calls > 1:
        return "G"
    return "R+" if is_stale_alive else "R"


@pytest.mark.parametrize("phase", each("F22", "P0", "P1", "P2", "P3", "P4", "P5", "P6"))
def test_the_web_server_is_killed(phase: str, web: Web, record: Record, cell: SeenCell) -> None:
    def is_committed() -> bool:
        found = record(KEY)
        return found is not None and found.status == "completed"

    asked = web.bring_to(phase, is_committed)
    web.first.kill()
    with pytest.raises(httpx.TransportError):
        asked.result(PATIENCE)
    answer = web.ask_again()
    assert answer.status_code == 201
    assert web.ask(web.second).content == answer.content
    cell.saw(seen(phase, web, record, is_stale_alive=False))


@pytest.mark.parametrize("phase", each("F23", "P0", "P1", "P2", "P3", "P4", "P6"))
def test_the_web_server_is_frozen_and_goes_on_later(phase: str, web: Web, record: Record, cell: SeenCell) -> None:
    asked = web.bring_to(phase, lambda: True)
    os.kill(web.first.process.pid, signal.SIGSTOP)
    answer = web.ask_again()
    assert answer.status_code == 201
    os.kill(web.first.process.pid, signal.SIGCONT)
    web.let_go(phase)
    assert asked.result(PATIENCE).content == answer.content
    cell.saw(seen(phase, web, record, is_stale_alive=True))
