"""What an operation costs each component, and what that means for very many: `make capacity`. Rewrites docs/capacity.md.

    make capacity WAITING=10000000

Measures with real processes and servers, writes docs/capacity.json, and the page's tables from that.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from sqlalchemy import create_engine

import services
from idempotency.store import schema

from . import capacity_page as page
from .capacity_waiting import SIZES, NoRoom, check_room
from .report import describe

console = Console()


def main(
    operations: Annotated[int, typer.Option(min=200, max=1_000_000, help="Of each kind.")] = 10_000,
    concurrency: Annotated[int, typer.Option(min=1, max=64, help="Pool processes of the worker.")] = 2,
    waiting: Annotated[
        int, typer.Option(min=SIZES[0], max=SIZES[-1], help="The most that wait in the simulation.")
    ] = 1_000_000,
    keep_costs: Annotated[
        bool,
        typer.Option("--keep-costs", help="Measure only what waits; the costs stay as docs/capacity.json has them."),
    ] = False,
    only_page: Annotated[
        bool, typer.Option("--only-page", help="Measure nothing: write the tables from docs/capacity.json.")
    ] = False,
    write: Annotated[bool, typer.Option(help="Write docs/capacity.json and the page's tables.")] = True,
    busy: Annotated[bool, typer.Option("--busy", help="Write them although this machine has other work.")] = False,
) -> None:
    """Measure, compute, and write the page."""
    if only_page:
        page.PAGE.write_text(page.rendered(page.PAGE.read_text(), json.loads(page.MEASURED.read_text())))
        return
    directory = Path(tempfile.gettempdir())
    try:
        check_room(directory, waiting)
    except NoRoom as error:
        raise SystemExit(f"capacity: {error}") from None
    if write and not busy and (busy_with := os.getloadavg()[0]) > (cores := os.cpu_count() or 1):
        raise SystemExit(
            f"capacity: this machine has other work (a load average of {busy_with:.1f}, {cores} cores), so the page would be wrong; "
            "come back when it is quiet, or take --no-write, or --busy"
        )
    began, at = time.monotonic(), datetime.now(UTC)
    for name in ("DATABASE_URL", "REDIS_URL", "BROKER_URL"):
        os.environ.pop(name, None)  # whose processes are measured, and whose disk is filled, has to be known
    with tempfile.TemporaryDirectory() as place:
        load = os.getloadavg()
        # in a directory that is removed even if this process is killed
        with services.running() as running:
            os.environ.update(running.environment())
            from . import capacity_costs, capacity_waiting, jobs

            engine = create_engine(running.database_url, isolation_level="AUTOCOMMIT")
            schema.migrate(engine)
            with engine.connect() as connection:
                connection.execute(jobs.TABLE)
            jobs.app.finalize()
            about = describe(engine, os.environ)
            if keep_costs:
                kept = json.loads(page.MEASURED.read_text())
            else:
                costs = capacity_costs.measure(
                    running, engine, Path(place), operations=operations, concurrency=concurrency
                )
                kept = {
                    "at": f"{at:%Y-%m-%d %H:%M} UTC",
                    **about,
                    "machine": {**about["machine"], "load": load},  # type: ignore[dict-item]
                    "operations": operations,
                    "costs": {kind: asdict(cost) for kind, cost in costs.items()},
                    "assumed": page.ASSUMED,
                }
            found, left_out = capacity_waiting.measure(engine, directory, jobs.app, most=waiting)
            engine.dispose()
    measured = {
        **kept,
        "waited_at": f"{at:%Y-%m-%d %H:%M} UTC, with load averages of {', '.join(f'{each:.1f}' for each in load)}",
        "waiting": [asdict(each) for each in found],
        "left_out": left_out,
    }
    measured = json.loads(json.dumps(measured))
    if write:
        page.MEASURED.write_text(json.dumps(measured, indent=1) + "\n")
        page.PAGE.write_text(page.rendered(page.PAGE.read_text(), measured))
    for block in page.BLOCKS.values():
        console.print(block(measured), markup=False, highlight=False)
    plain = measured["costs"]["plain"]
    print(
        f"RESULT operations={measured['operations']} waiting={found[-1].waiting} seconds={time.monotonic() - began:.0f} "
        f"cpu_ms={1e3 * sum(plain['cpu'].values()):.2f} wal={plain['wal']:.0f} "
        f"cells_at_100k={page.needed(measured, 'plain', 100_000)['cells']:.0f}",
        flush=True,
    )
    if left_out:
        raise SystemExit(f"capacity: {left_out}")


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    app()
