"""Dead letters in pages, newest first, and counted by what they have in common.

A page begins after the last letter of the one before (its id), so the hundredth costs as much as the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, Row

from .record import is_open, unsettled
from .visible import parameters

# The most open letters that are counted: about a tenth of a second.
BOUND = 200_000
# In the place of a version of code: letters that have none.
NO_VERSION = "-"

_MINE = (
    """(consumer_service = %(service)s) IS NOT FALSE AND (%(tenants)s::text[] IS NULL OR tenant = ANY(%(tenants)s))"""
)

# What each filter adds to the statement; only those that are given, so that the planner sees what is asked.
_CONDITIONS = {
    "status": "status = %(status)s",
    "reason": "reason = %(reason)s",
    "task": "coalesce(task, header_task) = %(task)s",
    "tenant": "tenant = %(tenant)s",
    "code_version": f"coalesce(code_version, '{NO_VERSION}') = %(code_version)s",
    "older_than": "failed_at < clock_timestamp() - make_interval(secs => %(older_than)s)",
    "newer_than": "failed_at >= clock_timestamp() - make_interval(secs => %(newer_than)s)",
    "before": "id < %(before)s",
}

_PAGE = f"""
SELECT id, source, tenant, task, key, generation, queue, header_task, consumer_service, reason, attempts, status, code_version,
       last_error, failed_at, closed_at, archived_at
FROM idempotency.dead_letters WHERE {_MINE} {{conditions}} ORDER BY id DESC LIMIT %(limit)s
"""

_IDS = f"SELECT id FROM idempotency.dead_letters WHERE {_MINE} {{conditions}} ORDER BY id LIMIT %(limit)s"

# Letters that name no application are few, and apart: with them, the index could not be read in one go.
_WINDOW = """
SELECT id, reason, task, header_task, code_version, failed_at, tenant FROM idempotency.dead_letters
WHERE status = 'open' AND archived_at IS NULL AND {owner} AND (%(tenants)s::text[] IS NULL OR tenant = ANY(%(tenants)s)) LIMIT %(bound)s
"""
_GROUPS = f"""
SELECT reason, coalesce(task, header_task, '-') AS task, coalesce(code_version, '{NO_VERSION}') AS code_version,
       count(*) AS letters, sum(count(*)) OVER () AS counted, min(failed_at) AS oldest, max(failed_at) AS newest,
       count(*) FILTER (WHERE failed_at > clock_timestamp() - interval '1 hour') AS last_hour,
       count(*) FILTER (WHERE failed_at BETWEEN clock_timestamp() - interval '2 hours'
                                            AND clock_timestamp() - interval '1 hour') AS hour_before
FROM (({_WINDOW.format(owner="consumer_service = %(service)s")}) UNION ALL
      ({_WINDOW.format(owner="consumer_service IS NULL")})) open
GROUP BY 1, 2, 3 ORDER BY max(failed_at) > clock_timestamp() - interval '1 hour' DESC, letters DESC, 1, 2, 3 LIMIT %(limit)s
"""

_SHOWN = f"SELECT * FROM idempotency.dead_letters WHERE id = %(id)s AND {_MINE}"

# Where each of these letters is: open, or what has become of its operation since. The next letter of an operation is of its own
# end after the replay, or of the replay's message, which could not be sent or died on its way. Another request under its key,
# which was refused, says nothing of it, nor does a late copy of an earlier message. The letter of a saga that has stopped stays
# open until the saga goes on: until then it is tried, as long as the saga is due, or an undo of it that has failed runs again.
_FOLLOWED = f"""
SELECT d.id, d.status, d.reason, d.tenant, d.task, d.key, r.status AS operation, g.status AS saga,
       (SELECT max(n.id) FROM idempotency.dead_letters n
        WHERE (n.tenant, n.task, n.key) = (d.tenant, d.task, d.key) AND n.id <> d.id AND {is_open("n")}
          AND n.failed_at >= d.closed_at AND n.reason NOT IN ('fingerprint_mismatch', 'service_mismatch')
          AND (n.fingerprint = coalesce(d.fingerprint, r.fingerprint)) IS NOT FALSE
          AND (n.source = 'operation' OR d.source <> 'operation' AND n.outbox_id IS NULL
               OR EXISTS (SELECT FROM idempotency.outbox o
                          WHERE o.id = n.outbox_id AND o.generation >= coalesce(r.generation, 1)))) AS next_letter,
       EXISTS (SELECT FROM idempotency.outbox o WHERE (o.tenant, o.task, o.key) = (d.tenant, d.task, d.key)
               AND {unsettled("o")}) AS is_under_way,
       d.was_sent AND d.status = 'open' AND g.stopped = d.reason AS is_stopped,
       r.status = 'started' OR g.waits_for IS NULL OR EXISTS (
           SELECT FROM idempotency.saga_steps s JOIN idempotency.records u ON (u.tenant, u.task, u.key) = (s.tenant, s.call_task, s.call_key)
           WHERE s.saga_id = g.id AND s.generation = g.generation AND s.kind = 'undo' AND s.state = 'failed'
             AND u.status IN ('released', 'started')) AS is_tried
FROM (
    -- a letter of an unknown task names no operation: its replay does, in the audit
    SELECT l.id, l.status, l.reason, l.source, l.fingerprint, l.closed_at, coalesce(l.tenant, a.tenant) AS tenant,
           coalesce(l.task, a.task, l.header_task) AS task, coalesce(l.key, a.key) AS key, a.id IS NOT NULL AS was_sent
    FROM idempotency.dead_letters l LEFT JOIN idempotency.audit a ON a.request_id = %(requests)s || l.id
    WHERE l.id = ANY(%(ids)s)
) d
LEFT JOIN idempotency.records r ON (r.tenant, r.task, r.key) = (d.tenant, d.task, d.key)
LEFT JOIN idempotency.sagas g ON (g.tenant, g.task, g.key) = (d.tenant, d.task, d.key) AND NOT g.observed
ORDER BY d.id
"""


@dataclass(frozen=True, slots=True)
class Letters:
    """Which letters; None means any. Ages are in seconds."""

    status: str | None = "open"
    is_archived: bool | None = False
    reason: str | None = None
    task: str | None = None
    tenant: str | None = None
    code_version: str | None = None
    older_than: float | None = None
    newer_than: float | None = None
    before: int | None = None

    def conditions(self) -> str:
        """The conditions of what is given."""
        given = [name for name, value in asdict(self).items() if value is not None and name != "is_archived"]
        archived = {None: "", False: " AND archived_at IS NULL", True: " AND archived_at IS NOT NULL"}[self.is_archived]
        return "".join(f" AND {_CONDITIONS[name]}" for name in given) + archived


def page(
    connection: Connection, service: str, tenants: Sequence[str] | None, only: Letters, *, limit: int
) -> Sequence[Row[Any]]:
    """One page of letters of these tenants, newest first; the next one has `before=` the last id."""
    fields = parameters(service, tenants, limit=limit, **asdict(only))
    return connection.exec_driver_sql(_PAGE.format(conditions=only.conditions()), fields).all()


def ids(connection: Connection, service: str, tenants: Sequence[str] | None, only: Letters, *, limit: int) -> list[int]:
    """The ids of the oldest letters that match."""
    fields = parameters(service, tenants, limit=limit, **asdict(only))
    return list(connection.exec_driver_sql(_IDS.format(conditions=only.conditions()), fields).scalars())


def groups(connection: Connection, service: str, tenants: Sequence[str] | None, *, limit: int) -> Sequence[Row[Any]]:
    """Open letters counted by reason, task and version of code, with those of the last hour and of the hour before."""
    return connection.exec_driver_sql(_GROUPS, parameters(service, tenants, limit=limit, bound=BOUND)).all()


def show(connection: Connection, service: str, tenants: Sequence[str] | None, letter: int) -> Row[Any] | None:
    """One whole letter; None: there is none, or it is another application's or another tenant's."""
    return connection.exec_driver_sql(_SHOWN, parameters(service, tenants, id=letter)).one_or_none()


def followed(connection: Connection, letters: Sequence[int], requests: str) -> Sequence[Row[Any]]:
    """Whether these letters are open, and what their operations are by now. `requests`: how the ids of their replays' requests begin."""
    return connection.exec_driver_sql(_FOLLOWED, {"ids": list(letters), "requests": requests}).all()
