"""The tutorial, word by word: what it says to save is saved, what it says to type is typed, and what it prints is compared."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from kombu import Connection

import services
from tests.support.documents import Block, every_block

PAGE = "docs/tutorial.md"
# Seconds that a block may take, on a machine that runs several suites.
LONGEST = 150.0
END_OF_BLOCK = "--- the end of a block"


@pytest.fixture
def shell(servers: services.Services, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A shell in an empty directory, with what the page says is needed."""
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": search, "HOME": str(tmp_path), "TMPDIR": tempfile.gettempdir()}
    name = f"tutorial_{uuid4().hex[:8]}"
    environment |= {"DATABASE_URL": servers.create_database(name), "BROKER_URL": servers.broker_url}
    with (tmp_path / "stderr").open("w") as errors:
        running = subprocess.Popen(
            ["bash", "-e"], cwd=tmp_path, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            text=True, start_new_session=True,
        )  # fmt: skip
    with running:
        yield running
        os.killpg(running.pid, signal.SIGKILL)  # of what the page has started, what it has not stopped
    servers.drop_database(name)
    with Connection(servers.broker_url) as connection, connection.channel() as channel:
        for queue in ("tutorial", "tutorial.dead_letters"):
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


@pytest.mark.timeout(600)
def test_the_tutorial_does_what_it_says(shell: subprocess.Popen[str], tmp_path: Path) -> None:
    blocks = [block for block in every_block(PAGE) if block.not_run is None]
    (application,) = [block for block in blocks if block.language == "python"]
    (tmp_path / "shop.py").write_text(application.text)
    compared = 0
    for block, follower in zip(blocks, [*blocks[1:], None], strict=True):
        if block.language != "sh":
            continue
        printed = typed(shell, block.text)
        if isinstance(follower, Block) and follower.language == "text":
            compared += 1
            assert printed == follower.text, (tmp_path / "stderr").read_text()[-2000:]
    assert compared == len([block for block in blocks if block.language == "text"])
    assert re.search(r"Traceback", (tmp_path / "relay.log").read_text()) is None
