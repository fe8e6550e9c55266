"""The command line: `idempotency`, and `python -m idempotency.cli`. Tables for people, `--json` for programs."""

from ..extras import extra


def main() -> None:
    """Run the command line; an error is one line on stderr and exit status 1."""
    try:
        with extra("cli"):
            from .root import cli
        cli()
    except Exception as error:
        from .refused import sentence

        if (said := sentence(error)) is None:
            raise
        raise SystemExit(f"idempotency: {said}") from None
