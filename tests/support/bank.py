"""A small Celery application whose tasks are killed, doubled and delayed: every deposit leaves a row, with no uniqueness."""

from __future__ import annotations

import os
import time
from typing import Any

from celery import Celery
from celery.exceptions import Ignore
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from idempotency import Defer, IdempotentTask, Operation, PermanentError
from idempotency.application import close_runtime, runtime_of
from idempotency.queues import quorum_queue
from idempotency.sagas import call as task_call
from idempotency.sagas import saga
from idempotency.store import schema
from idempotency.wire import keys
from tests.support import crashing

app = Celery("bank")
INSERT = text("INSERT INTO entries (account, amount) VALUES (:account, :amount)")
# no uniqueness anywhere: what happened twice is there twice
TABLES = """
CREATE TABLE entries (id bigserial PRIMARY KEY, account text, amount bigint);
CREATE TABLE failures (id bigserial PRIMARY KEY, account text, code text);
"""


def prepare(database_url: str) -> None:
    """Make the library's tables in an empty database, and two of the application's own."""
    engine = create_engine(database_url)
    schema.migrate(engine)
    with engine.begin() as connection:
        connection.execute(text(TABLES))
    engine.dispose()


def configure(environment: dict[str, str]) -> None:
    """Point the application at one test's servers. What another test has left open would stay at its own."""
    close_runtime(app)
    queue = environment["BANK_QUEUE"]
    app.conf.update(
        broker_url=environment["BROKER_URL"],
        broker_transport_options={"confirm_publish": True},
        broker_use_ssl=environment.get("BROKER_CA_FILE")
        and {"server_hostname": None, "ca_certs": environment["BROKER_CA_FILE"]},
        task_queues=[
            quorum_queue(
                queue, exchange=queue, dead_letter_queue=environment.get("DEAD_LETTER_QUEUE", f"{queue}-dead") or None
            )
        ],
        task_default_queue=queue,
        task_default_exchange=queue,
        task_default_exchange_type="topic",
        task_default_routing_key=queue,
        task_create_missing_queues=False,
        task_acks_on_failure=True,
        task_acks_on_timeout=False,
        task_serializer="json",
        accept_content=["json"],
        task_ignore_result=True,
        worker_prefetch_multiplier=1,
        worker_enable_remote_control=bool(environment.get("REMOTE_CONTROL", "1")),
        worker_enable_prefetch_count_reduction=False,
        worker_cancel_long_running_tasks_on_connection_loss=True,
        broker_connection_retry_on_startup=True,
        timezone="UTC",
        idempotency_database_url=environment["DATABASE_URL"],
        idempotency_redis_url=environment.get("REDIS_URL"),
        idempotency_lease=float(environment.get("LEASE", "60")),
        idempotency_heartbeat=float(environment.get("LEASE", "60")) / 4,
        idempotency_retry_base=float(environment.get("RETRY_BASE", "0.05")),
        idempotency_max_run=float(environment.get("MAX_RUN", "600")),
        idempotency_redis_pause=0.2,
        idempotency_compress_results_above=64 * 1024,
        idempotency_large_results_at=None,
        idempotency_large_result_limit=32 * 1024 * 1024,
        # what is rejected ends at once, unless a test is about a deploy
        idempotency_unknown_task_grace=float(environment.get("UNKNOWN_TASK_GRACE", "0")),
        idempotency_message_secrets=environment.get("MESSAGE_SECRETS", ""),
        idempotency_traces=environment.get("TRACES"),
        idempotency_sign_of_life=float(environment.get("SIGN_OF_LIFE", "10")),
        idempotency_sign_of_life_file=environment.get("SIGN_OF_LIFE_FILE"),
    )
    forget_queues(app)
    app.amqp.__dict__.pop("_producer_pool", None)
    app.amqp._producer_pool = None
    app._pool = None
    app.amqp.__dict__.pop("send_task_message", None)


def forget_queues(app: Celery) -> None:
    """Have an application read its queues and routes from its configuration again, which Celery does once."""
    app.amqp.flush_routes()
    for name in ("queues", "router"):
        app.amqp.__dict__.pop(name, None)


def record_failure(session: Session, operation: Operation, error: PermanentError) -> None:
    session.execute(
        text("INSERT INTO failures (account, code) VALUES (:account, :code)"),
        {"account": operation.key, "code": error.code},
    )


@app.task(base=IdempotentTask, bind=True, key="{account}", on_failed=record_failure)
def deposit(self: IdempotentTask, account: str, amount: int = 1) -> dict[str, Any]:
    """One row."""
    self.session.execute(INSERT, {"account": account, "amount": amount})
    return {"account": account, "amount": amount}


@app.task(base=IdempotentTask, bind=True, key="{account}", on_failed=record_failure)
def transfer(self: IdempotentTask, account: str, url: str) -> dict[str, Any]:
    """A step, a call outside, and a final row."""
    self.step("reserve", lambda session: session.execute(INSERT, {"account": f"{account}/step", "amount": 1}) and None)
    answer: dict[str, Any] = self.effect("call", call, url)
    self.session.execute(INSERT, {"account": account, "amount": answer["amount"]})
    return answer


def call(url: str, *, idempotency_key: str) -> dict[str, Any]:
    patience = float(os.environ.get("CALL_TIMEOUT", "10"))
    import httpx  # takes long, and few of the processes that import this module need it

    response = httpx.post(url, json={}, headers={"Idempotency-Key": idempotency_key}, timeout=patience)
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


@app.task(base=IdempotentTask, bind=True, key="{account}", on_failed=record_failure)
def slow_deposit(self: IdempotentTask, account: str, seconds: float) -> str:
    """Works for a while before it writes its row."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        crashing.reach("working")
        time.sleep(0.02)
    self.session.execute(INSERT, {"account": account, "amount": 1})
    return account


@app.task(base=IdempotentTask, bind=True, key="{account}", on_busy="wait")
def waited_deposit(self: IdempotentTask, account: str) -> str:
    """Its duplicates wait for the result."""
    crashing.reach("working")
    self.session.execute(INSERT, {"account": account, "amount": 1})
    return account


@app.task(base=IdempotentTask, bind=True, key="{account}", on_failed=record_failure, max_attempts=3)
def failing(self: IdempotentTask, account: str, how: str) -> None:
    """Writes a row and fails in the way it is told."""
    self.session.execute(INSERT, {"account": account, "amount": 1})
    match how:
        case "permanent":
            raise PermanentError("no such account", "no_account")
        case "defer":
            raise Defer(0.05, "not yet")
        case "defer long":
            raise Defer(3600, "not before an hour")
        case "retry":
            raise self.retry(countdown=0.01, exc=ValueError("again"))
        case "ignore":
            raise Ignore
        case "poison":
            os.kill(os.getpid(), 9)
        case _:
            raise ValueError(how)


@app.task(base=IdempotentTask, bind=True)
def returning(self: IdempotentTask, value: Any = None) -> Any:
    """Returns what it is given; its key is given per call."""
    self.session.execute(INSERT, {"account": "returning", "amount": 1})
    return value


@app.task(base=IdempotentTask, bind=True, key="{account}")
def replaced(self: IdempotentTask, account: str) -> None:
    """Writes its row, and leaves the rest to a deposit."""
    self.session.execute(INSERT, {"account": f"{account}/replaced", "amount": 1})
    self.replace(deposit.s(account))


@app.task(base=IdempotentTask, bind=True, key="{account}", on_failed=record_failure)
def lonely_deposit(self: IdempotentTask, account: str, seconds: float, busy: bool = False) -> str:
    """Writes its row, lets the others run (or, when busy, does not), and finds its own session and claim again."""
    session, attempt = self.session, self.request.attempt
    session.execute(INSERT, {"account": account, "amount": 1})
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not busy:
            time.sleep(min(0.02, seconds))
    mine = session.scalars(text("SELECT account FROM entries WHERE xmin = pg_current_xact_id()::xid")).all()
    if (self.session, self.request.attempt, attempt.claim.id.key, mine) != (session, attempt, account, [account]):
        raise PermanentError(f"another attempt was seen: {mine}", "not_alone")
    return account


@app.task(base=IdempotentTask, bind=True)
def withdraw(self: IdempotentTask, account: str, amount: int = 1) -> None:
    """Undoes a row by another one; its key is given per call."""
    self.session.execute(INSERT, {"account": f"{account}/undone", "amount": -amount})


@app.task(base=IdempotentTask, bind=True)
def give_back(self: IdempotentTask, url: str, result: dict[str, Any]) -> None:
    """Undoes a call outside, which it is told the answer of."""
    self.effect("give back", call, f"{url}/back")
    self.session.execute(INSERT, {"account": f"{url.rsplit('/')[-1]}/back", "amount": -result["amount"]})


@saga("bank.journey", key="{account}", entity="account", events={"bank.confirmed": "{account}"}, app=app)
def journey(saga: Any, account: str, url: str, fails: bool) -> list[Any]:
    """A step, a call outside, three tasks and an event; then it fails, if it is told to."""
    saga.step("open", enter, f"{account}/open", undo=withdraw)
    answer = saga.effect("charge", call, f"{url}/{account}", undo=give_back)
    saga.call(deposit, f"{account}/one", undo=withdraw)
    saga.gather(*(task_call(deposit, f"{account}/{name}", undo=withdraw) for name in ("two", "three")))
    event = saga.wait_for("bank.confirmed", match=account, timeout=600.0)
    if fails:
        raise PermanentError("it was told to", "told_to")
    return [answer["amount"], event["data"]["n"]]


def enter(session: Session, account: str) -> None:
    session.execute(INSERT, {"account": account, "amount": 1})


def enqueue_deposit(**options: Any) -> None:
    """Accept one deposit to account a1."""
    with Session(runtime_of(app).engine) as session:
        deposit.enqueue(session, "a1", **options)
        session.commit()


def fingerprint_of(account: str = "a1") -> str:
    """The fingerprint of a deposit to this account."""
    return keys.fingerprint({"account": account})


def failures(engine: Engine) -> list[tuple[str, str]]:
    """What `record_failure` was told: accounts and codes."""
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT account, code FROM failures ORDER BY id"))
        return [(row.account, row.code) for row in rows]


if "BANK_QUEUE" in os.environ:
    configure(dict(os.environ))
    crashing.install()
