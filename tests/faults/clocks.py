"""Another wall clock for a process of a test: a small library that is compiled here and preloaded there."""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("clock_shim.c")


def can_be_built() -> bool:
    """Whether this machine has a C compiler."""
    return shutil.which("cc") is not None


class Clock:
    """A wall clock for every process that is started with `environment`; `shift` moves it under those that run."""

    def __init__(self, directory: Path, *, seconds: float = 0.0) -> None:
        library = directory / "clock_shim.so"
        subprocess.run(["cc", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, SOURCE], check=True)
        self._offset = directory / "clock_offset"
        self._offset.write_bytes(struct.pack("=q", 0))
        self.environment = {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(self._offset)}
        self.shift(seconds)

    def shift(self, seconds: float) -> None:
        """Let the clock be so many seconds ahead of the true time; negative: behind."""
        with self._offset.open("r+b") as file, mmap.mmap(file.fileno(), 8) as place:
            place[:] = struct.pack("=q", int(seconds * 1_000_000_000))
