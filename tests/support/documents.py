"""The Python examples of the documentation, for the tests that run them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = r"^```{}\n(.*?)^```$"


def pages() -> list[str]:
    """Every page of the documentation, by its path from the root."""
    found = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md"), *ROOT.glob("tests/*.md")]
    return sorted(str(path.relative_to(ROOT)) for path in [*found, *ROOT.glob("[A-Z]*.md")] if path.is_file())


def python_blocks(page: str) -> list[str]:
    """The Python examples of a page, in order."""
    return blocks(page, "python")


def blocks(page: str, language: str) -> list[str]:
    """The examples of a page in a language, in order."""
    return re.findall(_BLOCK.format(language), (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
