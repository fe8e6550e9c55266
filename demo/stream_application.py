"""What the processes of the stream's demo run: one handler, and faults at the moments that the run has planned.

A plan is an empty file `<point>.kill` or `<point>.freeze` in the directory FAULTS. Whoever removes it acts on it.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from celery import Celery
from sqlalchemy import text

from idempotency.observe import crash_points
from idempotency.streams import Handling, kafka, rabbitmq_stream, stream

NAME = "readings"
BATCH = 200
# No uniqueness anywhere: what is handled twice is there twice.
TABLE = """
CREATE TABLE readings (id bigserial PRIMARY KEY, reading text, partition int, "offset" bigint)
"""
_INSERT = text('INSERT INTO readings (reading, partition, "offset") VALUES (:reading, :partition, :offset)')

app = Celery("readings")
app.conf.update(
    broker_url=os.environ.get("BROKER_URL", ""),
    broker_transport_options={"confirm_publish": True},
    idempotency_database_url=os.environ.get("DATABASE_URL", ""),
    idempotency_lease=3.0,
    idempotency_heartbeat=0.75,
    idempotency_sign_of_life=2.0,
    idempotency_kafka_servers=os.environ.get("KAFKA_SERVERS"),
    idempotency_kafka_options={"session.timeout.ms": "2000", "heartbeat.interval.ms": "100"},
)


def declare(topic: str, partitions: int, *, is_kafka: bool) -> None:
    """Declare the one stream of the demo."""

    @stream(
        NAME,
        key="{event[reading]}",
        source=kafka(topic) if is_kafka else rabbitmq_stream(topic, partitions=partitions),
        batch=BATCH,
    )
    def keep(given: Handling, event: Mapping[str, Any]) -> None:
        message = given.message
        row = {"reading": event["reading"], "partition": message.partition, "offset": message.offset}
        given.session.execute(_INSERT, row)


def _act(point: str) -> None:
    """Carry out what is planned for this moment."""
    directory = Path(os.environ["FAULTS"])
    for what, number in (("kill", signal.SIGKILL), ("freeze", signal.SIGSTOP)):
        try:
            (directory / f"{point}.{what}").rename(directory / f"{os.getpid()}.{point}.{what}")
        except FileNotFoundError:
            continue
        os.kill(os.getpid(), number)


if "FAULTS" in os.environ:
    declare(os.environ["TOPIC"], int(os.environ["PARTITIONS"]), is_kafka="KAFKA_SERVERS" in os.environ)
    crash_points.install(_act)
    faulthandler.register(signal.SIGUSR1)  # where each thread is, for a run that hangs
