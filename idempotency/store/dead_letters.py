"""Dead letters, which wait for a person: listing, reporting and replaying them.

How they are stored is in `letters.py`, and what a replay sends in `letter_messages.py`. A replay keeps the key: one transaction
marks the letter, opens a new generation of the record and writes the outbox row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from sqlalchemy import Connection, Row

from ..errors import BulkRefused, OperationNotFound, ReplayRefused
from ..reasons import SERVICE_MISMATCH, UNHANDLED, UNPUBLISHABLE
from ..wire.keys import OperationId
from . import archive, letter_messages
from .letter_messages import NEVER
from .outbox import EXTERNAL, refresh_lanes
from .record import is_open, unsettled

if TYPE_CHECKING:
    from celery import Celery

NOT_AN_END = (UNPUBLISHABLE, UNHANDLED)  # the operation has not ended: it only needs a delivery
# The most letters that one command may replay or discard, since a wrong filter might match millions.
BULK_LIMIT = 10_000

GROUPS = {
    "service": "coalesce(consumer_service, '-')",
    "task": "coalesce(task, header_task, '-')",
    "reason": "reason",
    "queue": "coalesce(queue, '-')",
    "status": "status",
}
Group = Literal["service", "task", "reason", "queue", "status"]

_FILTER = """
    (%(status)s::text IS NULL OR status = %(status)s)
    AND (%(task)s::text IS NULL OR coalesce(task, header_task) = %(task)s)
    AND (%(reason)s::text IS NULL OR reason = %(reason)s
         -- what ended it, where the application's rows were not written besides
         OR reason = 'on_failed_error' AND starts_with(last_error, '{{"code": "' || %(reason)s || '"'))
    AND (%(service)s::text IS NULL OR (consumer_service = %(service)s) IS NOT FALSE)
    AND (%(tenant)s::text IS NULL OR tenant = %(tenant)s)
    AND (%(ids)s::bigint[] IS NULL OR id = ANY(%(ids)s)) {listed}
"""

_LIST = f"""
SELECT id, source, tenant, task, key, generation, queue, header_task, consumer_service, reason, attempts, status,
       last_error, failed_at
FROM idempotency.dead_letters WHERE {_FILTER} ORDER BY id DESC LIMIT %(limit)s
"""

_IDS = f"SELECT id FROM idempotency.dead_letters WHERE {_FILTER} ORDER BY id LIMIT %(limit)s"

_GROUPED = """
SELECT {columns}, count(*) AS letters, min(failed_at) AS oldest, max(failed_at) AS newest
FROM idempotency.dead_letters WHERE {filter} GROUP BY {columns_only} ORDER BY letters DESC, {columns_only}
LIMIT %(limit)s
"""

_SERVICES = "SELECT id, consumer_service FROM idempotency.dead_letters WHERE id = ANY(%(ids)s)"

# `spent_at` of its operation: without it, the attempts say too much.
_SHOW = """
SELECT d.*, (SELECT r.spent_at FROM idempotency.records r
             WHERE (r.tenant, r.task, r.key, r.generation) = (d.tenant, d.task, d.key, d.generation)) AS spent_at
FROM idempotency.dead_letters d WHERE d.id = %(id)s
"""

_OPEN_LETTER = f"""
SELECT max(id) FROM idempotency.dead_letters d
WHERE (tenant, task, key) = (%(tenant)s, %(task)s, %(key)s) AND {is_open("d")}
  -- of another request: replaying it does not help this operation, unless the application's own error has had that code
  AND (reason NOT IN ('fingerprint_mismatch', 'service_mismatch') OR EXISTS (
       SELECT FROM idempotency.records r WHERE (r.tenant, r.task, r.key, r.generation) = (d.tenant, d.task, d.key, d.generation)
         AND r.fingerprint = d.fingerprint AND r.error_code = d.reason))
"""

# By everyone who changes both: the record before its letters, one of which may have the task's name in its header alone.
_LOCK_RECORD = """
SELECT FROM idempotency.dead_letters d
JOIN idempotency.records r ON (r.tenant, r.task, r.key) = (d.tenant, coalesce(d.task, d.header_task), d.key)
WHERE d.id = %(letter)s FOR UPDATE OF r
"""

_MARK_REPLAYED = f"""
UPDATE idempotency.dead_letters SET status = 'replayed', closed_at = clock_timestamp()
WHERE id = %(id)s AND {is_open()}
RETURNING outbox_id, tenant, task, key, generation, fingerprint, queue, reason, payload, consumer_service
"""

# failed → released: a new generation proves that a person asked for another run. Effects and steps are kept.
_REOPEN = """
UPDATE idempotency.records
SET status = 'released', generation = generation + 1, attempts = 0, spent_at = NULL, token = NULL, locked_by = NULL,
    available_at = clock_timestamp(), completed_at = NULL, expires_at = NULL, response_code = NULL,
    error = NULL, error_code = NULL, first_error = NULL,
    -- workers remember revoked task ids: what they remember was revoked before this replay
    revoked_generation = coalesce(revoked_generation, generation),
    opened_at = clock_timestamp(), updated_at = clock_timestamp()
WHERE tenant = %(tenant)s AND task = %(task)s AND key = %(key)s
  AND (service = %(service)s) IS NOT FALSE
  AND fingerprint = %(fingerprint)s AND status = 'failed' AND generation = %(generation)s
RETURNING generation, message
"""

# A row that could not be published is sent again itself, so that it keeps its place in its lane.
_DELIVER = """
WITH again AS (
    UPDATE idempotency.outbox
    SET status = 'pending', origin = 'replay', generation = %(opened)s, attempts = 0, resends = 0, refusals = 0,
        first_refused_at = NULL, last_error = NULL, available_at = clock_timestamp(), taken = false,
        -- a row without an operation is done once published
        alerted_at = NULL, alert_logged_at = NULL, settled_at = CASE WHEN starts_with(task, %(external)s) THEN settled_at END
    WHERE id = %(outbox_id)s AND status = 'failed'
    RETURNING task, ordering_key
), new AS (
    INSERT INTO idempotency.outbox
        (message_id, tenant, task, key, fingerprint, message, queue, origin, generation, service)
    SELECT gen_random_uuid()::text, %(tenant)s, %(task)s, %(key)s, %(fingerprint)s, %(payload)s,
           coalesce(%(queue)s, ''), 'replay', %(opened)s, %(service)s
    WHERE NOT EXISTS (SELECT FROM again)
)
SELECT task, ordering_key FROM again WHERE ordering_key IS NOT NULL
"""

# A row that is `taken` is not resent (see `lost.py`).
_WILL_BE_DELIVERED = f"""
SELECT EXISTS (SELECT FROM idempotency.outbox o
               WHERE tenant = %(tenant)s AND task = %(task)s AND key = %(key)s
                 AND (service = %(service)s) IS NOT FALSE AND fingerprint = %(fingerprint)s AND {unsettled("o")}
                 AND (status = 'pending' OR status = 'published' AND NOT taken
                     -- an older message has been delivered, or is a copy; and this one has died
                     AND NOT EXISTS (SELECT FROM idempotency.outbox n
                                     WHERE (n.tenant, n.task, n.key, n.fingerprint) = (o.tenant, o.task, o.key, o.fingerprint)
                                       AND {unsettled("n")} AND n.status <> 'failed' AND n.id > o.id)
                     AND NOT EXISTS (SELECT FROM idempotency.dead_letters d
                                     WHERE d.outbox_id = o.id AND ({is_open("d")} OR d.id = %(letter)s))))
"""

_STATUS = """
SELECT status, generation, (service <> %(service)s) IS TRUE AS of_another FROM idempotency.records
WHERE tenant = %(tenant)s AND task = %(task)s AND key = %(key)s FOR UPDATE
"""

_REPORT = """
SELECT coalesce(consumer_service, '-') AS service,
       count(*) FILTER (WHERE failed_at >= since) AS new,
       count(*) FILTER (WHERE status = 'replayed' AND closed_at >= since) AS replayed,
       count(*) FILTER (WHERE status = 'discarded' AND closed_at >= since) AS discarded,
       count(*) FILTER (WHERE status = 'open' {outside}) AS open,
       count(*) FILTER (WHERE status = 'open' {inside}) AS archived,
       min(failed_at) FILTER (WHERE status = 'open' {outside}) AS oldest_open,
       (SELECT string_agg(reason || ' ' || letters::text, ', ' ORDER BY letters DESC, reason)
        FROM (SELECT reason, count(*) AS letters FROM idempotency.dead_letters r
              WHERE r.consumer_service IS NOT DISTINCT FROM d.consumer_service AND r.status = 'open' {outside}
              GROUP BY reason ORDER BY count(*) DESC, reason LIMIT 5) AS reasons) AS reasons
FROM idempotency.dead_letters d, (SELECT clock_timestamp() - pg_catalog.make_interval(days => %(days)s) AS since) AS period
WHERE (d.consumer_service = %(service)s) IS NOT FALSE
GROUP BY consumer_service HAVING count(*) FILTER (WHERE status = 'open' OR failed_at >= since OR closed_at >= since) > 0
ORDER BY 1
"""


# ---------------------------------------------------------------- read


@dataclass(frozen=True, slots=True)
class Selection:
    """A filter for dead letters; None means any. Of open ones, those that are not archived, or with `archived` those that are."""

    status: str | None = "open"
    task: str | None = None
    reason: str | None = None
    service: str | None = None
    tenant: str | None = None
    ids: Sequence[int] | None = None
    archived: bool = False

    def parameters(self, limit: int) -> dict[str, Any]:
        ids = None if self.ids is None else list(self.ids)
        return asdict(self) | {"ids": ids, "limit": limit}

    def listed(self, connection: Connection) -> str:
        """The rest of the condition."""
        if self.status != "open":
            return ""
        return archive.condition(connection, "inside" if self.archived else "outside")


def list_letters(
    connection: Connection, selection: Selection | None = None, *, limit: int = 100, **filters: Any
) -> Sequence[Row[Any]]:
    """List dead letters, newest first, by default the open ones; filters as in `Selection`."""
    selection = selection or Selection(**filters)
    query = _LIST.format(listed=selection.listed(connection))
    return connection.exec_driver_sql(query, selection.parameters(limit)).all()


def group_letters(
    connection: Connection, selection: Selection, by: Sequence[Group], *, limit: int = 1000
) -> Sequence[Row[Any]]:
    """Count dead letters per service, task, reason, queue or status, the most first."""
    columns = ", ".join(f'{GROUPS[group]} AS "{group}"' for group in by)
    only = ", ".join(str(position) for position, _ in enumerate(by, start=1))
    listed = _FILTER.format(listed=selection.listed(connection))
    query = _GROUPED.format(columns=columns, columns_only=only, filter=listed)
    return connection.exec_driver_sql(query, selection.parameters(limit)).all()


def select_ids(connection: Connection, selection: Selection, *, limit: int) -> list[int]:
    """The ids of a selection for a bulk command, oldest first. Raises `BulkRefused` if there are more than `limit`."""
    if limit > BULK_LIMIT:
        raise BulkRefused(f"--limit: at most {BULK_LIMIT} dead letters in one command, got {limit}")
    query = _IDS.format(listed=selection.listed(connection))
    ids = list(connection.exec_driver_sql(query, selection.parameters(limit + 1)).scalars())
    if len(ids) > limit:
        raise BulkRefused(
            f"more than {limit} dead letters match; choose fewer, or raise --limit (at most {BULK_LIMIT})"
        )
    return ids


def show(connection: Connection, letter: int) -> Row[Any]:
    """One whole dead letter. Raises `OperationNotFound`."""
    row = connection.exec_driver_sql(_SHOW, {"id": letter}).one_or_none()
    if row is None:
        raise OperationNotFound(f"dead letter {letter}: not found")
    return row


def open_letter(connection: Connection, id: OperationId) -> int | None:
    """The number of the newest open dead letter of an operation."""
    names = {"tenant": id.tenant, "task": id.task, "key": id.key}
    letter: int | None = connection.exec_driver_sql(_OPEN_LETTER, names).scalar_one()
    return letter


def report(connection: Connection, service: str, *, days: int = 7) -> Sequence[Row[Any]]:
    """Letters of `service` that were new, replayed and discarded in the last `days`, and those open now with reasons.

    Letters without a name have their own row.
    """
    outside, inside = archive.condition(connection, "outside"), archive.condition(connection, "inside")
    query = _REPORT.format(outside=outside, inside=inside)
    return connection.exec_driver_sql(query, {"service": service, "days": days}).all()


def services_of(connection: Connection, letters: Sequence[int]) -> dict[int, str | None]:
    """The application of each of these letters, those that there are."""
    rows = connection.exec_driver_sql(_SERVICES, {"ids": list(letters)})
    return {row.id: row.consumer_service for row in rows}


# ---------------------------------------------------------------- replay


def lock_record(connection: Connection, letter: int) -> None:
    """Lock the record of a letter's operation, if there is one: before the letter."""
    connection.exec_driver_sql(_LOCK_RECORD, {"letter": letter})


def replay(
    connection: Connection, letter: int, *, service: str | None = None, app: Celery | None = None
) -> OperationId:
    """Send a dead letter's message again under the same key, in the caller's transaction.

    `service`: the application that sends it if the letter names none.

    Two replays, or a replay and a late original, give one result: the letter is marked only while it is open, and
    the record is reopened only while it is failed. `app` is needed for letters whose operation was unknown when they
    were stored, such as those of an unknown task. Raises `OperationNotFound` and `ReplayRefused`.
    """
    lock_record(connection, letter)
    if (archived := archive.in_the_way(connection, letter)) is not None:
        raise ReplayRefused(f"dead letter {letter}: {archived}")
    row = connection.exec_driver_sql(_MARK_REPLAYED, {"id": letter}).one_or_none()
    if row is None:
        letter_now = show(connection, letter)
        newer = open_letter(connection, OperationId(letter_now.tenant, letter_now.task, letter_now.key))
        other = "" if newer is None else f"; dead letter {newer} of this operation is open"
        raise ReplayRefused(f"dead letter {letter}: already {letter_now.status}{other}")
    fields = row._asdict() | {"service": row.consumer_service or service, "external": EXTERNAL, "letter": letter}
    id, fingerprint, payload = letter_messages.sent_for(app, letter, row)
    fields |= {"tenant": id.tenant, "task": id.task, "key": id.key, "fingerprint": fingerprint}
    reopened = connection.exec_driver_sql(_REOPEN, fields).one_or_none()
    opened = None if reopened is None else reopened.generation
    fields["payload"] = payload or ("" if reopened is None else reopened.message)
    if not fields["payload"]:  # no message has asked for it: once it is open, its caller asks again
        if opened is None:
            raise ReplayRefused(f"dead letter {letter}: no message has asked for its operation; its caller can")
        return id
    if opened is None:
        record = connection.exec_driver_sql(_STATUS, fields).one_or_none()
        if record is not None:
            if (why := NEVER.get(SERVICE_MISMATCH if record.of_another else row.reason)) is not None:
                raise ReplayRefused(f"dead letter {letter}: {why}")
            # The operation may be released, waiting for exactly this message.
            if record.status != "released" or not _is_wanted(connection, row, fields):
                raise ReplayRefused(
                    f"dead letter {letter}: the operation is {record.status} in generation {record.generation}; "
                    "only one that failed in the letter's generation can be replayed"
                )
            opened = record.generation
    again = connection.exec_driver_sql(_DELIVER, fields | {"opened": opened or 1})
    refresh_lanes(connection, [(row.task, row.ordering_key) for row in again])
    return id


def _is_wanted(connection: Connection, row: Row[Any], fields: dict[str, Any]) -> bool:
    """Whether nothing but this message will deliver a released operation."""
    if row.reason in NOT_AN_END:
        return True
    # without a generation: the letter was stored without changing its operation
    return row.generation is None and not connection.exec_driver_sql(_WILL_BE_DELIVERED, fields).scalar_one()
