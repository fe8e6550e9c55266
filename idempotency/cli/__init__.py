"""The command line: `idempotency`, and `python -m idempotency.cli`. Tables for people, `--json` for programs."""

import atexit
import gc
import sys

from ..extras import extra
from ..text import one_line


def main(arguments: list[str] | None = None) -> None:
    """Run the command line, by default that of the process; an error is one line on stderr and exit status 1."""
    atexit.register(gc.freeze)  # else a short command spends half of its time on collecting what it has loaded
    for number, argument in enumerate(sys.argv[1:] if arguments is None else arguments, 1):
        try:
            argument.encode()
        except UnicodeEncodeError:  # as Python reads bytes that are not UTF-8
            raise SystemExit(f"idempotency: argument {number} is not UTF-8") from None
    try:
        with extra("cli"):
            from .root import cli
        cli(arguments)
    except Exception as error:
        from .refused import sentence

        if (said := sentence(error)) is None:
            raise
        raise SystemExit("\n".join(map(one_line, f"idempotency: {said}".split("\n")))) from None
