"""Whether two cells have one virtual host of RabbitMQ, by addresses that do not say so: two nodes of a cluster, a Service beside a host."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from uuid import uuid4

from amqp.exceptions import AccessRefused, NotFound, ResourceLocked
from celery import Celery
from kombu import Connection

from ..broker.connections import BROKER_ERRORS, connect
from ..broker.rights import DOCTOR
from .findings import Finding, refusal, warning
from .unreachable import TIMEOUT

ADVICE = "each cell has its own: workers of one would get the messages of another; correct one of the two addresses"


class SharedBrokers(ExitStack):
    """Compares the brokers of cells, one after the other: a queue that is made at one, and is gone with its connection, is seen at
    another address of the same virtual host. Open until the last one is compared."""

    def __init__(self) -> None:
        super().__init__()
        # The cells that have made a queue, by its name; and those whose users may make none, by what their brokers say of
        # themselves.
        self._queues: dict[str, str] = {}
        self._names: dict[tuple[str, str], str] = {}

    def check(self, app: Celery, cell: str) -> list[Finding]:
        """Whether the cell that is served has the broker of one before it; nothing if its broker does not answer."""
        with suppress(*BROKER_ERRORS):
            if app.connection_for_write().transport.driver_type == "amqp":
                connection = self.enter_context(connect(app.connection_for_write, connect_timeout=TIMEOUT))
                return self._compared(connection, cell)
        return []

    def _compared(self, connection: Connection, cell: str) -> list[Finding]:
        for queue, other in self._queues.items():
            if _has(connection, queue):
                return [refusal("broker", f"is that of {other}, too, by another address", ADVICE)]
        names = (str(connection.connection.server_properties.get("cluster_name")), connection.virtual_host or "/")
        if names in self._names:
            found = f"may be that of {self._names[names]}, too: its cluster and its virtual host have the same names"
            return [warning("broker", found, "this user may not find out; compare the addresses")]
        queue = f"{DOCTOR}{uuid4().hex}"
        try:
            connection.channel().queue_declare(queue, exclusive=True)
            self._queues[queue] = cell
        except AccessRefused:
            self._names[names] = cell
        return []


def _has(connection: Connection, queue: str) -> bool:
    try:
        connection.channel().queue_declare(queue, passive=True)
    except ResourceLocked:  # it is there, and another connection's
        return True
    except (NotFound, AccessRefused):
        pass
    return False
