"""The page about the sandbox: its example and its lines, run as they are printed."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from sandbox import process
from sandbox.faults import CARRIER_FAULTS, MAIL_FAULTS, PROVIDER_FAULTS
from sandbox.process import Sandbox
from tests.support.documents import ROOT, blocks

PRINTED = "http://127.0.0.1:8420"


@pytest.mark.long
def test_the_examples_of_the_page_run_as_they_are(tmp_path: Path) -> None:
    with process.running("provider", tmp_path) as sandbox:
        _run_examples(sandbox)


def _run_examples(sandbox: Sandbox) -> None:
    (example,) = blocks("docs/sandbox.md", "python")
    names: dict[str, Any] = {}
    exec(example.replace(PRINTED, sandbox.url), names)
    assert (names["charge"].status, names["refund"].status) == ("succeeded", "succeeded")
    (lines,) = blocks("docs/sandbox.md", "sh")
    lines = lines.replace(PRINTED, sandbox.url).replace("pi_…", names["charge"].id)
    answers = subprocess.run(
        ["sh", "-ec", lines.replace("curl -s", "curl -sS --fail-with-body")], capture_output=True, text=True, timeout=60
    )
    assert (answers.returncode, answers.stderr) == (0, "")
    assert '{"queued":["timeout_after"]}' in answers.stdout


def test_the_page_names_every_fault() -> None:
    page = (ROOT / "docs/sandbox.md").read_text()
    missing = [name for name in (*PROVIDER_FAULTS, *MAIL_FAULTS, *CARRIER_FAULTS) if f"`{name}`" not in page]
    assert missing == []
