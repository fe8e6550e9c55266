"""What a dead letter's replay or discarding means for the webhook that its operation delivers."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row

from .record import is_open, unsettled
from .webhooks import DISCARDED, OF_DELIVERY

_DELIVERY_OF = f"""
SELECT w.id, w.body = '' AS is_erased, l.key <> w.id || ':' || w.redelivery AS is_past
FROM idempotency.dead_letters l JOIN idempotency.webhook_deliveries w
    ON (w.tenant, w.task, w.id) = (l.tenant, coalesce(l.task, l.header_task), split_part(l.key, ':', 1))
WHERE l.id = %(letter)s AND {is_open("l")} FOR UPDATE OF w
"""
_WAIT_AGAIN = """
UPDATE idempotency.webhook_deliveries SET status = 'waiting', given_up_because = NULL, ended_at = NULL
WHERE id = %(id)s AND status <> 'waiting'
"""
# Unless its operation goes on, or has not begun and another message brings it.
_GIVE_UP = f"""
UPDATE idempotency.webhook_deliveries w
SET status = 'given_up', given_up_because = '{DISCARDED}', ended_at = clock_timestamp()
WHERE id = %(id)s AND status = 'waiting' AND coalesce(
    (SELECT status IN ('completed', 'failed') FROM idempotency.records WHERE {OF_DELIVERY}),
    NOT EXISTS (SELECT FROM idempotency.outbox WHERE {OF_DELIVERY} AND {unsettled()} AND status <> 'failed'))
"""


def delivery_of(connection: Connection, letter: int) -> Row[Any] | None:
    """The delivery that the operation of an open dead letter makes; None: it makes none.

    `is_past`: it was redelivered since, by another operation. Locked before that operation's record, as an erasure does.
    """
    return connection.exec_driver_sql(_DELIVERY_OF, {"letter": letter}).one_or_none()


def wait_again(connection: Connection, id: str) -> None:
    """Let a delivery that has ended wait again, since its operation is replayed."""
    connection.exec_driver_sql(_WAIT_AGAIN, {"id": id})


def give_up(connection: Connection, id: str) -> None:
    """Give up a delivery that nothing makes any more, since the letter of its operation was discarded."""
    connection.exec_driver_sql(_GIVE_UP, {"id": id})
