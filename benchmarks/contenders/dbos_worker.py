"""A process that runs workflows from a DBOS queue: `python -m benchmarks.contenders.dbos_worker THREADS AT_ONCE POLL`.

As in `saga_dbos`: the row and what is recorded of the step are one commit of a datasource, under READ COMMITTED.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from dbos import DBOS, SQLAlchemyDatasource

from idempotency.cli.terminal import stopped_by_signals

from ..jobs import INSERT

NAME, VERSION, QUEUE, WORKFLOW = "contenders", "1", "jobs", "insert_job"


def main(threads: int, at_once: int, poll: float) -> None:
    """Run until SIGTERM. `at_once`: workflows that it takes from the queue at a time, or 0 for all that there are."""
    address = os.environ["DATABASE_URL"]
    process = os.environ["PGAPPNAME"]
    config: Any = {"name": NAME, "application_version": VERSION, "executor_id": process, "log_level": "ERROR"}
    # by which the benchmark sees whether it has a transaction open; DBOS has a name of its own for all processes
    config["db_engine_kwargs"] = {"connect_args": {"application_name": process}}
    DBOS(config={**config, "system_database_url": address, "max_executor_threads": threads})
    rows = SQLAlchemyDatasource.create(address, engine_kwargs={"pool_size": threads})

    @rows.transaction(isolation_level="READ COMMITTED")
    def insert(number: int) -> None:
        rows.sql_session().execute(INSERT, {"job": "dbos", "number": number})

    @DBOS.workflow(name=WORKFLOW)
    def insert_job(number: int) -> dict[str, int]:
        insert(number)
        return {"number": number}

    stopped = stopped_by_signals()
    DBOS.listen_queues([QUEUE])
    DBOS.launch()
    DBOS.register_queue(
        QUEUE, worker_concurrency=at_once or None, polling_interval_sec=poll, on_conflict="always_update"
    )
    print("ready", flush=True)
    stopped.wait()
    DBOS.destroy()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
