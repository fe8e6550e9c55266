"""The application under chaos: every outcome that an operation can have, and nothing unique in its tables.

An operation is known by `number`, which two tenants share; `account` differs between them and names what the effect is
found by. Operations are accepted by a row in `submitted`, written in the transaction of the message.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from typing import Any

import httpx
from celery import Celery
from sqlalchemy import Connection, text
from sqlalchemy.orm import Session

from idempotency import Defer, IdempotentTask, Operation, PermanentError, publish, subscribe
from idempotency.attempt.effects import DidNotHappen, EffectInDoubt, Happened, StillUnknown
from idempotency.errors import StoredFailure, StoredRefusal
from idempotency.queues import quorum_queue
from idempotency.relay.resend import resend_lost
from idempotency.upkeep import maintenance
from tests.chaos import ledgers, provider
from tests.support import crashing

app = Celery("chaos")

TABLES = """
CREATE TABLE submitted (
    id bigserial PRIMARY KEY, tenant text, task text, key text, account text, amount bigint
);
CREATE TABLE entries (id bigserial PRIMARY KEY, account text, amount bigint);
CREATE TABLE reversals (id bigserial PRIMARY KEY, account text, amount bigint);
CREATE TABLE failures (id bigserial PRIMARY KEY, account text, code text);
-- what is to be called eagerly, too
CREATE TABLE calls (id bigserial PRIMARY KEY, task text, tenant text, arguments jsonb);
"""
# Short, so that a dead holder is replaced many times within a minute.
LEASE = 2.5
# Ended by these faults an operation has used up attempts that it is not to blame for: the tasks that are to complete
# get more of them than a run has faults.
MANY_ATTEMPTS = 100
FEW_ATTEMPTS = 3
# The operations of an event's two consumers.
LEDGER, MAILER = "ledger.post", "mailer.note"
ORDERING_KEYS = 5
# The tables that the ledgers watch besides the library's own.
BUSINESS = ("entries", "reversals", "failures")
# The tenant of a plain call, which names none.
TENANT = "red"
# Long enough for a duplicate to find the operation running.
WORK = 0.2
# How long a deferral pauses.
LATER = 0.3
INSERT = text("INSERT INTO entries (account, amount) VALUES (:account, :amount)")
_REVERSE = text("INSERT INTO reversals (account, amount) VALUES (:account, :amount)")
_RESERVED = text("""
SELECT (SELECT coalesce(sum(amount), 0) FROM entries WHERE account = :account)
     - (SELECT coalesce(sum(amount), 0) FROM reversals WHERE account = :account)
""")
_ACCEPT = text(
    "INSERT INTO submitted (tenant, task, key, account, amount) VALUES (:tenant, :task, :key, :account, :amount)"
)


def configure(environment: Mapping[str, str]) -> None:
    """Point the application at one run's servers."""
    queue = environment["CHAOS_QUEUE"]
    dead = f"{queue}-dead"
    app.conf.update(
        broker_url=environment["BROKER_URL"],
        broker_transport_options={"confirm_publish": True},
        broker_heartbeat=10,
        broker_connection_timeout=5,
        broker_connection_retry_on_startup=True,
        broker_channel_error_retry=True,
        task_queues=[
            quorum_queue(name, exchange=queue, dead_letter_queue=dead) for name in (queue, upkeep_queue(queue))
        ],
        task_default_queue=queue,
        task_default_exchange=queue,
        task_default_exchange_type="topic",
        task_default_routing_key=queue,
        task_routes={"upkeep.*": {"queue": upkeep_queue(queue)}},
        task_create_missing_queues=False,
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        task_acks_on_failure=True,
        task_acks_on_timeout=False,
        task_serializer="json",
        accept_content=["json"],
        task_ignore_result=True,
        worker_prefetch_multiplier=1,
        worker_enable_prefetch_count_reduction=False,
        worker_cancel_long_running_tasks_on_connection_loss=True,
        timezone="UTC",
        # A tick that is late is not worth running: the next one does its work.
        beat_schedule={
            name: {"task": f"upkeep.{name}", "schedule": 1.0, "options": {"expires": 5.0}}
            for name in ("recover", "resend", "purge")
        },
        # a beat that slept through a fault looks at its schedule again within this time
        beat_max_loop_interval=1,
        idempotency_database_url=environment["DATABASE_URL"],
        idempotency_redis_url=environment["REDIS_URL"],
        idempotency_tenant=TENANT,
        idempotency_message_secrets=environment["IDEMPOTENCY_MESSAGE_SECRETS"],
        idempotency_lease=LEASE,
        idempotency_heartbeat=LEASE / 4,
        idempotency_sweep=1.0,
        idempotency_resend_after=3.0,
        idempotency_retry_base=0.05,
        idempotency_retry_cap=1.0,
        idempotency_redis_pause=0.5,
        idempotency_pool_size=2,
    )


def upkeep_queue(queue: str) -> str:
    """Where beat's messages go: what they leave behind must not look like work."""
    return f"{queue}-upkeep"


def accept(session: Session | Connection, *, tenant: str, task: str, key: str, account: str, amount: int) -> None:
    """Note in the caller's transaction that this operation is accepted and what it is to do."""
    row = {"tenant": tenant, "task": task, "key": key, "account": account, "amount": amount}
    session.execute(_ACCEPT, row)


def record_failure(session: Session, operation: Operation, error: PermanentError) -> None:
    session.execute(
        text("INSERT INTO failures (account, code) VALUES (:account, :code)"),
        {"account": operation.arguments["account"], "code": error.code},
    )


def break_down(session: Session, operation: Operation, error: PermanentError) -> None:
    """An `on_failed` that is broken."""
    session.execute(INSERT, {"account": operation.arguments["account"], "amount": 0})
    raise ValueError("a broken handler")


def time_out(session: Session, operation: Operation, error: PermanentError) -> None:
    """An `on_failed` that always times out, which looks like a database that is away."""
    session.execute(text("SET LOCAL statement_timeout = 10"))
    session.execute(text("SELECT pg_sleep(1)"))


def _write(task: IdempotentTask, account: str, amount: int) -> dict[str, Any]:
    task.session.execute(INSERT, {"account": account, "amount": amount})
    return {"account": account, "amount": amount}


def _write_last(task: IdempotentTask, account: str, amount: int) -> dict[str, Any]:
    result = _write(task, account, amount)
    # An attempt that is stopped here past the lease goes on to a finish that must match nothing.
    crashing.reach("body.done")
    return result


_OPTIONS: dict[str, Any] = {
    # Celery gives a shared task to every application of the process: tests have others
    "shared": False,
    "base": IdempotentTask,
    "bind": True,
    "key": "{number}",
    "on_failed": record_failure,
    "max_attempts": MANY_ATTEMPTS,
}


@app.task(name="chaos.deposit", batch=10, batch_commit="each", **_OPTIONS)
def deposit(self: IdempotentTask, number: str, account: str, amount: int) -> dict[str, Any]:
    """One row."""
    return _write_last(self, account, amount)


@app.task(name="chaos.transfer", batch=5, batch_commit="each", **_OPTIONS)
def transfer(self: IdempotentTask, number: str, account: str, amount: int, url: str) -> dict[str, Any]:
    """A step, two calls outside, and a final row; it has attempts enough."""
    self.step("reserve", reserve, f"{account}/reserved", amount, undo=unreserve)
    self.effect("pay", pay, f"{url}/steady", amount)
    self.effect("notify", pay, f"{url}/steady", amount, reconcile=find)
    return _write_last(self, account, amount)


@app.task(name="chaos.charge", **_OPTIONS | {"max_attempts": FEW_ATTEMPTS})
def charge(self: IdempotentTask, number: str, account: str, amount: int, url: str, asks: bool) -> dict[str, Any]:
    """Two steps and a call over a bad line, with few attempts: it may end at any of them."""
    self.step("reserve", reserve_for_charge, f"{account}/reserved", amount, undo=unreserve)
    self.step("tag", reserve, f"{account}/tag", amount, undo=unreserve)
    self.effect("pay", pay, f"{url}/rough", amount, reconcile=find if asks else None)
    return _write_last(self, account, amount)


@app.task(name="chaos.stumble", **_OPTIONS)
def stumble(self: IdempotentTask, number: str, account: str, amount: int, url: str) -> None:
    """Cannot finish after its payment."""
    self.step("reserve", reserve, f"{account}/reserved", amount, undo=unreserve)
    self.effect("pay", pay, f"{url}/steady", amount)
    raise PermanentError("no such account", "no_account")


def reserve(session: Session, account: str, amount: int) -> dict[str, Any]:
    """Reserve once: a second reservation would use another payment's money."""
    crashing.reach("step.entered")
    reserved = session.execute(_RESERVED, {"account": account}).scalar_one()
    if reserved:
        raise PermanentError(f"{reserved} reserved already", "exceeds")
    session.execute(INSERT, {"account": account, "amount": amount})
    return {"account": account, "amount": amount}


def reserve_for_charge(session: Session, account: str, amount: int) -> dict[str, Any]:
    # An attempt stopped here and continued after another one has reserved decides on what the other one wrote.
    crashing.reach("charge.reserving")
    return reserve(session, account, amount)


@app.task(name="chaos.refunded", **_OPTIONS)
def refunded(self: IdempotentTask, number: str, account: str, amount: int, url: str) -> None:
    """Cannot finish after its payment, and the undo of its step answers for that."""
    self.step("reserve", reserve, f"{account}/reserved", amount, undo=refund)
    self.effect("pay", pay, f"{url}/steady", amount)
    raise PermanentError("no such account", "no_account")


def refund(session: Session, reserved: dict[str, Any], effects: Mapping[str, Any]) -> None:
    """Take the reservation back, and the payment if there was one: as a row, which another task would send."""
    unreserve(session, reserved)
    for name in effects:
        session.execute(_REVERSE, {"account": f"{reserved['account']}/{name}", "amount": reserved["amount"]})


def unreserve(session: Session, reserved: dict[str, Any]) -> None:
    session.execute(_REVERSE, reserved)


def pay(url: str, amount: int, *, idempotency_key: str) -> dict[str, Any]:
    response = httpx.post(url, json={"amount": amount}, headers={"Idempotency-Key": idempotency_key}, timeout=10)
    if 400 <= response.status_code < 500:
        refusal = StoredRefusal if response.status_code in provider.KEPT else PermanentError
        raise refusal("the provider refused", f"provider_{response.status_code}")
    if response.status_code == provider.BROKEN:
        raise StoredFailure("the provider failed, and keeps that answer")
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


def find(url: str, amount: int, *, doubt: EffectInDoubt) -> Happened | DidNotHappen | StillUnknown:
    """Ask the provider, which closes a key for good when it answers no."""
    answer = provider.ask(url.rpartition("/")[0], doubt.idempotency_key)
    if answer is None:
        return StillUnknown(ask_again=LATER if amount % 2 else None)
    return Happened(answer["receipt"]) if answer["acted"] else DidNotHappen()


@app.task(name="chaos.announce", **_OPTIONS)
def announce(self: IdempotentTask, number: str, owner: str, account: str, amount: int) -> dict[str, Any]:
    """A row and an event about it: both, or neither."""
    tell(self.session, tenant=owner, number=number, account=account, amount=amount)
    return _write(self, account, amount)


def tell(session: Session | Connection, *, tenant: str, number: str, account: str, amount: int) -> str:
    """Publish an event in the caller's transaction, and accept what its two consumers are to do. Returns its id."""
    data = {"account": account, "amount": amount}
    ordering_key = f"{tenant}-{int(number) % ORDERING_KEYS}"
    event_id = publish(session, "account.moved", data, ordering_key=ordering_key, tenant=tenant, app=app)
    for consumer in (LEDGER, MAILER):
        accept(
            session,
            tenant=tenant,
            task=consumer,
            key=event_id,
            account=f"{account}/{consumer}",
            amount=amount,
        )
    return event_id


@subscribe(
    "account.*", consumer="ledger", app=app, on_failed=None, max_attempts=MANY_ATTEMPTS, batch=10, batch_commit="each"
)
def post(self: IdempotentTask, event: dict[str, Any]) -> dict[str, Any]:
    """The first consumer's row."""
    return _write_last(self, f"{event['data']['account']}/{LEDGER}", event["data"]["amount"])


@subscribe("account.moved", consumer="mailer", app=app, on_failed=None, max_attempts=MANY_ATTEMPTS)
def note(self: IdempotentTask, event: dict[str, Any]) -> dict[str, Any]:
    """The second consumer's row."""
    return _write_last(self, f"{event['data']['account']}/{MAILER}", event["data"]["amount"])


@app.task(name="chaos.waited", on_busy="wait", **_OPTIONS)
def waited(self: IdempotentTask, number: str, account: str, amount: int) -> dict[str, Any]:
    """One row, after a while; its duplicates come back for the result."""
    time.sleep(WORK)
    return _write_last(self, account, amount)


@app.task(name="chaos.deferred", **_OPTIONS)
def deferred(self: IdempotentTask, number: str, account: str, amount: int, due: float) -> dict[str, Any]:
    """One row, not before its time."""
    if time.time() < due:
        raise Defer(LATER, "not yet")
    return _write_last(self, account, amount)


@app.task(name="chaos.ordered", **_OPTIONS)
def ordered(self: IdempotentTask, number: str, account: str, amount: int) -> dict[str, Any]:
    """One row; sent in the order of its ordering key."""
    return _write_last(self, account, amount)


@app.task(name="chaos.direct", **_OPTIONS)
def direct(self: IdempotentTask, number: str, account: str, amount: int) -> dict[str, Any]:
    """One row; sent past the outbox, and called eagerly."""
    time.sleep(WORK)
    return _write_last(self, account, amount)


@app.task(name="chaos.novel", **_OPTIONS)
def novel(self: IdempotentTask, number: str, account: str, amount: int) -> dict[str, Any]:
    """One row; old code does not know this task."""
    return _write_last(self, account, amount)


@app.task(name="chaos.changed", **_OPTIONS)
def changed(self: IdempotentTask, number: str, account: str, amount: int, fee: int = 0) -> dict[str, Any]:
    """One row; old code knows no `fee`, and does its work in one step more."""
    return _write_last(self, account, amount)


@app.task(name="chaos.ungrateful", **_OPTIONS | {"on_failed": break_down})
def ungrateful(self: IdempotentTask, number: str, account: str, amount: int) -> None:
    """Can never be, and its `on_failed` is broken."""
    raise PermanentError("no such account", "no_account")


@app.task(name="chaos.stuck", **_OPTIONS | {"max_attempts": FEW_ATTEMPTS, "on_failed": time_out})
def stuck(self: IdempotentTask, number: str, account: str, amount: int) -> None:
    """Can never be, and its `on_failed` always times out."""
    raise PermanentError("no such account", "no_account")


@app.task(name="chaos.flaky", **_OPTIONS)
def flaky(self: IdempotentTask, number: str, account: str, amount: int, failures: int) -> dict[str, Any]:
    """Writes its row and fails, a few times; the row of the last attempt stays."""
    result = _write(self, account, amount)
    if self.request.retries < failures:
        raise ConnectionError("not yet")
    return result


@app.task(name="chaos.refused", **_OPTIONS)
def refused(self: IdempotentTask, number: str, account: str, amount: int) -> None:
    """Writes its row and says that it can never be."""
    _write(self, account, amount)
    raise PermanentError("no such account", "no_account")


@app.task(name="chaos.hopeless", **_OPTIONS | {"max_attempts": FEW_ATTEMPTS})
def hopeless(self: IdempotentTask, number: str, account: str, amount: int) -> None:
    """Writes its row and fails until its attempts are used up."""
    _write(self, account, amount)
    raise ValueError("never")


@app.task(name="chaos.poison", **_OPTIONS | {"max_attempts": FEW_ATTEMPTS})
def poison(self: IdempotentTask, number: str, account: str, amount: int) -> None:
    """Writes its row and kills its process."""
    self.session.execute(INSERT, {"account": account, "amount": amount})
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(name="upkeep.recover", ignore_result=True, shared=False)
def recover() -> None:
    """Release orphaned operations."""
    maintenance.recover(app)


@app.task(name="upkeep.resend", ignore_result=True, shared=False)
def resend_outbox() -> None:
    """Send again what the broker has lost."""
    resend_lost(app)


@app.task(name="upkeep.purge", ignore_result=True, shared=False)
def purge() -> None:
    """Delete what is past its retention."""
    maintenance.purge(app)


if "CHAOS_QUEUE" in os.environ:
    configure(os.environ)
    crashing.install()
    ledgers.sign_writers()
