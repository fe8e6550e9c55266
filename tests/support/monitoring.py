"""A real Prometheus with the rules of monitoring/, in which minutes are seconds, and something that counts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pytest
import yaml  # type: ignore[import-untyped]

from services import packages
from services.prometheus import Prometheus
from tests.support.documents import ROOT

DIRECTORY = ROOT / "monitoring"
RULES = DIRECTORY / "rules.yml"
BOARD = DIRECTORY / "board.json"

needs_prometheus = pytest.mark.skipif(
    packages.prometheus_program() is None, reason="Prometheus is not installed on this machine (Debian: prometheus)"
)


def alerts() -> dict[str, dict[str, Any]]:
    """The rules by the name of their alert."""
    document = yaml.safe_load(RULES.read_text())
    return {rule["alert"]: rule for group in document["groups"] for rule in group["rules"]}


def shortened(rules: str, *, window: str = "6s") -> str:
    """The rules without patience, and with short windows. What they compare is left as it is."""
    assert (found := re.findall(r"^ +for: \w+$", rules, re.MULTILINE)), found
    rules = re.sub(r"^( +for: )\w+$", r"\g<1>0s", rules, flags=re.MULTILINE)
    return re.sub(r"\[\d+m\]", f"[{window}]", rules)


@contextmanager
def prometheus(directory: Path, target: str, **options: Any) -> Iterator[Prometheus]:
    """A Prometheus that scrapes this endpoint, and evaluates the rules, every half second."""
    host = target.removeprefix("http://").partition("/")[0]
    server = Prometheus(directory, rules=shortened(RULES.read_text()), target=host, **options)
    server.start()
    try:
        yield server
    finally:
        server.discard()


# Reads lines "counter amount label…", and counts.
_COUNT = """
import sys
from idempotency.observe import metrics
metrics.prepare()
for line in sys.stdin:
    name, amount, *labels = line.split()
    counter = getattr(metrics, name)
    (counter.labels(*labels) if labels else counter).inc(float(amount))
    print("counted", flush=True)
"""


class Counting:
    """A process that counts as a worker does, in the directory that the endpoint reads."""

    def __init__(self, environment: Mapping[str, str], directory: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _COUNT],
            env=os.environ | dict(environment) | {"PROMETHEUS_MULTIPROC_DIR": str(directory)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        assert self._process.wait(20) == 0
        self._process.stdout.close()

    def count(self, name: str, amount: float, *labels: str) -> None:
        """Add to a counter of `observe.metrics`; 0 makes it, so that what is added later is an increase."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(" ".join([name, str(amount), *labels]) + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "counted\n"
