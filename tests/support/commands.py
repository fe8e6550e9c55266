"""Commands run in the test's process, as the console script runs them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from idempotency import cli


@dataclass(frozen=True)
class Answer:
    status: int
    out: str
    error: str

    @property
    def document(self) -> Any:
        """The one JSON document on stdout."""
        return json.loads(self.out)


Run = Callable[..., Answer]


def runner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """What runs a command on the bank's application."""
    monkeypatch.setenv("CELERY_APP", "tests.support.bank")

    def run(*arguments: object) -> Answer:
        monkeypatch.setattr(sys, "argv", ["idempotency", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured, code = capsys.readouterr(), ended.value.code
        if isinstance(code, str):  # the interpreter prints it
            return Answer(1, captured.out, captured.err + code + "\n")
        return Answer(int(code or 0), captured.out, captured.err)

    return run
