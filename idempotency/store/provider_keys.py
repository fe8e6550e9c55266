"""Operations by the key that a provider was given for a call of theirs, as its dashboard shows it.

What has ended is found by an index (migration 0020), which only ends write to; what runs, or waits for its next attempt, is
looked through. Not by the ids that a provider makes, such as `pi_…`: they are in results, which are nobody's to search.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row

from .visible import VISIBLE, parameters

# The most operations that are looked through of those that run, and of those that wait.
BOUND = 20_000
# The most that one answer names. One has the key, unless a row was written by hand.
MOST = 20

# The expression as the index has it.
_KEYS = "pg_catalog.jsonb_path_query_array(effects, '$.*.key')"
_COLUMNS = "tenant, task, key, service, effects"
_ENDED = f"""
SELECT {_COLUMNS} FROM idempotency.records
WHERE completed_at IS NOT NULL AND effects <> '{{}}' AND {_KEYS} ? %(provider_key)s
"""
_OPEN = f"""
SELECT * FROM (
    (SELECT {_COLUMNS} FROM idempotency.records WHERE locked_until IS NOT NULL ORDER BY locked_until LIMIT %(bound)s) UNION ALL
    (SELECT {_COLUMNS} FROM idempotency.records WHERE available_at IS NOT NULL ORDER BY queue, available_at LIMIT %(bound)s)
) open WHERE {_KEYS} ? %(provider_key)s
"""
# Found first: for the order and the limit alone, the planner would read all records by their key.
_FIND = """
WITH o AS MATERIALIZED ({of})
SELECT DISTINCT o.tenant, o.task, o.key, e.key AS effect, e.value ->> 'state' AS state
FROM o CROSS JOIN LATERAL jsonb_each(o.effects) e
WHERE {visible} AND e.value ->> 'key' = %(provider_key)s ORDER BY 1, 2, 3, 4 LIMIT %(most)s
"""
_OF_SAGAS = f"""
WITH s AS MATERIALIZED (
    SELECT saga_id, name, state FROM idempotency.saga_steps WHERE kind = 'effect' AND entry ->> 'key' = %(provider_key)s
)
SELECT DISTINCT o.tenant, o.task, o.key, s.name AS effect, s.state
FROM s
JOIN idempotency.sagas g ON g.id = s.saga_id
JOIN idempotency.records o ON (o.tenant, o.task, o.key) = (g.tenant, g.task, g.key)
WHERE {VISIBLE} ORDER BY 1, 2, 3, 4 LIMIT %(most)s
"""
# Without it, the search would read every record.
_HAS_INDEXES = """
SELECT to_regclass('idempotency.records_provider_keys') IS NOT NULL
   AND to_regclass('idempotency.saga_steps_provider_keys') IS NOT NULL
"""
_NOT_ALL = """
SELECT EXISTS (SELECT FROM idempotency.records WHERE available_at IS NOT NULL ORDER BY queue, available_at OFFSET %(bound)s)
    OR EXISTS (SELECT FROM idempotency.records WHERE locked_until IS NOT NULL ORDER BY locked_until OFFSET %(bound)s)
"""


def with_provider_key(
    connection: Connection, service: str, tenants: Sequence[str] | None, provider_key: str
) -> tuple[list[Row[Any]], bool]:
    """Operations with a call under this key, as tenant, task, key, effect and its state; and whether all were asked.

    `tenants`: of these alone; None: of all. On a schema before 0020, only what has not ended is asked.
    """
    fields = parameters(service, tenants, provider_key=provider_key, bound=BOUND, most=MOST)
    has_indexes = bool(connection.exec_driver_sql(_HAS_INDEXES).scalar_one())
    statements = [_FIND.format(of=_ENDED, visible=VISIBLE), _OF_SAGAS] if has_indexes else []
    for statement in (*statements, _FIND.format(of=_OPEN, visible=VISIBLE)):
        if rows := connection.exec_driver_sql(statement, fields).all():
            return list(rows), True
    return [], has_indexes and not connection.exec_driver_sql(_NOT_ALL, {"bound": BOUND}).scalar_one()
