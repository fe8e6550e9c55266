"""Each asserts the bad outcome."""

from __future__ import annotations

import shlex

import pytest
from celery import Celery
from sqlalchemy import Connection

from drill.runbook import DIRECTORY, commands
from idempotency.wire.keys import OperationId
from tests.support import operations as op
from tests.support.commands import runner


def test_a_key_that_begins_with_a_dash_is_no_key_to_the_runbooks_commands(
    bank: Celery, connection: Connection, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    op.failed(connection, OperationId("default", "tests.support.bank.deposit", "-42"))
    run = runner(monkeypatch, capsys)
    line = next(each for each in commands((DIRECTORY / "effect_unknown.md").read_text()) if "show KEY" in each.command)
    words = shlex.split(line.filled({"KEY": "-42", "TASK": "tests.support.bank.deposit"}))
    answer = run(*words[1:])
    assert answer.status == 2
