"""The command line: `idempotency`, and `python -m idempotency.cli`. Tables for people, `--json` for programs."""

from ..extras import extra
from ..text import one_line


def main(arguments: list[str] | None = None) -> None:
    """Run the command line, by default that of the process; an error is one line on stderr and exit status 1."""
    try:
        with extra("cli"):
            from .root import cli
        cli(arguments)
    except Exception as error:
        from .refused import sentence

        if (said := sentence(error)) is None:
            raise
        raise SystemExit("\n".join(map(one_line, f"idempotency: {said}".split("\n")))) from None
