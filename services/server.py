"""The base of all local servers: a directory, ports, a password, and a process to start and stop."""

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
from itertools import islice
from pathlib import Path
from typing import ClassVar

import psutil

from services import process

# Seconds: a machine that runs several suites starts four of everything at once.
READY_SECONDS = 120.0
# Below the range for outgoing connections, so that the kernel does not assign the port while a server is down.
_PORTS = range(10_000, 32_000)
# What this process chose last: of a cluster, all ports are chosen before the first server listens.
_chosen: deque[int] = deque(maxlen=1000)
# The file in a server's directory with its password and ports.
SETTINGS = "settings.json"


class ServiceError(RuntimeError):
    """A server could not be started, reached or found; the message says which and why."""


class Server(ABC):
    """A server on 127.0.0.1 that keeps its port, password and data across restarts.

    Its directory contains everything needed to find it again, so another process can stop it.
    """

    name: ClassVar[str]
    port_names: ClassVar[Sequence[str]] = ("main",)
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    # Ends the server immediately if its data is not needed, without leaving anything outside the directory.
    discard_signal: ClassVar[signal.Signals] = signal.SIGKILL

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log = directory / "log"
        self._record = directory / "pid"
        self._settings = directory / SETTINGS
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.password, self.ports = self._load_settings()

    @property
    @abstractmethod
    def url(self) -> str:
        """The address for clients, password included."""

    @abstractmethod
    def _command(self) -> Sequence[str | Path]:
        """The program and its arguments; called before each start, and may create files."""

    @abstractmethod
    def _check(self) -> None:
        """Raise any exception unless the server answers its clients."""

    @property
    def port(self) -> int:
        """The clients' port."""
        return self.ports[self.port_names[0]]

    @property
    def pid(self) -> int:
        """The pid of the server's main process. Raises `ServiceError` if it is not running."""
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
        """Start the server and wait until it answers. Raises `ServiceError` with the end of its log otherwise."""
        self.launch()
        self.wait_until_ready(timeout)

    def launch(self) -> None:
        """Start the server, unless it is running, without waiting for it."""
        if not self.running:
            self._spawn(self._command(), self._record)

    def wait_until_ready(self, timeout: float = READY_SECONDS) -> None:
        """Wait until the server answers. Raises `ServiceError` if it ends or does not answer for `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            alive = self.running
            try:
                self._check()
            except Exception as error:
                if not alive:
                    raise ServiceError(f"{self.name} ended while starting.{self._log_tail()}") from None
                if time.monotonic() > deadline:
                    raise ServiceError(
                        f"{self.name} did not answer within {timeout:g} s ({type(error).__name__}).{self._log_tail()}"
                    ) from None
                time.sleep(0.05)
            else:
                return

    def stop(self) -> None:
        """Shut down gracefully, keeping the data; kill it after 30 s. Does nothing if it is not running."""
        self._end(self.stop_signal)

    def discard(self) -> None:
        """End immediately; data may be lost."""
        self._end(self.discard_signal)

    def kill(self) -> None:
        """SIGKILL the server and all its children, like a crash of the machine."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Stop and start again, with the same port and data."""
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

    @property
    def _holds_ports(self) -> bool:
        """Whether a port that is not free is this server's own."""
        return self.running

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

    def _log_tail(self, lines: int = 15) -> str:
        try:
            with self.log.open(errors="replace") as log:
                tail = "".join(deque(log, maxlen=lines)).rstrip()
        except OSError:
            tail = ""
        tail = tail.replace(self.password, "***")
        return f" The end of its log:\n{tail}" if tail else " Its log is empty."

    @classmethod
    def share_password(cls, directory: Path, password: str) -> None:
        """Give the server that will be in a directory a password, which others have, too; one that it has stays."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        settings = directory / SETTINGS
        if not settings.exists():
            settings.touch(mode=0o600)
            settings.write_text(json.dumps({"password": password, "ports": {}}))

    def _load_settings(self) -> tuple[str, dict[str, int]]:
        try:
            stored = json.loads(self._settings.read_text())
        except FileNotFoundError:
            stored = {"password": secrets.token_urlsafe(18), "ports": {}}
        ports = {name: stored["ports"].get(name) for name in self.port_names}
        # Another program may have taken the port while the server was down.
        if not self._holds_ports and not all(port and _is_free(port) for port in ports.values()):
            ports = dict(zip(self.port_names, _free_ports(len(self.port_names)), strict=True))
        settings = {"password": stored["password"], "ports": ports}
        self._settings.touch(mode=0o600)
        self._settings.write_text(json.dumps(settings))
        return settings["password"], ports


def free_port() -> int:
    """A port of loopback that nothing listens on now. At random, because another checkout may be choosing at the same time."""
    return _free_ports(1)[0]


def _free_ports(count: int) -> list[int]:
    # not by the seed that a test or a drill has set: two of them at once would draw the same
    candidates = random.SystemRandom().sample(_PORTS, len(_PORTS))
    free = (port for port in candidates if port not in _chosen and _is_free(port))
    chosen = list(islice(free, count))
    if len(chosen) < count:
        raise ServiceError(f"no port of loopback is free from {_PORTS.start} to {_PORTS.stop - 1}")
    _chosen.extend(chosen)
    return chosen


def _is_free(port: int) -> bool:
    with socket.socket() as candidate:
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            candidate.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
