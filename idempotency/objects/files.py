"""Large results as files of a directory that all processes share. Only the user that runs them can read them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from ..wire.references import is_name
from . import PAGE

# Of a file that is being written. One whose process died is deleted like an object that nothing refers to.
PART = ".part"


class Files:
    """Objects as files: written beside their place, flushed, and renamed."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    @property
    def where(self) -> str:
        """What the addresses of all its objects begin with."""
        return f"{os.path.realpath(self._directory).rstrip('/')}/"

    def put(self, name: str, data: bytes) -> None:
        self._require_directory()
        path = self._directory / name
        path.parent.mkdir(mode=0o700, exist_ok=True)  # not the directory itself: what is not mounted is not there
        part = path.with_name(path.name + PART)
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.rename(path)
        except BaseException:
            part.unlink(missing_ok=True)  # a full disk stays no fuller
            raise
        for directory in (path.parent, self._directory):  # their entries outlive a crash, too
            opened = os.open(directory, os.O_RDONLY)
            try:
                os.fsync(opened)
            finally:
                os.close(opened)

    def get(self, name: str, at_most: int) -> bytes:
        self._require_directory()
        try:
            with (self._directory / name).open("rb") as file:
                return file.read(at_most)
        except FileNotFoundError:
            raise KeyError(name) from None

    def delete(self, names: Sequence[str]) -> None:
        errors = []
        for name in names:
            try:
                (self._directory / name).unlink(missing_ok=True)
            except OSError as error:
                errors.append(error)  # of one that another user has made, say; it holds up no other
        if errors:
            raise errors[0]

    def _require_directory(self) -> None:
        """One that is not mounted says nothing of what is in it, and takes nothing.

        A mount point itself is there without what is mounted, and empty; so it has to be a directory below.
        """
        if not self._directory.is_dir():
            raise FileNotFoundError(f"{self._directory}: is not there; make it, or mount it")
        if os.path.ismount(os.path.realpath(self._directory)):  # a link may lead to one
            raise NotADirectoryError(f"{self._directory}: is a mount point; name a directory in it")

    def _now(self) -> float:
        """What time it is by the clock that files here get their times from, which may be another machine's."""
        os.utime(self._directory)  # which takes no space where none is left
        return self._directory.stat().st_mtime

    def older(self, seconds: float) -> Iterator[list[str]]:
        self._require_directory()
        before = self._now() - seconds if seconds > 0 else math.inf  # which needs no right to write
        page, errors = list[str](), list[OSError]()
        for folder in sorted(self._directory.glob("[0-9a-f][0-9a-f]")):
            if not folder.is_dir():
                continue
            try:
                page += _older_in(folder, before)
            except OSError as error:
                errors.append(error)
            while len(page) >= PAGE:
                yield page[:PAGE]
                page = page[PAGE:]
        if page:
            yield page
        if errors:
            raise errors[0]


def _older_in(folder: Path, before: float) -> Iterator[str]:
    for entry in os.scandir(folder):
        name = f"{folder.name}/{entry.name}"
        if not is_name(name.removesuffix(PART)):
            continue  # somebody else's
        with suppress(FileNotFoundError):
            if entry.is_file(follow_symlinks=False) and entry.stat().st_mtime <= before:
                yield name
