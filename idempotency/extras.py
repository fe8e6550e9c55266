"""How the package is installed: its version, and the extras that some of its parts need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

PACKAGE = "celery-idempotency"


def installed_version() -> str:
    """The version of this package; "unknown" in a checkout that was never installed."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return "unknown"


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Import what an extra brings: `with extra("cli"): import alembic`. Raises `MissingExtra` if it is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "idempotency":
            raise
        from .errors import MissingExtra  # needs SQLAlchemy, which `idempotency --help` does without

        missing = f"{error.name} is not installed; install the extra: pip install '{PACKAGE}[{name}]'"
        raise MissingExtra(missing) from None
