"""A file in which a process says that it lives, for a probe on the same machine; `idempotency alive` reads it.

The database cannot answer that: while it is away, nobody has signed there, and a process that is restarted for that repairs
nothing.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from ..attempt.liveness import is_provably_dead, process_identity
from ..observe.logs import log


class SignFile:
    """The file of this process. Errors of the file system are logged, once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed = False

    def write(self) -> None:
        """Say that the process lives now."""
        # whole, or not at all: a probe may read at any time
        made = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            made.write_text(process_identity())
            made.replace(self._path)
            self._failed = False
        except OSError as error:
            if not self._failed:
                log.warning("sign_of_life_file_not_written", error=type(error).__name__)
            self._failed = True
            # an old one would say that this process hangs; a disk that is full lets it be removed
            with suppress(OSError):
                self._path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Say that the process ends in order: from then on no sign is expected."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("sign_of_life_file_not_removed", error=type(error).__name__)


def silence(path: Path) -> float | None:
    """How many seconds ago the process that lives here has last signed; None if no sign is expected of any.

    None is expected before the first one (a relay that waits for Postgres has not begun), after an orderly end, and of a process
    that is gone or was in another container. Raises `OSError` for a file that cannot be read.
    """
    try:
        holder, at = path.read_text(errors="replace"), path.stat().st_mtime
    except FileNotFoundError:
        return None
    # host, boot and pid namespace: of another container, nothing is known
    if holder.split("|")[:3] != process_identity().split("|")[:3] or is_provably_dead(holder):
        return None
    return max(time.time() - at, 0.0)
