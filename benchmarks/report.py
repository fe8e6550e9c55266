"""What a run has found, for people and for programs: a table, the last RESULT line, a JSON document, a chart."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kombu import Connection
from redis import Redis
from rich.console import Console
from rich.table import Table
from sqlalchemy import Engine, text

# In this order in the last RESULT line; those that were not measured are left out.
SUMMARY = (
    "unique_vs_plain",
    "unique_alone_vs_plain",
    "duplicates_vs_plain",
    "duplicates_alone_vs_plain",
    "storm_per_second",
    "outside_vs_plain",
    "enqueue_vs_apply_async",
    "unique_vs_dbos",
    "unique_vs_procrastinate",
    "unique_vs_powertools",
    "unique_vs_celery_once",
    "batch_vs_plain",
    "scale_claim_ratio",
    "backlog_ratio",
    "purge_p99_ratio",
    "held_ratio",
    "relay_vs_apply_async",
    "latency_vs_delay",
)
PACKAGES = (
    "celery-idempotency",
    "celery",
    "kombu",
    "amqp",
    "sqlalchemy",
    "psycopg",
    "redis",
    "hiredis",
    "celery-once",
    "aws-lambda-powertools",
    "procrastinate",
    "dbos",
    "confluent-kafka",
)


@dataclass
class Report:
    """Ratios by name, and by benchmark the figures of each contender by round."""

    ratios: dict[str, float] = field(default_factory=dict)
    figures: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    settings: dict[str, dict[str, object]] = field(default_factory=dict)
    about: dict[str, object] = field(default_factory=dict)

    def add(self, name: str, figures: dict[str, list[float]], **ratios: float) -> None:
        """Note what a benchmark has found."""
        self.figures[name] = figures
        self.ratios |= ratios

    def line(self) -> str:
        """The RESULT line of the run; empty if there is nothing that belongs in it."""
        names = [name for name in SUMMARY if name in self.ratios] + [
            name for name in self.ratios if name not in SUMMARY
        ]
        return " ".join(["RESULT", *(f"{name}={self.ratios[name]:.3f}" for name in names)]) if names else ""

    def document(self) -> str:
        """Everything, as JSON."""
        found = {"ratios": self.ratios, "figures": self.figures, "settings": self.settings, **self.about}
        return json.dumps(found)

    def table(self, console: Console) -> None:
        """Show the ratios."""
        table = Table("ours over", "ratio")
        for name, ratio in self.ratios.items():
            table.add_row(name.replace("_vs_", " / "), f"{ratio:.3f}")
        console.print(table)

    def plot(self, directory: Path) -> None:
        """Write `ratios.png` and `ratios.svg`: a bar for each comparison; 1 is as fast as the other."""
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot

        bars = {name.replace("_vs_", " / "): ratio for name, ratio in self.ratios.items() if "_vs_" in name}
        figure, axes = pyplot.subplots(figsize=(9, 1.5 + 0.45 * len(bars)), layout="constrained")
        drawn = axes.barh(
            list(bars), list(bars.values()), color=["#4878a8" if "latency" not in name else "#a0a0a0" for name in bars]
        )
        axes.bar_label(drawn, fmt="%.2f", padding=3)
        axes.axvline(1.0, color="black", linewidth=1)
        axes.set_xlim(0, 1.15 * max(1.0, *bars.values()))
        axes.invert_yaxis()
        axes.set_xlabel("ours / the other: rates, medians of all rounds (grey: times, where less is better)")
        directory.mkdir(parents=True, exist_ok=True)
        for ending in ("png", "svg"):
            figure.savefig(directory / f"ratios.{ending}", dpi=150)
        pyplot.close(figure)


def is_installed(name: str) -> bool:
    """Whether a package is installed: those of other benchmarks need not be."""
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def describe(database: Engine, environment: Mapping[str, str]) -> dict[str, object]:
    """The versions of packages and servers, and the machine."""
    with database.connect() as connection:
        postgres = connection.execute(text("SHOW server_version")).scalar_one()
    with Redis.from_url(environment["REDIS_URL"]) as client:
        info: Any = client.info("server")
    with Connection(environment["BROKER_URL"]) as broker:
        broker.connect()
        told = getattr(broker.connection, "server_properties", {})  # a Redis that is the broker has none
    return {
        "packages": {name: version(name) for name in PACKAGES if is_installed(name)},
        "servers": {
            "postgres": postgres,
            "redis": info["redis_version"],
            "broker": f"{told.get('product', 'Redis')} {told.get('version', info['redis_version'])}",
        },
        "machine": {
            "python": sys.version.split()[0],
            "platform": platform.platform(),
            "processors": os.cpu_count(),
            "load": os.getloadavg(),
        },
    }
