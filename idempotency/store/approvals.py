"""What one person has asked for and another one has to approve, in pages, the newest letter first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row

from .visible import parameters

_OPEN = """
SELECT a.letter, a.requested_by, a.requested_at, a.reason AS why, a.known_by, d.reason, d.tenant, coalesce(d.task, d.header_task) AS task,
       d.key, d.failed_at, d.code_version,
       (a.letter_reason, a.letter_generation) IS NOT DISTINCT FROM (d.reason, d.generation) AS is_of_this_letter
FROM idempotency.discards a JOIN idempotency.dead_letters d ON d.id = a.letter AND d.status = 'open'
WHERE a.approved_by IS NULL AND (d.consumer_service = %(service)s) IS NOT FALSE
  AND (%(tenants)s::text[] IS NULL OR d.tenant = ANY(%(tenants)s)) AND (%(before)s::bigint IS NULL OR a.letter < %(before)s)
ORDER BY a.letter DESC LIMIT %(limit)s
"""


def open_requests(
    connection: Connection, service: str, tenants: Sequence[str] | None, *, before: int | None, limit: int
) -> Sequence[Row[Any]]:
    """Requests to discard open letters that nobody has approved; the next page has `before=` the last letter."""
    fields = parameters(service, tenants, before=before, limit=limit)
    return connection.exec_driver_sql(_OPEN, fields).all()
