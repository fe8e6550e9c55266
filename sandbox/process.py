"""Run a stand-in as a separate process that can be killed and restarted with the same port and ledger."""

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

STARTUP_SECONDS = 30.0


class Sandbox:
    """One stand-in. It stops when its owner stops it or ends in any way."""

    def __init__(self, kind: Literal["provider", "mail", "carrier"], data: Path, *options: str) -> None:
        self.kind = kind
        self.data = data
        self.url = ""
        self._options = options
        self._process: subprocess.Popen[str] | None = None

    @property
    def port(self) -> int:
        """The port, which stays the same after a restart."""
        return int(self.url.rpartition(":")[2])

    @property
    def pid(self) -> int:
        """The process id. Raises `RuntimeError` if it is not running."""
        if self._process is None:
            raise RuntimeError(f"the {self.kind} sandbox is not running")
        return self._process.pid

    def start(self) -> None:
        """Start it and wait until it listens. Raises `RuntimeError` with the end of its log if it does not within 30 s."""
        self.data.mkdir(parents=True, exist_ok=True)
        log = self.data / f"{self.kind}.log"
        command = [sys.executable, "-m", "sandbox", self.kind, "--data", str(self.data), "--exit-with-stdin"]
        if self.url:
            command += ["--port", str(self.port)]
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [*command, *self._options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=Path(__file__).parent.parent,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )
        line = _first_line(self._process)
        if not line.startswith("ready "):
            self.kill()
            last = log.read_text(errors="replace").strip().splitlines()[-3:]
            raise RuntimeError(f"the {self.kind} sandbox did not start: {' / '.join(last) or 'no output'}")
        self.url = line.removeprefix("ready ").strip()

    def stop(self) -> int:
        """Stop it and return its exit status."""
        return self._end(lambda process: process.terminate())

    def kill(self) -> None:
        """Send SIGKILL, like a crash."""
        self._end(lambda process: process.kill())

    def restart(self) -> None:
        """Kill it if it is running, and start it again with the same port and ledger."""
        self.kill()
        self.start()

    def _end(self, how: Callable[[subprocess.Popen[str]], None]) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        how(process)
        try:
            return process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()
        finally:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


@contextlib.contextmanager
def running(kind: Literal["provider", "mail", "carrier"], data: Path, *options: str) -> Iterator[Sandbox]:
    """Run a stand-in during a `with` block; `options` are those of `python -m sandbox`."""
    sandbox = Sandbox(kind, data, *options)
    sandbox.start()
    try:
        yield sandbox
    finally:
        sandbox.stop()


def _first_line(process: subprocess.Popen[str]) -> str:
    deadline = time.monotonic() + STARTUP_SECONDS
    assert process.stdout is not None
    while process.poll() is None and time.monotonic() < deadline:
        if select.select([process.stdout], [], [], 0.1)[0]:
            return process.stdout.readline()
    return ""
