"""What failed attempts leave behind in a pool process of any application with an idempotent task."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ATTEMPTS = 1500
# Celery keeps a copy of the code of every frame of a traceback; they are by far the largest part of what is left.
FAIL = """
import gc, sys
from billiard.einfo import _Code
from celery import Celery
from celery.app.trace import build_tracer
from celery.signals import task_postrun
from idempotency.installation import install
from celery.signals import worker_process_init

def fails():
    raise ValueError

app = Celery("failing", broker="memory://")
task = app.task(name="fails")(fails)
app.finalize()
install()
collect = sys.argv[1] == "True"
if collect:
    worker_process_init.send(sender=None)
# An attempt that takes its time grows old, and its traceback with it: past the collections of the young.
grow_old = lambda **_: gc.collect(1)
task_postrun.connect(grow_old)
tracer = build_tracer("fails", task, app=app)
most = 0
for number in range(int(sys.argv[2])):
    tracer("1", [], {}, {"id": "1", "task": "fails"})
    if number % 10 == 0:
        most = max(most, sum(type(each) is _Code for each in gc.get_objects()))
print(most)
"""


# without it, only to show that the other can tell
@pytest.mark.long
@pytest.mark.parametrize("collect", [True, False])
def test_failed_attempts_leave_no_pile_of_tracebacks(collect: bool) -> None:
    command = [sys.executable, "-c", FAIL, str(collect), str(ATTEMPTS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    most = int(done.stdout)
    # A few copies for each of some ten attempts; left to itself it is hundreds, or this test would show nothing.
    assert most < 100 if collect else most > 200, most


AGAIN = """
import gc, weakref
from celery.signals import worker_process_init
from idempotency.installation import install

class Backend: ...

install()
worker_process_init.send(sender=None)
backend = Backend()
backend.itself, left = backend, weakref.ref(backend)
worker_process_init.send(sender=None)
del backend
gc.collect()
print(left() is None)
"""


def test_a_process_that_starts_another_worker_frees_what_the_first_one_left() -> None:
    done = subprocess.run(
        [sys.executable, "-c", AGAIN], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "True\n"
