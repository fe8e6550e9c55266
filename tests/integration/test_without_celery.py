"""Claim, run, commit in a process that has never imported Celery: what HTTP and streams are built on."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from sqlalchemy import Engine, text

from tests.support.documents import python_blocks

SCRIPT = """
import json, sys
from sqlalchemy import text
from idempotency.attempt.policy import Policy
from idempotency.attempt.claim import claim
from idempotency.attempt.effects import DidNotHappen
from idempotency.attempt.endings import Ended, Finished, Release
from idempotency.attempt.run import run
from idempotency.attempt.runtime import Runtime
from idempotency.errors import PermanentError
from idempotency.settings import Settings
from idempotency.store.answers import Claimed, Completed, Failed, Mismatch
from idempotency.wire.delivery import Delivery
from idempotency.wire.keys import OperationId, fingerprint

runtime = Runtime(Settings.read({"database_url": sys.argv[1], "redis_url": sys.argv[2], "retry_base": 0}))
said, calls = {}, []

def failed(session, task, error):
    session.execute(text("INSERT INTO failures (account, code) VALUES (:a, :c)"), {"a": task.key, "c": error.code})

policy = Policy(max_attempts=3, retention_completed=3600, retention_failed=3600, provider_key_retention=3600, on_failed=failed)

def request(key, **arguments):
    return Delivery(OperationId("default", "http.pay", key), fingerprint(arguments), arguments)

def deposit(account):
    def body(attempt):
        attempt.session.execute(text("INSERT INTO entries (account, amount) VALUES (:a, 1)"), {"a": account})
        return {"account": account}
    return body

def reserve(session, account):
    session.execute(text("INSERT INTO entries (account, amount) VALUES (:a, -1)"), {"a": account})
    return 1

def charge(account, *, idempotency_key):
    calls.append(idempotency_key)
    return {"charge": account}

def pay(attempt):
    attempt.step("reserve", reserve, "b")
    charged = attempt.effect("charge", charge, "b")
    if len(calls) == 1 and "again" not in said:
        said["again"] = True
        raise ValueError("after the charge")
    attempt.session.execute(text("INSERT INTO entries (account, amount) VALUES ('b', 2)"))
    return charged

def refuse(attempt):
    raise PermanentError("declined", "card_declined")

first = run(runtime, request("a", amount=1), policy, deposit("a"))
again = run(runtime, request("a", amount=1), policy, deposit("a"))
other = run(runtime, request("a", amount=2), policy, deposit("a"))
said["first"] = isinstance(first, Finished) and first.result
said["again_is"] = isinstance(again, Completed) and again.value()
said["other"] = isinstance(other, Mismatch)

released = run(runtime, request("b"), policy, pay)
assert isinstance(released, Release), released
paid = run(runtime, request("b"), policy, pay)
said["paid"] = isinstance(paid, Finished) and paid.result
said["calls"] = len(calls)

held = claim(runtime, request("c"), "a holder that is gone")
with runtime.engine.begin() as connection:
    connection.execute(text("UPDATE idempotency.records SET locked_until = now() - interval '1 s' WHERE key = 'c'"))
taken = run(runtime, request("c"), policy, deposit("c"))
said["taken_over"] = isinstance(held, Claimed) and isinstance(taken, Finished) and taken.decided_under.taken_over

declined = run(runtime, request("d"), policy, refuse)
repeated = run(runtime, request("d"), policy, refuse)
said["declined"] = isinstance(declined, Ended) and str(declined.error)
said["repeated"] = isinstance(repeated, Failed) and repeated.code

runtime.close()
said["celery"] = sorted({name.partition(".")[0] for name in sys.modules} & {"celery", "kombu"})
print(json.dumps(said))
"""


@pytest.mark.usefixtures("bank")
def test_an_operation_runs_where_celery_was_never_imported(engine: Engine, database: str, redis_url: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, database, redis_url], capture_output=True, check=False, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout)
    assert said == {
        "again": True,
        "first": {"account": "a"},
        "again_is": {"account": "a"},
        "other": True,
        "paid": {"charge": "b"},
        "calls": 1,
        "taken_over": True,
        "declined": "declined",
        "repeated": "card_declined",
        "celery": [],
    }
    with engine.connect() as connection:
        entries = connection.execute(
            text("SELECT account, sum(amount), count(*) FROM entries GROUP BY 1 ORDER BY 1")
        ).all()
        assert [tuple(row) for row in entries] == [("a", 1, 1), ("b", 1, 2), ("c", 1, 1)]
        assert connection.execute(text("SELECT account, code FROM failures")).all() == [("d", "card_declined")]
        letters = connection.execute(text("SELECT key, reason FROM idempotency.dead_letters")).all()
        assert [tuple(row) for row in letters] == [("d", "card_declined")]
        # nothing redelivers an operation that came without a message
        assert connection.execute(text("SELECT count(*) FROM idempotency.outbox")).scalar_one() == 0


@pytest.mark.long
@pytest.mark.usefixtures("bank")
def test_the_example_of_the_documentation_runs_as_it_is(engine: Engine, database: str) -> None:
    (example,) = python_blocks("docs/without-celery.md")
    celery = "import sys\nassert not {'celery', 'kombu'} & {name.partition('.')[0] for name in sys.modules}\n"
    done = subprocess.run(
        [sys.executable, "-c", example + celery],
        env=os.environ | {"DATABASE_URL": database},
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with engine.connect() as connection:
        assert connection.execute(text("SELECT account, amount FROM entries")).all() == [("alice", 5)]
        record = connection.execute(text("SELECT task, key, status, attempts FROM idempotency.records")).one()
        assert tuple(record) == ("http.deposit", "request-1", "completed", 1)
