"""Calls per second of what an application calls to have a job done later, one call after another, in turns.

apply_async    of plain Celery, with publisher confirms, as all that publishes here
delay          of our task: the same, with its key
enqueue        of our task, in a session and its commit: the message is published by a relay later
celery_once    `apply_async` of celery-once, which takes its lock first
procrastinate  `defer`, which is a commit
dbos           `enqueue` of a client, under a workflow id: a commit
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.progress import track
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from . import jobs
from .contenders import procrastinate_app, tasks
from .contenders.contest import Contest, Rates
from .contenders.dbos_side import Dbos

# What each call leaves behind is counted, which is how it is known that all of them did something, and deleted.
_LEFT = {
    "enqueue": text("DELETE FROM idempotency.outbox WHERE task = :task AND status = 'pending'"),
    "procrastinate": text("DELETE FROM procrastinate_jobs WHERE status = 'todo'"),
    "dbos": text("DELETE FROM dbos.workflow_status WHERE status = 'ENQUEUED'"),
}
_QUEUES = {"apply_async": "plain", "delay": "unique", "celery_once": "celery_once"}


def measure(contest: Contest, *, rounds: int, messages: int) -> Rates:
    """Calls per second, by way and round; nothing consumes them."""
    with contest.others() as (_, dbos):
        calls = _calls(contest.database, dbos)
        rates: Rates = {name: [] for name in calls}
        names = list(calls)
        turns = [(round_, name) for round_ in range(rounds + 1) for name in (names if round_ % 2 else names[::-1])]
        for round_, name in track(turns, description="enqueue: ours and others in turns"):
            numbers = contest.numbers(messages if round_ else max(messages // 4, 1))
            began = time.perf_counter()
            for number in numbers:
                calls[name](number)
            took = time.perf_counter() - began
            if (left := _remove(contest.database, name)) != len(numbers):
                raise RuntimeError(f"{name}: {left} jobs of {len(numbers)} calls were in the queue")
            if round_:
                rates[name].append(len(numbers) / took)
    return rates


def _calls(database: Engine, dbos: Dbos) -> dict[str, Callable[[int], object]]:
    sessions = database.execution_options(isolation_level="READ COMMITTED")

    def enqueue(number: int) -> None:
        with Session(sessions) as session, session.begin():
            jobs.unique.enqueue(session, number)

    return {
        "apply_async": lambda number: jobs.plain.apply_async((number,)),
        "delay": lambda number: jobs.unique.delay(number),
        "enqueue": enqueue,
        "celery_once": lambda number: tasks.celery_once.apply_async((number,)),
        "procrastinate": lambda number: procrastinate_app.insert.defer(number=number),
        "dbos": lambda number: dbos.client.enqueue({**dbos.options, "workflow_id": str(number)}, number),
    }


def _remove(database: Engine, name: str) -> int:
    if name in _QUEUES:
        with jobs.app.connection_for_write() as connection:
            return int(connection.default_channel.queue_purge(_QUEUES[name]))
    parameters = {"task": jobs.unique.name} if name == "enqueue" else {}
    with database.connect() as connection:
        return connection.execute(_LEFT[name], parameters).rowcount
