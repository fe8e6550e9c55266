"""What binding a task installs, and what the package gives without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import Processes, eventually


@pytest.mark.long
def test_a_worker_that_cannot_count_does_not_start(processes: Processes) -> None:
    worker = processes.start(PROMETHEUS_MULTIPROC_DIR="/proc/no/such/place")
    eventually(lambda: " ready." in worker.log or worker.process.poll() is not None)
    assert worker.process.poll() is not None, worker.log[-2000:]
    assert "/proc/no" in worker.log


COUNTERS = """
import os, sys
os.environ["PROMETHEUS_MULTIPROC_DIR"] = sys.argv[1]
from idempotency.observe import metrics
inside_the_way = os.path.join(sys.argv[1], f"counter_{os.getpid()}.db")
os.mkdir(inside_the_way)  # stands for a full disk, or too many open files, at the first delivery
for number in range(3):
    try:
        with metrics.phase("task", "claim"):
            print("counted")
    except Exception as error:
        print(type(error).__name__)
    if number == 0:
        os.rmdir(inside_the_way)  # over
"""


@pytest.mark.long
def test_counters_that_could_not_be_made_once_are_made_at_the_next_try(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", COUNTERS, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["IsADirectoryError", "counted", "counted"], done.stdout + done.stderr[-2000:]


@pytest.mark.long
def test_the_modules_for_applications_are_there_after_importing_the_package() -> None:
    script = "import idempotency\nfor n in ('queues', 'providers', 'errors'): print(n, hasattr(idempotency, n))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["queues", "True", "providers", "True", "errors", "True"]


EAGER = """
import sys, threading
import psycopg
from celery import Celery
url = sys.argv[1]
opened = threading.Event()

def other():  # a thread with its own driver connection, as Django's are, in the middle of a transaction
    global held
    held = psycopg.connect(url.replace("postgresql+psycopg", "postgresql"))
    held.execute("SELECT 1")
    opened.set()

thread = threading.Thread(target=other); thread.start(); opened.wait(); thread.join()

from idempotency import IdempotentTask
app = Celery("a", broker="memory://")
app.conf.update(idempotency_database_url=url)

@app.task(base=IdempotentTask, bind=True, key="{name}")
def hello(self, name):
    return name

for number in range(3):  # for as long as that connection lives
    try:
        print(hello.apply((f"n{number}",)).get())
    except Exception as error:
        print(type(error).__name__)
"""


@pytest.mark.long
def test_an_eager_call_passes_beside_a_connection_opened_without_sqlalchemy(database: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EAGER, database], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout.split() == ["n0", "n1", "n2"], done.stderr[-2000:]


HOOK = """
import sys
from celery import Celery, signals
from sqlalchemy import create_engine, text
from idempotency import IdempotentTask
url = sys.argv[1]
app = Celery("a", broker="memory://")
app.conf.update(idempotency_database_url=url)

class Base(IdempotentTask):
    abstract = True

    @classmethod
    def on_bound(cls, app):  # Celery's hook for applications: the default does nothing, so few call it
        app.conf.seen = True

@app.task(base=Base, bind=True, key="{name}")
def hello(self, name):
    return name

app.finalize()
ours = [receiver for signal in (signals.worker_init, signals.celeryd_init, signals.beat_init, signals.worker_shutting_down)
        for _, receiver in signal.receivers or ()]
print(len(ours))
with create_engine(url).connect() as connection:
    connection.execute(text("SELECT 1"))
    try:
        print(hello.apply(("a",)).get())
    except Exception as error:
        print(type(error).__name__)
"""


def test_a_base_class_with_its_own_on_bound_is_guarded_and_checked(database: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOOK, database], capture_output=True, text=True, check=False, timeout=60
    )
    receivers, answer = done.stdout.split()
    assert (int(receivers) >= 8, answer) == (True, "CallRefused"), done.stdout + done.stderr[-2000:]


UNSAFE = """
from celery import Celery
import os
from idempotency import IdempotentTask

app = Celery("unsafe", broker=os.environ["BROKER_URL"])
app.conf.update(
    idempotency_database_url=os.environ["DATABASE_URL"],
    task_default_queue=os.environ["BANK_QUEUE"],
    task_acks_late=False,
    accept_content=["json"],
)

class Plain(IdempotentTask):
    abstract = True

class Base(IdempotentTask):
    abstract = True

    @classmethod
    def on_bound(cls, app):
        pass

@app.task(base=Base if os.environ["HOOK"] == "1" else Plain, bind=True, key="{name}")
def hello(self, name):
    return name
"""


@pytest.mark.long
@pytest.mark.parametrize("hook", ["0", "1"], ids=["without the hook", "with the hook"])
def test_a_worker_with_such_a_base_class_refuses_an_unsafe_set_up(
    processes: Processes, tmp_path: Path, hook: str
) -> None:
    (tmp_path / "unsafe_app.py").write_text(UNSAFE)
    path = f"{tmp_path}:{processes.environment['PYTHONPATH']}"
    worker = processes.start("--pool", "solo", app="unsafe_app", PYTHONPATH=path, HOOK=hook)
    eventually(lambda: " ready." in worker.log or worker.process.poll() is not None)
    assert " ready." not in worker.log, worker.log[-2000:]
    assert "refused to start" in worker.log, worker.log[-2000:]
