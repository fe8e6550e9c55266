"""`idempotency web` as a process: what it serves, what it refuses, and that it ends when it is told to."""

from __future__ import annotations

import signal
import subprocess
import sys

import httpx
import pytest
from celery import Celery

from services.server import free_port
from tests.support import bank as b
from tests.support.processes import START_WITHIN, eventually


def command(*options: object) -> list[str]:
    return [sys.executable, "-m", "idempotency.cli", "web", "-A", "tests.support.bank", *map(str, options)]


def test_the_command_serves_the_page_and_what_changes_in_it(bank: Celery, environment: dict[str, str]) -> None:
    port = free_port()
    process = subprocess.Popen(
        command("--port", port), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:

        def answers() -> bool:
            assert process.poll() is None, "it has ended"
            try:
                return httpx.get(f"http://127.0.0.1:{port}/health").is_success
            except httpx.TransportError:
                return False

        eventually(answers, timeout=START_WITHIN, what="the page")
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            first = client.get("/")
            assert (first.status_code, "reader · reader" in first.text) == (200, True)
            b.enqueue_deposit()
            with client.stream("GET", "/live") as live:
                event = ""
                for line in live.iter_lines():
                    event += line
                    if event.endswith("</table>"):
                        break
            assert bank.conf.task_default_queue in event
            assert "<script" not in event
            assert not [line for line in event.split("data: ")[1:] if "<html" in line]
    finally:
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=30)
    assert process.returncode in (0, -signal.SIGTERM)
    assert f"page at http://127.0.0.1:{port}/ (everyone is reader)" in said


@pytest.mark.long
def test_the_command_does_not_start_where_others_reach_it(environment: dict[str, str]) -> None:
    refused = subprocess.run(command("--host", "0.0.0.0"), env=environment, capture_output=True, text=True, timeout=120)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith("idempotency: --host 0.0.0.0: others reach it, so people have to log in")
    assert refused.stderr.count("\n") == 1
