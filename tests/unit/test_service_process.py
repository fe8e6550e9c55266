"""When a server's process has ended: its port is taken until its last thread has gone."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from services import process, server
from tests.support.processes import eventually

# Its first thread ends, as it may ahead of the others when the process is killed; another goes on until its input ends.
WITHOUT_ITS_FIRST_THREAD = """
import ctypes, os, socket, sys, threading

listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0))).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def _is_zombie(running: psutil.Process) -> bool:
    return running.status() == psutil.STATUS_ZOMBIE


def test_a_process_whose_first_thread_has_ended_before_the_others_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_ITS_FIRST_THREAD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        port = int(child.stdout.readline())
        record = tmp_path / "pid"
        record.write_text(Path(f"/proc/{child.pid}/stat").read_text())
        eventually(lambda: _is_zombie(psutil.Process(child.pid)), what="its first thread has ended")
        with socket.create_connection(("127.0.0.1", port)):
            found = process.find(record)
        assert found is not None
        process.end(found, signal.SIGKILL, timeout=10)
        with socket.create_server(("127.0.0.1", port)):
            pass
        assert process.find(record) is None
        child.stdin.close()


def test_a_port_is_not_chosen_again_before_its_server_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    port = server.free_port()
    monkeypatch.setattr(server, "_PORTS", range(port, port + 1))
    with pytest.raises(server.ServiceError, match=rf"no port of loopback is free from {port} to {port}"):
        server.free_port()
