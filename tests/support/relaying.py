"""Relays that a test runs pass by pass: the rows they leave, and the connections they lose."""

from __future__ import annotations

import contextlib
import socket

from sqlalchemy import Connection, text

from idempotency.relay.relay import Relay
from tests.support import operations as op


def states(connection: Connection) -> list[str]:
    """The states of the outbox rows, the oldest first."""
    return [row.status for row in op.outbox(connection)]


def make_due(connection: Connection) -> None:
    """Let back-offs and reservations of relays be over."""
    past = "clock_timestamp() - interval '1 s'"
    connection.execute(text(f"UPDATE idempotency.outbox SET available_at = {past} WHERE status = 'pending'"))
    connection.execute(text(f"UPDATE idempotency.outbox SET relayed_until = {past} WHERE relayed_until IS NOT NULL"))


def cut(relay: Relay) -> None:
    """Close the relay's socket, as a broker that dies would; what had arrived and was not read is lost with it."""
    assert relay.publisher._broker is not None
    connection = relay.publisher._broker.connection.transport.sock
    connection.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(ConnectionError):
        while connection.recv(65536):
            pass
