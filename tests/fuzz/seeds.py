"""Inputs that have failed once, and some that attackers try: every run begins with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "seeds" / "parsers.json"


def read() -> dict[str, list[Any]]:
    """The inputs of each parser."""
    found: dict[str, list[Any]] = json.loads(FILE.read_text())
    return found


def keep(parser: str, given: Any) -> None:
    """Add one, unless it is there."""
    known = read()
    if given not in known.setdefault(parser, []):
        known[parser].append(given)
        FILE.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
