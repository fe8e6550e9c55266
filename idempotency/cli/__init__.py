"""The command line: `idempotency`, and `python -m idempotency.cli`."""

from .main import main

__all__ = ["main"]
