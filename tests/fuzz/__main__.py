"""`python -m tests.fuzz --minutes 10`: each parser for its share of the time. Exit status 1: one has failed, and its input is kept."""

from __future__ import annotations

import argparse
import sys
import time

from hypothesis import HealthCheck, Phase, given, settings
from rich.console import Console

from tests.fuzz import seeds
from tests.fuzz.parsers import PARSERS, Parser

# Of one round; then another one begins, with other draws.
EXAMPLES = 2000
QUIET = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    phases=(Phase.generate, Phase.target, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)


def main() -> int:
    """Fuzz, and print a line for each parser."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--parsers", default=",".join(PARSERS), help="some of them, separated by commas")
    options = parser.parse_args()
    names = options.parsers.split(",")
    if unknown := [name for name in names if name not in PARSERS]:
        parser.error(f"--parsers: no {unknown[0]!r}; there are {', '.join(PARSERS)}")
    console = Console(soft_wrap=True, highlight=False, markup=False)
    tried = failed = 0
    for name in names:
        examples, what = fuzz(PARSERS[name], options.minutes * 60 / len(names))
        tried, failed = tried + examples, failed + (what is not None)
        console.print(f"{name}: {examples} examples, {what or 'none failed'}")
    console.print(f"FUZZ parsers={len(names)} examples={tried} failures={failed} minutes={options.minutes:g}")
    return 1 if failed else 0


def fuzz(parser: Parser, seconds: float) -> tuple[int, str | None]:
    """Try inputs for so long: how many, and what was wrong with the smallest one that failed, which is kept."""
    examples, last = 0, None

    def holds(given: object) -> None:
        nonlocal examples, last
        examples, last = examples + 1, given
        parser.holds(given)

    trying = QUIET(given(parser.inputs)(holds))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            trying()
        except Exception as error:
            seeds.keep(parser.name, last)  # the last that was tried is the smallest
            return examples, f"failed with {last!r}: {type(error).__name__}: {error}"
    return examples, None


if __name__ == "__main__":
    sys.exit(main())
