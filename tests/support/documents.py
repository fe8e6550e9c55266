"""The examples of the documentation, for the tests that run them and those that see to it that all are run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BLOCK = r"^```{}\n(.*?)^```$"
_FENCE = re.compile(
    r"^(?:<!-- not run: (?P<why>[^\n]+?) -->\n+)?(?P<indent> *)```(?P<info>[^\n]*)\n(?P<text>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page. `not_run`: why no test runs it, from the comment in front of it; None if one has to."""

    language: str
    text: str
    not_run: str | None


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


def every_block(page: str) -> list[Block]:
    """All fenced blocks of a page, in order, whatever their language."""
    return blocks_in((ROOT / page).read_text())


def blocks_in(text: str) -> list[Block]:
    """All fenced blocks of a text."""
    return [Block(each["info"].strip(), each["text"], each["why"]) for each in _FENCE.finditer(text)]
