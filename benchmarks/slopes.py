"""What is held over a long run: its slope after the warm-up, whether that is a rise, and a picture of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from math import sqrt
from pathlib import Path
from statistics import linear_regression, mean

from rich.console import Console
from rich.table import Table

# The share of the run that is not looked at: caches fill, and the first purge is yet to come.
WARM = 1 / 3
# What counts as a rise, and how many samples after the warm-up it takes to say that there is none.
ERRORS, SHARE, COUNTED = 3.0, 0.05, 20
# Of two residuals that follow each other, as far as it counts: then twenty samples are worth one.
MOST_CORRELATED = 0.9


@dataclass
class Series:
    """One quantity, over operations in millions."""

    unit: str
    # what it may have more than before without being called rising: a pool keeps a connection that it has needed once
    spare: float = 0.0
    done: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, done: int, value: float) -> None:
        self.done.append(done / 1e6)
        self.values.append(value)

    def slope(self) -> tuple[float, float]:
        """By least squares, after the warm-up, and its standard error: units per million operations.

        What rises and falls over many samples, as dead rows do between two vacuums, says less than as many samples that
        know nothing of each other: the error grows with the correlation of each residual with the next one.
        """
        done, values = self.counted()
        if len(done) < 4:
            return 0.0, float("inf")
        slope, intercept = linear_regression(done, values)
        residuals = [y - slope * x - intercept for x, y in zip(done, values, strict=True)]
        squares = sum(each**2 for each in residuals)
        spread = sum((x - mean(done)) ** 2 for x in done)
        following = sum(former * later for former, later in pairwise(residuals)) / squares if squares else 0.0
        correlation = min(max(following, 0.0), MOST_CORRELATED)
        return slope, sqrt(squares / (len(done) - 2) / spread * (1 + correlation) / (1 - correlation))

    def rises(self) -> bool:
        done, values = self.counted()
        slope, error = self.slope()
        rise = slope * (done[-1] - done[0])
        return slope > ERRORS * error and rise > max(SHARE * max(mean(values), 1.0), self.spare)

    def counted(self) -> tuple[list[float], list[float]]:
        """Operations in millions, and values, after the warm-up."""
        first = int(len(self.done) * WARM)
        return self.done[first:], self.values[first:]


@dataclass(frozen=True)
class Rising:
    """Those that rise, and of all of them name, slope and standard error."""

    names: list[str]
    slopes: list[tuple[str, float, float]]


def shown(series: dict[str, Series], console: Console) -> Rising:
    """A table of the slopes, on the console, and what rises."""
    table = Table("", "first counted", "last", "slope per million", "standard error", "")
    slopes, names = [], []
    for name, each in series.items():
        slope, error = each.slope()
        slopes.append((name, slope, error))
        if each.rises():
            names.append(name)
        first = each.values[int(len(each.values) * WARM)]
        cells = f"{slope:+.4g} {each.unit}", f"{error:.2g}", "rises" if name in names else "flat"
        table.add_row(name, f"{first:.1f}", f"{each.values[-1]:.1f}", *cells)
    console.print(table)
    return Rising(names, slopes)


def drawn(series: dict[str, Series], directory: Path) -> None:
    """Write `soak.png` and `soak.svg`, with the line of each slope, and `soak.json` with the samples."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots((len(series) + 1) // 2, 2, figsize=(10, 1.7 * len(series) / 2), layout="constrained")
    for place, (name, each) in zip(axes.flat, series.items(), strict=False):
        place.plot(each.done, each.values, color="#4878a8", linewidth=1)
        counted, values = each.counted()
        slope, _ = each.slope()
        middle = mean(values) - slope * mean(counted)
        ends = [counted[0], counted[-1]]
        place.plot(ends, [slope * end + middle for end in ends], color="black", linewidth=1)
        place.set_ylim(0, 1.1 * max(1.0, *each.values))
        place.set_title(name.replace("_mb", ""), fontsize=9)
        place.set_ylabel(each.unit, fontsize=8)
        place.tick_params(labelsize=8)
    for place in axes.flat[len(series) :]:
        place.remove()
    figure.supxlabel("million operations; the line: the slope after the warm-up", fontsize=9)
    directory.mkdir(parents=True, exist_ok=True)
    for ending in ("png", "svg"):
        figure.savefig(directory / f"soak.{ending}", dpi=150)
    pyplot.close(figure)
    samples = {name: [each.done, each.values] for name, each in series.items()}
    (directory / "soak.json").write_text(json.dumps(samples))
