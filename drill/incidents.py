"""The incidents: how each is brought about. Nothing here says how one ends."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from uuid import uuid4

from kombu import Connection
from sqlalchemy import create_engine, text

from drill.system import APP, System

# Bytes: more than fit into one frame, and fewer than a message may have.
HEADER = 129_000
NOTE = "a note that grows"
_LENGTHEN = text("""
UPDATE idempotency.outbox SET message = replace(message, :note, repeat('x', :many))
WHERE status = 'pending' AND message LIKE '%' || :note || '%'
""")


@dataclass(frozen=True, slots=True)
class Incident:
    """`begin` brings it about. `cause_ends`: what was broken outside is repaired once the alert has come; by others."""

    name: str
    begin: Callable[[System], None]
    needs_prometheus: bool = False
    cause_ends: Callable[[System], None] = lambda _: None


def _pay(system: System, payment_id: str | None = None, amount: int = 1250) -> str:
    payment_id = payment_id or f"p-{uuid4().hex[:8]}"
    task = system.app.tasks["drill.pay"]
    with system.transaction() as session:
        task.enqueue(session, payment_id=payment_id, amount=amount, currency="EUR")
    return payment_id


def declined(system: System) -> None:
    payment_id = f"p-{uuid4().hex[:8]}"
    system.fault("declined", payment_id)
    _pay(system, payment_id)


def unknown_effect(system: System) -> None:
    payment_id = f"p-{uuid4().hex[:8]}"
    system.fault("error_500_after", payment_id)
    _pay(system, payment_id)


def malformed(system: System) -> None:
    with Connection(system.servers.broker_url) as broker, broker.channel() as channel:
        producer = broker.Producer(channel)
        producer.publish(b"{not json", routing_key="shop", exchange="", content_type="application/json")


def dead_workers(system: System) -> None:
    for name in ("shop-worker", "mail-worker"):
        system.end(name, signal.SIGKILL)
    for _ in range(3):
        _pay(system)


def silent_relay(system: System) -> None:
    system.tell("relay", signal.SIGSTOP)
    _pay(system)


def full_queue(system: System) -> None:
    system.end("mail-worker")
    tell = system.app.tasks["drill.tell"]
    for _ in range(12):
        with system.transaction() as session:
            tell.enqueue(session, mail_id=uuid4().hex)


def bad_deploy(system: System) -> None:
    """Web servers of version 2, workers and relays of version 1."""
    system.end("relay")
    system.launch_old("relay", "-m", "idempotency.cli", "relay")
    half_deployed(system)


def half_deployed(system: System) -> None:
    """Web servers and relays of version 2, workers of version 1."""
    hostname = ["--hostname", "old@%h", "--queues", "new", "--concurrency", "1", "--loglevel", "WARNING"]
    system.launch_old("old-worker", "-m", "celery", "-A", APP, "worker", *hostname)
    newer = system.app.tasks["drill.newer"]
    with system.transaction() as session:
        newer.enqueue(session, id=uuid4().hex)


def blocked_ordering_key(system: System) -> None:
    """An earlier version has accepted what is too long to send, which this one would refuse; two more are behind it."""
    tell, customer = system.app.tasks["drill.tell"], uuid4().hex
    for headers in ({"x-note": NOTE}, {}, {}):
        with system.transaction() as session:
            tell.using(ordering_key=customer, headers=headers).enqueue(session, mail_id=uuid4().hex)
            session.execute(_LENGTHEN, {"note": NOTE, "many": HEADER})


def undo_fails(system: System) -> None:
    system.hall_is_broken.touch()
    book = system.app.tasks["drill.book"]
    with system.transaction() as session:
        book.enqueue(session, seat=uuid4().hex)


def hall_is_repaired(system: System) -> None:
    system.hall_is_broken.unlink()


def broker_away(system: System) -> None:
    system.servers.rabbitmq.kill()
    _pay(system)


def read_only(system: System) -> None:
    _pay(system)
    engine = create_engine(system.servers.postgres.superuser_url(), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text("ALTER SYSTEM SET default_transaction_read_only = on"))
        connection.execute(text("SELECT pg_reload_conf()"))
    engine.dispose()


INCIDENTS = (
    Incident("declined", declined),
    Incident("unknown-effect", unknown_effect),
    Incident("malformed-message", malformed),
    Incident("dead-workers", dead_workers),
    Incident("silent-relay", silent_relay),
    Incident("full-queue", full_queue),
    Incident("bad-deploy", bad_deploy),
    Incident("half-deployed", half_deployed),
    Incident("blocked-ordering-key", blocked_ordering_key),
    Incident("undo-fails", undo_fails, cause_ends=hall_is_repaired),
    Incident("broker-away", broker_away, needs_prometheus=True),
    Incident("read-only", read_only, needs_prometheus=True),
)
