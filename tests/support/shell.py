"""A page of the documentation, typed word by word into a shell: what it prints is compared with what the page says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from kombu import Connection

import services
from tests.support.documents import Block

# Seconds that a block may take, on a machine that runs several suites.
LONGEST = 150.0
END_OF_BLOCK = "--- the end of a block"


@contextmanager
def opened(servers: services.Services, directory: Path, queues: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A shell in an empty directory, with a database of its own, and the broker, from which these queues are deleted at the end."""
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": search, "HOME": str(directory), "TMPDIR": tempfile.gettempdir()}
    name = f"typed_{uuid4().hex[:8]}"
    environment |= {"DATABASE_URL": servers.create_database(name), "BROKER_URL": servers.broker_url}
    with (directory / "stderr").open("w") as errors:
        running = subprocess.Popen(
            ["bash", "-e"], cwd=directory, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            text=True, start_new_session=True,
        )  # fmt: skip
    with running:
        yield running
        os.killpg(running.pid, signal.SIGKILL)  # of what the page has started, what it has not stopped
    servers.drop_database(name)
    with Connection(servers.broker_url) as connection, connection.channel() as channel:
        for queue in queues:
            channel.queue_delete(queue)


def typed(shell: subprocess.Popen[str], lines: str) -> str:
    """What these lines print, once all of them that do not run in the background are done."""
    assert shell.stdin is not None
    assert shell.stdout is not None
    shell.stdin.write(f"{lines}echo '{END_OF_BLOCK}'\n")
    shell.stdin.flush()
    printed: list[str] = []
    too_long = threading.Timer(LONGEST, os.killpg, [shell.pid, signal.SIGKILL])
    too_long.start()
    try:
        for line in shell.stdout:
            if line == f"{END_OF_BLOCK}\n":
                return "".join(printed)
            printed.append(line)
    finally:
        too_long.cancel()
    raise AssertionError(f"{lines} ended with status {shell.wait()}, after it had printed {''.join(printed)}")


def type_out(shell: subprocess.Popen[str], blocks: Sequence[Block], errors: Path) -> int:
    """Type all blocks of `sh`, and compare what they print with the block of `text` behind each. Returns how many were compared."""
    compared = 0
    for block, follower in zip(blocks, [*blocks[1:], None], strict=True):
        if block.language != "sh":
            continue
        printed = typed(shell, block.text)
        if isinstance(follower, Block) and follower.language == "text":
            compared += 1
            assert printed == follower.text, f"{printed!r}\n{errors.read_text()[-2000:]}"
    return compared
