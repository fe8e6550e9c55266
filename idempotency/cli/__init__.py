"""The command line: `idempotency`, and `python -m idempotency.cli`. Tables for people, `--json` for programs."""

from ..extras import extra


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
        raise SystemExit(f"idempotency: {said}") from None
