"""Which commands an application has whose tasks keep their records in a store alone, and what the others say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from idempotency.cli.root import COMMANDS
from tests.support.documents import ROOT

APPLICATION = """
from celery import Celery
from idempotency import DeduplicatedTask

app = Celery("only_stores", broker="amqp://127.0.0.1:1//", set_as_current=False)
app.conf.update(idempotency_store="redis://127.0.0.1:1/0", broker_transport_options={"confirm_publish": True})

@app.task(name="charge", base=DeduplicatedTask, bind=True, key="{a}")
def charge(self, a): ...
"""
# One of each that needs Postgres, complete, so that it is not the command line that is refused.
NEED_POSTGRES = {
    "migrate": "", "relay": "", "recover": "", "purge": "", "status": "", "list": "", "show": "k", "release": "k --reason x",
    "cancel": "k --reason x", "erase": "k --reason x", "forget": "w --reason x", "rename-service": "a b --reason x", "web": "",
    "effects": "find k", "saga": "list", "dead-letters": "list", "webhooks": "list", "api-key": "list", "audit": "verify",
    "operators": "list", "stream": "status",
}  # fmt: skip


def run(directory: Path, arguments: str) -> subprocess.CompletedProcess[str]:
    (directory / "only_stores.py").write_text(APPLICATION)
    environment = {"PYTHONPATH": f"{directory}:{ROOT}", "CELERY_APP": "only_stores", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-m", "idempotency.cli", *arguments.split()]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def in_the_page() -> set[str]:
    section = (ROOT / "docs" / "stores.md").read_text().partition("\n## Commands\n")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| `idempotency ([\w-]+)", section, re.MULTILINE))


def test_each_command_is_in_the_page_or_needs_postgres() -> None:
    assert in_the_page() | {*NEED_POSTGRES} == {*COMMANDS}
    assert in_the_page() & {*NEED_POSTGRES} == set()


@pytest.mark.long
@pytest.mark.parametrize("name", ["status", "web", "…"])
def test_a_command_about_postgres_says_why_it_has_nothing_to_do(tmp_path: Path, name: str) -> None:
    for each in NEED_POSTGRES if name == "…" else [name]:
        answer = run(tmp_path, f"{each} {NEED_POSTGRES[each]}")
        assert answer.returncode == 1, each
        assert answer.stderr.startswith("idempotency: idempotency_database_url: not set"), (each, answer.stderr)
        assert "docs/stores.md" in answer.stderr, each
        assert "Traceback" not in answer.stderr, each


@pytest.mark.long
def test_the_doctor_looks_at_the_store_and_users_of_rabbitmq_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diagnosed = run(tmp_path, "doctor --json")
    assert ('"idempotency_store"' in diagnosed.stdout, "Traceback" in diagnosed.stderr) == (True, False)
    # what is missing is a password, and no database
    assert "IDEMPOTENCY_BROKER_" in run(tmp_path, "broker-users --rabbitmq -").stderr
