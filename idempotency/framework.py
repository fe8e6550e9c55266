"""What a web framework's integration takes over from the library: one per process, none by default.

Django keeps a database connection for each thread, and its users expect the library to work on that one. The library
asks here, and `idempotency.contrib.django` answers once it is among the installed applications.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from celery import Celery
    from sqlalchemy.orm import Session


class Framework:
    """No framework: the database is named in Celery's configuration, and connections are SQLAlchemy's."""

    def database_url(self) -> str | None:
        """The address of the library's database, where the configuration gives none."""
        return None

    def runtime(self, app: Celery) -> Any:
        """In a test whose transaction the framework rolls back, a runtime on the test's connection; otherwise None."""
        return None

    def joined(self, open_session: Callable[[], Session], *, ends: bool) -> AbstractContextManager[object]:
        """While entered, the framework's own connection is that of the session, which is opened on first use.

        `ends`: the session's commit is final, so what waits for a commit can follow when this is left.
        """
        return nullcontext()

    def check_no_transaction(self) -> None:
        """Raise `CallRefused` if the framework has a transaction open in this thread on the library's database."""


_used = Framework()


def framework() -> Framework:
    """The framework of this process."""
    return _used


def use_framework(used: Framework) -> None:
    """From now on, ask this one."""
    global _used
    _used = used
