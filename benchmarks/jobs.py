"""The same job as a careful plain Celery task and as an idempotent one: insert a row, return a result."""

from __future__ import annotations

import os
import time
from functools import lru_cache
from typing import Any

from celery import Celery
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from idempotency import IdempotentTask
from idempotency.queues import quorum_queue

# What is compared has a queue each, so that a worker begins with one of them when it is told to.
QUEUES = ("idle", "plain", "unique", "each", "batch", "noop", "plain_outside", "outside", "celery_once", "powertools")
TABLE = text("CREATE TABLE jobs (id bigserial PRIMARY KEY, job text, number bigint)")
INSERT = text("INSERT INTO jobs (job, number) VALUES (:job, :number)")

app = Celery("benchmarks")
app.conf.update(
    broker_url=os.environ.get("BROKER_URL", ""),
    broker_transport_options={"confirm_publish": True},
    task_queues=[quorum_queue(name, exchange="bench") for name in QUEUES],
    task_default_queue="idle",
    task_default_exchange="bench",
    task_default_exchange_type="topic",
    task_create_missing_queues=False,
    task_routes={
        **{
            f"benchmarks.jobs.{queue}": {"queue": queue}
            for queue in ("plain", "each", "batch", "noop", "plain_outside", "outside")
        },
        "benchmarks.jobs.*": {"queue": "unique"},
        **{f"benchmarks.contenders.tasks.{queue}": {"queue": queue} for queue in ("celery_once", "powertools")},
    },
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_ignore_result=True,
    task_serializer="json",
    worker_prefetch_multiplier=4,
    worker_enable_prefetch_count_reduction=False,
    idempotency_database_url=os.environ.get("DATABASE_URL", ""),
    idempotency_redis_url=os.environ.get("REDIS_URL"),
)


@lru_cache(maxsize=1)
def engine(_pid: int) -> Engine:
    return create_engine(os.environ["DATABASE_URL"])


@app.task
def plain(number: int) -> dict[str, int]:
    """The job as Celery and SQLAlchemy users write it today: late acknowledgement, one transaction."""
    with Session(engine(os.getpid())) as session, session.begin():
        session.execute(INSERT, {"job": "plain", "number": number})
    return {"number": number}


@app.task(base=IdempotentTask, bind=True, key="{number}")
def unique(self: IdempotentTask, number: int) -> dict[str, int]:
    """The same job as an idempotent task."""
    self.session.execute(INSERT, {"job": "unique", "number": number})
    return {"number": number}


@app.task(base=IdempotentTask, bind=True, key="{number}", batch=20, batch_commit="each")
def each(self: IdempotentTask, number: int) -> dict[str, int]:
    """The same job: up to twenty claimed together, and each in its own transaction and commit."""
    self.session.execute(INSERT, {"job": "each", "number": number})
    return {"number": number}


@app.task(base=IdempotentTask, bind=True, key="{number}", batch=100)
def batch(self: IdempotentTask, number: int) -> dict[str, int]:
    """The same job, up to a hundred in one transaction."""
    self.session.execute(INSERT, {"job": "batch", "number": number})
    return {"number": number}


@app.task
def noop(number: int) -> dict[str, int]:
    """What a message costs that changes nothing, as a duplicate should not."""
    return {"number": number}


def charge(number: int, *, idempotency_key: str) -> dict[str, int]:
    """A call outside that takes no time: what is measured is what is done around it."""
    return {"charge": number}


@app.task
def plain_outside(number: int) -> dict[str, int]:
    """Insert the row, and then call outside, under a key made of the arguments."""
    with Session(engine(os.getpid())) as session, session.begin():
        session.execute(INSERT, {"job": "plain_outside", "number": number})
    return charge(number, idempotency_key=str(number))


@app.task(base=IdempotentTask, bind=True, key="{number}")
def outside(self: IdempotentTask, number: int) -> Any:
    """The same as an effect. The row is inserted after it, in the last commit: nothing stays open during a call."""
    charged = self.effect("charge", charge, number)
    self.session.execute(INSERT, {"job": "outside", "number": number})
    return charged


@app.task(base=IdempotentTask, bind=True, key="{number}")
def timed(self: IdempotentTask, number: int) -> None:
    """Record when the body began."""
    started = time.time()
    self.session.execute(
        text("INSERT INTO timed (number, started) VALUES (:number, :started)"), {"number": number, "started": started}
    )
