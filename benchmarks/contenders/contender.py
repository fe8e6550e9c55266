"""What the benchmarks ask of a contender: take jobs while it is idle, begin when told, and be idle again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """How the work is spread: `concurrency` pool children or threads in each of so many processes."""

    processes: int
    concurrency: int
    # what else the contender needs to be told in this layout
    options: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        also = "".join(f", {name}={value:g}" for name, value in self.options)
        return f"{self.processes} x {self.concurrency}{also}"


class Contender(ABC):
    """One way to do the job. Nothing of it consumes, or uses the processor, before `begin` and after `end`."""

    # in the table of rows, in RESULT lines and in the JSON document
    name: str
    # those that are tried before the first round; the fastest is taken
    layouts: Sequence[Layout]
    layout: Layout

    @property
    def like(self) -> str:
        """The contender whose fastest layout it takes: its own, if its job inserts rows that can be counted."""
        return self.name

    @property
    @abstractmethod
    def settings(self) -> dict[str, object]:
        """What it is set to, beside the layout."""

    @abstractmethod
    def start(self, layout: Layout) -> None:
        """Start its workers, which stay idle."""

    @abstractmethod
    def send(self, numbers: Sequence[int]) -> None:
        """Put a job for each number into its queue."""

    @abstractmethod
    def begin(self) -> None:
        """Time zero: let the workers consume."""

    @abstractmethod
    def end(self) -> None:
        """Once all rows are there: wait until the jobs have ended as well, and make the workers idle."""

    @abstractmethod
    def stop(self) -> None:
        """End the workers."""

    def processor_seconds(self) -> float | None:
        """What its stopped processes have used until now, or None if they are not stopped between turns."""
        return None
