"""What every local server has in common: a directory, ports, a password, and a process to start and stop."""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import socket
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import psutil

from services import process

READY_SECONDS = 60.0
# Below the range the kernel hands to outgoing connections, so that nobody takes the port while a server is down.
_PORTS = range(10_000, 32_000)


class ServiceError(RuntimeError):
    """A server could not be started, reached or found; the message says which and why."""


class Server(ABC):
    """One server of this project on 127.0.0.1; restarts keep its port, password and data directory.

    What it needs to be found again lies in its directory, so another process may stop it.
    """

    name: ClassVar[str]
    port_names: ClassVar[Sequence[str]] = ("main",)
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    # For servers whose data is thrown away: ends at once, but leaves nothing behind outside the directory.
    discard_signal: ClassVar[signal.Signals] = signal.SIGKILL

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log = directory / "log"
        self._record = directory / "pid"
        self._settings = directory / "settings.json"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.password, self.ports = self._load_settings()

    @property
    @abstractmethod
    def url(self) -> str:
        """The address for clients, password included."""

    @abstractmethod
    def _command(self) -> Sequence[str | Path]:
        """The program and its arguments; called before each start, and may prepare files."""

    @abstractmethod
    def _check(self) -> None:
        """Raise any exception unless the server answers its clients."""

    @property
    def port(self) -> int:
        """The port clients connect to."""
        return self.ports[self.port_names[0]]

    @property
    def pid(self) -> int:
        """The pid of the server's main process; ServiceError when it does not run."""
        return self._process().pid

    @property
    def running(self) -> bool:
        """Whether the server's main process exists, answering or not."""
        return process.find(self._record) is not None

    def answers(self) -> bool:
        """Whether the server answers its clients now, within a few seconds."""
        try:
            self._check()
        except Exception:
            return False
        return True

    def start(self, timeout: float = READY_SECONDS) -> None:
        """Start the server and return when it answers; ServiceError with its last words otherwise."""
        self.launch()
        self.wait_until_ready(timeout)

    def launch(self) -> None:
        """Start the server without waiting; nothing happens when it already runs."""
        if not self.running:
            self._spawn(self._command(), self._record)

    def wait_until_ready(self, timeout: float = READY_SECONDS) -> None:
        """Return when the server answers; ServiceError when it ends or stays silent for `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            alive = self.running
            try:
                self._check()
            except Exception as error:
                if not alive:
                    raise ServiceError(f"{self.name} ended while starting.{self._last_words()}") from None
                if time.monotonic() > deadline:
                    raise ServiceError(
                        f"{self.name} did not answer within {timeout:g} s ({type(error).__name__}).{self._last_words()}"
                    ) from None
                time.sleep(0.05)
            else:
                return

    def stop(self) -> None:
        """Shut down in order, keeping the data; kills after 30 s. Nothing happens when it does not run."""
        self._end(self.stop_signal)

    def discard(self) -> None:
        """End at once, without caring for the data."""
        self._end(self.discard_signal)

    def kill(self) -> None:
        """SIGKILL the server and all its children, as a crash of the machine would."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Stop and start again, on the same port with the same data."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """SIGSTOP the server and all its children: connections stay open and nothing answers."""
        # The parent first: a stopped parent starts no further children.
        main = self._process()
        main.suspend()
        process.signal_all(process.family(main), signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT what `pause` stopped."""
        process.signal_all(process.family(self._process()), signal.SIGCONT)

    def _environment(self) -> dict[str, str]:
        return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8", "HOME": str(self.directory)}

    def _spawn(self, command: Sequence[str | Path], record: Path) -> None:
        process.launch(command, record=record, log=self.log, directory=self.directory, environment=self._environment())

    def _process(self) -> psutil.Process:
        found = process.find(self._record)
        if found is None:
            raise ServiceError(f"{self.name} is not running")
        return found

    def _end(self, how: signal.Signals) -> None:
        found = process.find(self._record)
        if found is not None:
            process.end(found, how, timeout=30)

    def _last_words(self, lines: int = 15) -> str:
        try:
            with self.log.open(errors="replace") as log:
                tail = "".join(deque(log, maxlen=lines)).rstrip()
        except OSError:
            tail = ""
        tail = tail.replace(self.password, "***")
        return f" Its last words:\n{tail}" if tail else " It wrote nothing."

    def _load_settings(self) -> tuple[str, dict[str, int]]:
        try:
            stored = json.loads(self._settings.read_text())
        except FileNotFoundError:
            stored = {"password": secrets.token_urlsafe(18), "ports": {}}
        ports = {name: stored["ports"].get(name) for name in self.port_names}
        # A server that is down may have lost its port to another program since; the data stays.
        if not self.running and not all(port and _is_free(port) for port in ports.values()):
            ports = dict(zip(self.port_names, _free_ports(len(self.port_names)), strict=True))
        settings = {"password": stored["password"], "ports": ports}
        self._settings.touch(mode=0o600)
        self._settings.write_text(json.dumps(settings))
        return settings["password"], ports


def _free_ports(count: int) -> list[int]:
    # Drawn at random, because another checkout may be choosing at the same moment.
    drawn = (port for port in random.sample(_PORTS, len(_PORTS)) if _is_free(port))
    return [next(drawn) for _ in range(count)]


def _is_free(port: int) -> bool:
    with socket.socket() as candidate:
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            candidate.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
