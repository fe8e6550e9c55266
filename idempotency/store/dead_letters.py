"""Dead letters: what has ended without success and waits for a person.

Stored in the transaction that makes the operation fail, so that neither exists without the other; what no worker can
run comes from the broker (`dead_letter_queue.py`). Replay keeps the key: one transaction marks the letter, opens a new
generation of the record and writes the outbox row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from sqlalchemy import Connection, Row

from ..errors import CallRefused, IdempotencyError, OperationNotFound
from ..wire import keys
from ..wire.delivery import Delivery, NamesItsOperation
from ..wire.keys import OperationId
from ..wire.message import Message
from .outbox import refresh_lanes
from .records import Claimed, FailedEnd

if TYPE_CHECKING:
    from celery import Celery

# Reasons of letters whose operation goes on, if only somebody delivers it.
NOT_AN_END = ("unpublishable", "unhandled")
# The most that one command may replay or discard: a mistaken filter should not send a million messages.
BULK_LIMIT = 10_000

GROUPS = {
    "service": "coalesce(consumer_service, '-')",
    "type": "coalesce(operation, task, '-')",
    "error": "reason",
    "queue": "coalesce(queue, '-')",
    "status": "status",
}
Group = Literal["service", "type", "error", "queue", "status"]

# first_error comes from the record, which knows all attempts.
_STORE = """
INSERT INTO idempotency.dead_letters
    (source, tenant, operation, key, generation, fingerprint, queue, task, consumer_service, reason, first_error,
     last_error, attempts, headers, payload)
SELECT 'operation', %(tenant)s, %(operation)s, %(key)s, %(generation)s, %(fingerprint)s, %(queue)s, %(operation)s,
       %(service)s, %(reason)s, coalesce((SELECT first_error FROM idempotency.records WHERE tenant = %(tenant)s
                             AND operation = %(operation)s AND key = %(key)s
                             AND fingerprint = %(fingerprint)s), %(last_error)s),
       %(last_error)s, %(attempts)s, %(headers)s, %(message)s
ON CONFLICT DO NOTHING
"""

# An outbox row knows the operation of its message, even where the message's task is not known here. One letter for
# each outbox row and for each message, however often the broker hands it out.
_STORE_MESSAGE = """
INSERT INTO idempotency.dead_letters
    (source, outbox_id, event_id, tenant, operation, key, generation, fingerprint, queue, task, consumer_service,
     reason, first_error, last_error, attempts, headers, payload, digest)
SELECT 'broker', o.id, %(event_id)s, coalesce(%(tenant)s, o.tenant), coalesce(%(operation)s, o.operation),
       coalesce(%(key)s, o.key), %(generation)s::int, coalesce(%(fingerprint)s, o.fingerprint), %(queue)s, %(task)s,
       %(service)s, %(reason)s, coalesce(%(first_error)s, %(last_error)s), %(last_error)s, %(attempts)s, %(headers)s,
       %(payload)s, %(digest)s
FROM (SELECT) one LEFT JOIN idempotency.outbox o ON o.event_id = %(event_id)s
ON CONFLICT DO NOTHING
RETURNING id
"""

# A letter from before its operation was known (an old worker had no such task, say) becomes the operation's: it is
# one message, and a second letter would leave the first one open for ever.
_ADOPT = """
UPDATE idempotency.dead_letters d
SET tenant = %(tenant)s, operation = %(operation)s, key = %(key)s, generation = %(generation)s,
    fingerprint = %(fingerprint)s, queue = %(queue)s, task = %(task)s, consumer_service = %(service)s,
    reason = %(reason)s, first_error = coalesce(d.first_error, %(first_error)s), last_error = %(last_error)s,
    attempts = %(attempts)s, headers = %(headers)s, payload = %(payload)s, alerted_at = NULL
WHERE d.id = (
    SELECT unnamed.id FROM idempotency.dead_letters unnamed
    WHERE unnamed.status = 'open' AND unnamed.generation IS NULL
      AND (unnamed.digest = %(digest)s
        OR unnamed.outbox_id = (SELECT o.id FROM idempotency.outbox o WHERE o.event_id = %(event_id)s))
    ORDER BY unnamed.id LIMIT 1 FOR UPDATE)
RETURNING d.id
"""

_FILTER = """
    (%(status)s::text IS NULL OR status = %(status)s)
    AND (%(operation)s::text IS NULL OR coalesce(operation, task) = %(operation)s)
    AND (%(reason)s::text IS NULL OR reason = %(reason)s)
    AND (%(service)s::text IS NULL OR consumer_service = %(service)s)
    AND (%(tenant)s::text IS NULL OR tenant = %(tenant)s)
    AND (%(ids)s::bigint[] IS NULL OR id = ANY(%(ids)s))
"""

_LIST = f"""
SELECT id, source, tenant, operation, key, generation, queue, task, consumer_service, reason, attempts, status,
       last_error, failed_at
FROM idempotency.dead_letters WHERE {_FILTER} ORDER BY id DESC LIMIT %(limit)s
"""

_IDS = f"SELECT id FROM idempotency.dead_letters WHERE {_FILTER} ORDER BY id LIMIT %(limit)s"

_GROUPED = """
SELECT {columns}, count(*) AS letters, min(failed_at) AS oldest, max(failed_at) AS newest
FROM idempotency.dead_letters WHERE {filter} GROUP BY {columns_only} ORDER BY letters DESC, {columns_only}
LIMIT %(limit)s
"""

_SHOW = "SELECT * FROM idempotency.dead_letters WHERE id = %(id)s"

_OPEN_LETTER = """
SELECT max(id) FROM idempotency.dead_letters
WHERE (tenant, operation, key) = (%(tenant)s, %(operation)s, %(key)s) AND status = 'open'
  AND reason <> 'fingerprint_mismatch' -- another request's: no replay of it brings this operation on
"""

_MARK_REPLAYED = """
UPDATE idempotency.dead_letters SET status = 'replayed', settled_at = clock_timestamp()
WHERE id = %(id)s AND status = 'open'
RETURNING outbox_id, tenant, operation, key, generation, fingerprint, queue, reason, payload
"""

# failed → released: the generation is the proof that a person asked for another run. Effects and steps are kept.
_REOPEN = """
UPDATE idempotency.records
SET status = 'released', generation = generation + 1, attempts = 0, spent_at = NULL, token = NULL, locked_by = NULL,
    available_at = clock_timestamp(), completed_at = NULL, expires_at = NULL, response_code = NULL,
    error = NULL, error_code = NULL, first_error = NULL,
    -- what a worker remembers to have been revoked was revoked before this replay
    revoked_generation = coalesce(revoked_generation, generation), opened_at = clock_timestamp(), updated_at = clock_timestamp()
WHERE tenant = %(tenant)s AND operation = %(operation)s AND key = %(key)s
  AND fingerprint = %(fingerprint)s AND status = 'failed' AND generation = %(generation)s
RETURNING generation
"""

# A row that could not be published goes again itself: in its old place, if it has an order.
_DELIVER = """
WITH again AS (
    UPDATE idempotency.outbox
    SET status = 'pending', origin = 'replay', generation = %(opened)s, attempts = 0, resends = 0, refusals = 0,
        first_refused_at = NULL, last_error = NULL, available_at = clock_timestamp(), taken = false,
        -- what has no operation of its own owes nothing but its publication
        alerted_at = NULL, settled_at = CASE WHEN operation = 'idempotency.external_event' THEN settled_at END
    WHERE id = %(outbox_id)s AND status = 'failed'
    RETURNING operation, ordering_key
), new AS (
    INSERT INTO idempotency.outbox (event_id, tenant, operation, key, fingerprint, message, queue, origin, generation)
    SELECT gen_random_uuid()::text, %(tenant)s, %(operation)s, %(key)s, %(fingerprint)s, %(payload)s,
           coalesce(%(queue)s, ''), 'replay', %(opened)s
    WHERE NOT EXISTS (SELECT FROM again)
)
SELECT operation, ordering_key FROM again WHERE ordering_key IS NOT NULL
"""

# A row whose message a dead-letter queue has brought is not sent again by itself.
_WILL_BE_DELIVERED = """
SELECT EXISTS (SELECT FROM idempotency.outbox
               WHERE tenant = %(tenant)s AND operation = %(operation)s AND key = %(key)s
                 AND fingerprint = %(fingerprint)s AND settled_at IS NULL
                 AND (status = 'pending' OR status = 'published' AND NOT taken))
"""

_STATUS = """
SELECT status, generation FROM idempotency.records
WHERE tenant = %(tenant)s AND operation = %(operation)s AND key = %(key)s FOR UPDATE
"""

_REPORT = """
SELECT coalesce(consumer_service, '-') AS service,
       count(*) FILTER (WHERE failed_at >= since) AS new,
       count(*) FILTER (WHERE status = 'replayed' AND settled_at >= since) AS replayed,
       count(*) FILTER (WHERE status = 'discarded' AND settled_at >= since) AS discarded,
       count(*) FILTER (WHERE status = 'open') AS open,
       min(failed_at) FILTER (WHERE status = 'open') AS oldest_open,
       (SELECT string_agg(reason || ' ' || letters, ', ' ORDER BY letters DESC, reason)
        FROM (SELECT reason, count(*) AS letters FROM idempotency.dead_letters r
              WHERE r.consumer_service IS NOT DISTINCT FROM d.consumer_service AND r.status = 'open'
              GROUP BY reason ORDER BY count(*) DESC, reason LIMIT 5) AS reasons) AS reasons
FROM idempotency.dead_letters d, (SELECT clock_timestamp() - make_interval(days => %(days)s) AS since) AS period
GROUP BY consumer_service HAVING count(*) FILTER (WHERE status = 'open' OR failed_at >= since OR settled_at >= since) > 0
ORDER BY 1
"""


class ReplayRefused(IdempotencyError):
    """This dead letter cannot be replayed; the message says why. Nothing was changed."""


class BulkRefused(IdempotencyError):
    """More dead letters than one command may change; the message names both numbers. Nothing was changed."""


# ---------------------------------------------------------------- stored


def store_failure(
    connection: Connection,
    id: OperationId,
    delivery: Delivery,
    claim: Claimed,
    *,
    reason: str,
    last_error: str,
    service: str | None = None,
) -> None:
    """Store the dead letter of a failing operation, in the failing transaction."""
    _store(connection, id, delivery, claim.generation, reason, last_error, claim.attempts, service)


def store_refusal(
    connection: Connection,
    id: OperationId,
    delivery: Delivery,
    *,
    generation: int,
    reason: str,
    error: str,
    service: str | None = None,
) -> None:
    """Store a delivery that was refused while the record under its key stays as it is (another fingerprint)."""
    _store(connection, id, delivery, generation, reason, error, 0, service)


@dataclass(frozen=True, slots=True)
class BrokerLetter:
    """A message that no worker will run, as it is stored; `payload` is a message's text (`Message.to_text`)."""

    event_id: str | None
    tenant: str | None
    operation: str | None
    key: str | None
    generation: int | None
    fingerprint: str | None
    queue: str | None
    task: str | None
    service: str
    reason: str
    first_error: str | None
    last_error: str
    attempts: int
    headers: str
    payload: str
    digest: str


def store_message(connection: Connection, letter: BrokerLetter) -> int | None:
    """Store a message of a dead-letter queue. Returns the letter's id; None when it is stored already."""
    id: int | None = connection.exec_driver_sql(_STORE_MESSAGE, asdict(letter)).scalar_one_or_none()
    return id


def store_end(connection: Connection, letter: BrokerLetter) -> int | None:
    """Store the message whose operation this transaction ends; its open letter, if it has one, becomes this one."""
    id: int | None = connection.exec_driver_sql(_ADOPT, asdict(letter)).scalar_one_or_none()
    return id if id is not None else store_message(connection, letter)


def _store(
    connection: Connection,
    id: OperationId,
    delivery: Delivery,
    generation: int,
    reason: str,
    last_error: str,
    attempts: int,
    service: str | None,
) -> None:
    connection.exec_driver_sql(
        _STORE,
        {
            "tenant": id.tenant,
            "operation": id.operation,
            "key": id.key,
            "generation": generation,
            "fingerprint": delivery.fingerprint,
            "queue": delivery.queue,
            "service": service,
            "reason": reason,
            "last_error": last_error,
            "attempts": attempts,
            "headers": headers_text({**headers_of(delivery.message), **delivery.headers}),
            "message": delivery.message,
        },
    )


def headers_of(message: str) -> dict[str, Any]:
    """The headers of a stored message; none of one that cannot be read, which is no reason to keep it from its letter."""
    try:
        return Message.from_text(message).headers
    except ValueError:
        return {}


_SAY_AGAIN = """
UPDATE idempotency.dead_letters SET reason = %(reason)s, last_error = %(error)s
WHERE tenant = %(tenant)s AND operation = %(operation)s AND key = %(key)s AND generation = %(generation)s
  AND status = 'open' AND source <> 'relay' AND reason <> 'fingerprint_mismatch' AND reason <> %(reason)s
"""


def say_again(connection: Connection, id: OperationId, generation: int, end: FailedEnd, *, reason: str) -> None:
    """Let the open letter of a failed operation say how it has ended now, so that no one replays it for its old reason."""
    connection.exec_driver_sql(
        _SAY_AGAIN,
        {
            "tenant": id.tenant,
            "operation": id.operation,
            "key": id.key,
            "generation": generation,
            "reason": reason,
            "error": end.error,
        },
    )


def headers_text(headers: Mapping[str, Any]) -> str:
    """The headers of a message as they are stored: JSON, with anything that JSON does not know as its type's name."""
    return json.dumps(headers, default=lambda value: f"<{type(value).__name__}>")


# ---------------------------------------------------------------- read


@dataclass(frozen=True, slots=True)
class Selection:
    """Which dead letters are meant; None means any. `operation` is the task's name."""

    status: str | None = "open"
    operation: str | None = None
    reason: str | None = None
    service: str | None = None
    tenant: str | None = None
    ids: Sequence[int] | None = None

    def parameters(self, limit: int) -> dict[str, Any]:
        ids = None if self.ids is None else list(self.ids)
        return asdict(self) | {"ids": ids, "limit": limit}


def list_letters(
    connection: Connection, selection: Selection | None = None, *, limit: int = 100, **filters: Any
) -> Sequence[Row[Any]]:
    """The newest dead letters of a selection, by default the open ones; filters as in `Selection`."""
    selection = selection or Selection(**filters)
    return connection.exec_driver_sql(_LIST, selection.parameters(limit)).all()


def group_letters(
    connection: Connection, selection: Selection, by: Sequence[Group], *, limit: int = 1000
) -> Sequence[Row[Any]]:
    """How many dead letters there are of each service, type, error, queue or status, the most first."""
    columns = ", ".join(f'{GROUPS[group]} AS "{group}"' for group in by)
    only = ", ".join(str(position) for position, _ in enumerate(by, start=1))
    query = _GROUPED.format(columns=columns, columns_only=only, filter=_FILTER)
    return connection.exec_driver_sql(query, selection.parameters(limit)).all()


def select_ids(connection: Connection, selection: Selection, *, limit: int) -> list[int]:
    """The ids of a selection, oldest first, for a bulk command. Raises `BulkRefused` if they are more than `limit`."""
    if limit > BULK_LIMIT:
        raise BulkRefused(f"--limit: at most {BULK_LIMIT} dead letters in one command, got {limit}")
    ids = list(connection.exec_driver_sql(_IDS, selection.parameters(limit + 1)).scalars())
    if len(ids) > limit:
        raise BulkRefused(
            f"more than {limit} dead letters match; choose fewer, or raise --limit (at most {BULK_LIMIT})"
        )
    return ids


def show(connection: Connection, letter: int) -> Row[Any]:
    """One dead letter, whole. Raises `OperationNotFound`."""
    row = connection.exec_driver_sql(_SHOW, {"id": letter}).one_or_none()
    if row is None:
        raise OperationNotFound(f"dead letter {letter}: not found")
    return row


def open_letter(connection: Connection, id: OperationId) -> int | None:
    """The newest dead letter of an operation that is open."""
    names = {"tenant": id.tenant, "operation": id.operation, "key": id.key}
    letter: int | None = connection.exec_driver_sql(_OPEN_LETTER, names).scalar_one()
    return letter


def report(connection: Connection, *, days: int = 7) -> Sequence[Row[Any]]:
    """Per service: dead letters new, replayed and discarded within so many days, and what is open now and why."""
    return connection.exec_driver_sql(_REPORT, {"days": days}).all()


# ---------------------------------------------------------------- changed


def replay(connection: Connection, letter: int, *, app: Celery | None = None) -> OperationId:
    """Send a dead letter again under the same key: one transaction, which the caller commits.

    Two replays, or a replay and a late original, give one result: the letter is marked only while it is open, and
    the record is reopened only while it is failed. `app` is needed for messages that no worker could name the
    operation of when they came (an unknown task, say). Raises `OperationNotFound` and `ReplayRefused`.
    """
    row = connection.exec_driver_sql(_MARK_REPLAYED, {"id": letter}).one_or_none()
    if row is None:
        settled = show(connection, letter)
        newer = open_letter(connection, OperationId(settled.tenant, settled.operation, settled.key))
        other = "" if newer is None else f"; dead letter {newer} of this operation is open"
        raise ReplayRefused(f"dead letter {letter}: already {settled.status}{other}")
    fields = row._asdict()
    if row.fingerprint is None:
        id, fingerprint = _named(app, letter, row)
        fields |= {"tenant": id.tenant, "operation": id.operation, "key": id.key, "fingerprint": fingerprint}
    opened: int | None = connection.exec_driver_sql(_REOPEN, fields).scalar_one_or_none()
    if opened is None:
        record = connection.exec_driver_sql(_STATUS, fields).one_or_none()
        if record is not None:
            # A released operation that waits for a delivery that could not be published has not failed.
            if row.reason == "fingerprint_mismatch":
                raise ReplayRefused(
                    f"dead letter {letter}: its key belongs to a call with other arguments, so it can never run; discard it"
                )
            if record.status != "released" or not _is_wanted(connection, row, fields):
                raise ReplayRefused(
                    f"dead letter {letter}: the operation is {record.status} in generation {record.generation}; "
                    "only one that failed in the letter's generation can be replayed"
                )
            opened = record.generation
    again = connection.exec_driver_sql(_DELIVER, fields | {"opened": opened or 1})
    refresh_lanes(connection, [(row.operation, row.ordering_key) for row in again])
    return OperationId(fields["tenant"], fields["operation"], fields["key"])


def _is_wanted(connection: Connection, row: Row[Any], fields: dict[str, Any]) -> bool:
    """Whether a released operation needs this very message, because nothing else will deliver it."""
    if row.reason in NOT_AN_END:
        return True
    # of no generation: it was stored without its operation being touched
    return row.generation is None and not connection.exec_driver_sql(_WILL_BE_DELIVERED, fields).scalar_one()


def _named(app: Celery | None, letter: int, row: Row[Any]) -> tuple[OperationId, str]:
    """The operation that a stored message names, as this application knows its task today."""
    message = Message.from_text(row.payload)
    name = message.headers.get("task")
    task = None if app is None or not isinstance(name, str) else app.tasks.get(name)
    if task is None:
        raise ReplayRefused(f"dead letter {letter}: {row.reason}, and no task of this application can run it")
    if not isinstance(task, NamesItsOperation):
        raise ReplayRefused(f"dead letter {letter}: {task.name} is not an idempotent task; it could run twice")
    try:
        args, kwargs, _ = json.loads(message.body)
        named = task.named_by(args, kwargs, message.headers)
        fingerprint = keys.fingerprint(named.arguments)
    except Exception as error:  # the application's own key function, too
        why = str(error) if isinstance(error, CallRefused) else f"not a task message ({type(error).__name__})"
        raise ReplayRefused(f"dead letter {letter}: {row.reason}, {why}") from None
    return named.id, fingerprint
