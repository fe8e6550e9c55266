"""`make audit`, with a real pip-audit and an advisory service on this machine: it is red on what is known, and says if nobody answers."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long  # it makes .venv-audit, from the package index

ROOT = Path(__file__).parents[2]
PROOF, PINNED = ("jinja2", "2.4.1"), "celery"
Known = Callable[[str, str], bool]


class Advisories:
    """Answers as the service OSV does; `knows` says which versions are vulnerable."""

    def __init__(self) -> None:
        self.knows: Known = lambda name, version: False
        self.asked: set[str] = set()
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                name, version = query["package"]["name"], query["version"]
                service.asked.add(name)
                body = json.dumps({"vulns": [advisory(name)]} if service.knows(name, version) else {}).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/query"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def advisory(name: str) -> dict[str, Any]:
    ranges = [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "999"}]}]
    affected = [{"package": {"ecosystem": "PyPI", "name": name}, "ranges": ranges}]
    times = {"published": "2020-01-01T00:00:00Z", "modified": "2020-01-01T00:00:00Z"}
    return {"id": "TEST-1", "summary": "known", "affected": affected} | times


@pytest.fixture
def advisories() -> Iterator[Advisories]:
    running = Advisories()
    yield running
    running.close()


def audit(url: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", "audit", f"ARGS=-s osv --osv-url {url}", f"PYTHON={sys.executable}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_it_is_green_if_only_the_proof_is_known(advisories: Advisories) -> None:
    advisories.knows = lambda *package: package == PROOF
    done = audit(advisories.url)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "audit: the service sees: 1 advisories about jinja2==2.4.1" in done.stdout
    pinned = {line.partition("=")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert PINNED in pinned & advisories.asked
    assert len(advisories.asked) > 100


def test_it_is_red_on_a_pinned_version_that_is_known(advisories: Advisories) -> None:
    advisories.knows = lambda name, version: (name, version) == PROOF or name == PINNED
    done = audit(advisories.url)
    assert done.returncode != 0
    assert "TEST-1" in done.stdout
    assert PINNED in done.stdout


def test_it_is_red_if_the_service_does_not_report_a_known_advisory(advisories: Advisories) -> None:
    done = audit(advisories.url)
    assert done.returncode != 0
    assert "the audit sees nothing" in done.stdout
    assert advisories.asked == {PROOF[0]}


def test_it_says_in_one_line_that_no_service_answers(advisories: Advisories) -> None:
    advisories.close()
    done = audit(advisories.url)
    assert (done.returncode, done.stdout) == (0, "audit: no advisory service answers: nothing was audited\n")
