"""Messages that no worker could run: put back for a while, then their operation fails; copies are only counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection

from ..wire import keys
from ..wire.keys import OperationId
from .answers import Busy, Changed, Completed, Failed, Foreign, Mismatch, why_not
from .ends import FailedEnd
from .inserting import InsertOrUpdate, insert_or_update
from .record import KNOWN, OWN, ROW, SETTINGS, idle_ms, is_open, is_scheduled, named, unsettled
from .statements import execute

# A row `o` of the outbox that delivers the operation.
_DELIVERS = f"{ROW} AND {OWN} AND fingerprint = ANY(%(fingerprints)s) AND {unsettled('o')}"
# One of another message, which no worker has had, or the operation would have begun since it was due. So that waits in its
# queue, or is lost: then resend sends it again, unless another row covers it (`taken`).
_IS_UNREAD = f"""{_DELIVERS} AND status = 'published' AND NOT taken AND message_id IS DISTINCT FROM %(message_id)s
        AND published_at >= coalesce(
            (SELECT available_at FROM idempotency.records WHERE {ROW} AND status = 'released'), '-infinity')
        AND NOT EXISTS (SELECT FROM idempotency.dead_letters d WHERE d.outbox_id = o.id AND {is_open("d")})"""


def _elsewhere(besides: str = "", unread: str = _IS_UNREAD) -> str:
    """SQL: anything other than this message will deliver the operation.

    Resend would send the newest row of the newest generation; this message is only a copy if that is another row, or a row that
    is about to be published again. (A row that a relay has reserved right now, itself or by its lane, is this message: it came
    back before its confirm was noted.) It is one, too, if another row is `unread`.
    """
    rows = f"idempotency.outbox o WHERE {_DELIVERS} {besides}"
    return f"""(EXISTS (
    SELECT FROM (
        SELECT message_id, status, coalesce(relayed_until, (
            SELECT l.relayed_until FROM idempotency.lanes l
            WHERE (l.task, l.ordering_key) = (o.task, o.ordering_key))) AS relayed_until
        FROM {rows} AND status <> 'failed' ORDER BY generation DESC, id DESC LIMIT 1) AS next_delivery
    WHERE message_id IS DISTINCT FROM %(message_id)s
       OR status = 'pending' AND (relayed_until IS NULL OR relayed_until < clock_timestamp()))
    OR EXISTS (
        SELECT FROM {rows} AND status NOT IN ('published', 'failed') AND message_id IS DISTINCT FROM %(message_id)s)
    OR EXISTS (SELECT FROM idempotency.outbox o WHERE {unread}))"""


# A started operation is left to its holder or to recover, whatever its lease. A released one is ended only if it has not
# changed since the statement's snapshot: a later release has written a delivery that the snapshot does not show.
_ENDS = f"""r.status = 'released' AND (%(generation)s::int IS NULL OR r.generation = %(generation)s::int)
      AND r.fence = (SELECT fence FROM idempotency.records WHERE {ROW} AND status = 'released')"""

# The fence changes, so that late writes of a former holder match nothing.
_GIVEN_UP = InsertOrUpdate(
    {
        "tenant": "%(tenant)s",
        "task": "%(task)s",
        "key": "%(key)s",
        "status": "'failed'",
        "fence": "pg_catalog.nextval('idempotency.fence')",
        "attempts": "0",
        "fingerprint": "%(fingerprint)s",
        "message": "%(message)s",
        "queue": "%(queue)s",
        "error": "%(error)s",
        "first_error": "%(error)s",
        "error_code": "%(code)s",
        "response_code": "%(response_code)s",
        "completed_at": "clock_timestamp()",
        "expires_at": "clock_timestamp() + make_interval(secs => %(retention)s)",
        "service": "%(service)s",
    },
    source="settings, deliveries",
    given="NOT elsewhere",
    changes="""
        status = 'failed', fence = excluded.fence, token = NULL, locked_until = NULL, locked_by = NULL,
        available_at = NULL, error = excluded.error, first_error = coalesce(r.first_error, excluded.error),
        -- `conclude` decides how it ended, in the same transaction
        error_code = CASE
            WHEN pg_catalog.jsonb_path_exists(r.effects, '$.* ? (@.state == "begun")') THEN 'effect_unknown'
            WHEN pg_catalog.jsonb_path_exists(r.effects, '$.* ? (@.kind == "effect" && @.state == "done")') THEN 'unfinished'
            ELSE excluded.error_code END,
        response_code = excluded.response_code, completed_at = clock_timestamp(), expires_at = excluded.expires_at,
        updated_at = clock_timestamp()""",
    condition=f"""r.fingerprint = ANY(%(fingerprints)s) AND (r.service = %(service)s) IS NOT FALSE
      AND {_ENDS}""",
    returning="generation, attempts, first_error, fence, effects, fingerprint",
)
_DELIVERIES = f"""{SETTINGS}, deliveries AS MATERIALIZED (
    SELECT {_elsewhere()} AS elsewhere
), """
_ENDED = """
SELECT 'given_up' AS answer, generation, attempts, first_error, fence, effects, NULL AS result, NULL AS error,
       fingerprint, NULL AS service
FROM given_up
"""
_OR_WHY_NOT = f"""
UNION ALL
SELECT CASE
           WHEN service <> %(service)s THEN 'foreign'
           WHEN fingerprint <> ALL(%(fingerprints)s) THEN 'mismatch'
           WHEN status IN ('completed', 'failed') THEN status
           WHEN status = 'started' OR elsewhere THEN 'busy'
           WHEN generation <> %(generation)s::int THEN 'busy'
           ELSE 'changed'
       END, generation, attempts, first_error, NULL, NULL, result, error, fingerprint, service
FROM deliveries LEFT JOIN idempotency.records ON {ROW}
WHERE NOT EXISTS (SELECT FROM given_up)
"""
_GIVE_UP, _INSERT, _CHANGE = _GIVEN_UP.statements("given_up", _ENDED, _OR_WHY_NOT, before=_DELIVERIES)

# A copy is acknowledged only after something was flushed, because the record that makes it a copy may not be on disk yet. Its
# own row is settled if it would hide what will deliver the operation: a row of a later generation, or one that no worker has
# had. That one is written to, so that a pass of resend whose snapshot has both rows does not leave it to this one (`lost.py`).
_COUNT_COPY = f"""
WITH counted AS (
    UPDATE idempotency.records SET duplicates = duplicates + 1, updated_at = clock_timestamp()
    WHERE {ROW} AND {OWN} AND fingerprint = ANY(%(fingerprints)s) AND status IN ('started', 'released')
), unread AS (
    UPDATE idempotency.outbox o SET taken = false WHERE {_IS_UNREAD} RETURNING 1
)
UPDATE idempotency.outbox copy SET settled_at = clock_timestamp()
WHERE message_id = %(message_id)s AND {unsettled("copy")} AND status = 'published'
  AND (EXISTS (SELECT FROM unread)
       OR EXISTS (SELECT FROM idempotency.outbox o
                  WHERE {_DELIVERS} AND status <> 'failed' AND generation > copy.generation))
"""

# A call that is enqueued for later is another one: this one comes back before.
_AT_ONCE = f"AND NOT {is_scheduled('o')}"
# Seconds until a message comes back that was refused so often before. The grace is the sum of these pauses: what it has
# waited for in a backlog, between two deploys perhaps, does not count.
_PAUSE = "least(%(pause)s * pg_catalog.power(2, least({before}, 20)), %(cap)s)"
# A valid message that no worker could run, during a deploy perhaps. It comes back later by its own row or by a new one, so that
# it is never only in the broker. By a new one if its row has an ordering key, or it would block its lane. Another row that is
# unread makes it no copy here: it comes back, and its own callbacks follow it.
_PUT_BACK = f"""
WITH own AS (
    SELECT id FROM idempotency.outbox
    WHERE message_id = %(message_id)s AND {unsettled()} AND status <> 'failed' AND ordering_key IS NULL
), free AS (
    SELECT WHERE NOT {_elsewhere(_AT_ONCE, unread="false")}
      AND NOT EXISTS (SELECT FROM idempotency.records WHERE {ROW} AND {OWN}
                      AND fingerprint = ANY(%(fingerprints)s)
                      AND (status <> 'released' OR generation <> %(generation)s::int))
), in_time AS (
    SELECT FROM free WHERE NOT EXISTS (
        SELECT FROM idempotency.records
        WHERE {ROW} AND (service <> %(service)s OR fingerprint <> ALL(%(fingerprints)s)
                         AND split_part(fingerprint, ':', 1) = ANY(%(rules)s)))
), again AS (
    UPDATE idempotency.outbox o
    -- it reached a worker, so resends are counted from 0 again
    SET status = 'pending', origin = 'retry', relayed_until = NULL, taken = false, refusals = refusals + 1, resends = 0,
        first_refused_at = coalesce(first_refused_at, clock_timestamp()), last_error = %(error)s,
        available_at = clock_timestamp() + make_interval(secs => {_PAUSE.format(before="refusals")})
    FROM own, in_time
    WHERE o.id = own.id AND {unsettled("o")} AND o.status <> 'failed'
      AND coalesce((SELECT sum({_PAUSE.format(before="n")}) FROM generate_series(0, refusals - 1) n), 0) < %(grace)s
    RETURNING 1
), first AS (
    INSERT INTO idempotency.outbox
        (message_id, tenant, task, key, fingerprint, message, queue, origin, available_at, generation, refusals,
         first_refused_at, service, last_error)
    SELECT gen_random_uuid()::text, %(tenant)s, %(task)s, %(key)s, %(fingerprint)s, %(message)s, %(queue)s,
           'retry', clock_timestamp() + make_interval(secs => %(pause)s), coalesce(%(generation)s::int, 1), 1,
           clock_timestamp(), %(service)s, %(error)s
    FROM in_time WHERE NOT EXISTS (SELECT FROM own)
    RETURNING 1
)
SELECT CASE WHEN EXISTS (SELECT FROM again) OR EXISTS (SELECT FROM first) THEN 'put_back'
            WHEN EXISTS (SELECT FROM free) THEN 'over'
            ELSE 'copy' END AS answer
"""


@dataclass(frozen=True, slots=True)
class GivenUp:
    """Failed, because no worker will run its message. Its dead letter and `conclude` go into the same transaction."""

    generation: int
    attempts: int
    first_error: str
    fence: int
    effects: dict[str, dict[str, Any]]
    fingerprint: str


class PutBack(StrEnum):
    """What happened to a valid message that no worker could run."""

    PUT_BACK = "put_back"  # it will come back
    OVER = "over"  # its grace is over
    COPY = "copy"  # its operation has ended, or something else will deliver it


_IS_KNOWN = f"SELECT {KNOWN}"


@dataclass(frozen=True, slots=True)
class UndeliveredMessage:
    """A message that no worker could run, with the operation it is for, its outbox row and its generation."""

    id: OperationId
    service: str
    fingerprint: str
    also: Sequence[str]
    message_id: str | None
    generation: int | None
    message: str
    queue: str

    def parameters(self) -> dict[str, Any]:
        return named(self.id) | {
            "service": self.service,
            "fingerprint": self.fingerprint,
            "fingerprints": [self.fingerprint, *self.also],
            "message_id": self.message_id,
            "generation": self.generation,
            "message": self.message,
            "queue": self.queue,
        }


def is_known(connection: Connection, id: OperationId) -> bool:
    """Whether an operation has a record, or a message that is not settled."""
    return bool(execute(connection, _IS_KNOWN, named(id)).fetchone()[0])


def put_back(
    connection: Connection, dead: UndeliveredMessage, *, error: str, pause: float, cap: float, grace: float
) -> PutBack:
    """Send a message again after a pause, by its own outbox row or a new one, until its pauses make `grace` seconds.

    The pause doubles each time from `pause` up to `cap` seconds. `error`: why it was refused, as `error_text` writes it.
    """
    # a record whose fingerprint has none of these rules may belong to the same request
    rules = [keys.fingerprint_version(each) for each in (dead.fingerprint, *dead.also)]
    parameters = {"error": error, "pause": pause, "cap": cap, "grace": grace, "rules": rules}
    return PutBack(execute(connection, _PUT_BACK, dead.parameters() | parameters).fetchone().answer)


def count_copy(connection: Connection, dead: UndeliveredMessage) -> None:
    """Count a message that is only a copy: something else will deliver its operation."""
    execute(connection, _COUNT_COPY, dead.parameters())


def give_up(
    connection: Connection,
    dead: UndeliveredMessage,
    *,
    end: FailedEnd,
    retention: float,
    lease: float,
) -> GivenUp | Completed | Failed | Mismatch | Foreign | Busy | Changed:
    """Fail an operation that has no record or is released, if nothing else will deliver it; otherwise return why not.

    `Busy`: it is started, or something else will deliver it. Raises `UnknownVersion`, as `claim` does.
    """
    row = insert_or_update(
        connection,
        _GIVE_UP,
        (_INSERT, _CHANGE),
        dead.parameters()
        | {
            "retention": retention,
            "idle_ms": idle_ms(lease),
        }
        | end.parameters(),
    )
    if row is None:
        return Changed()
    if row.answer == "given_up":
        return GivenUp(row.generation, row.attempts, row.first_error, row.fence, row.effects, row.fingerprint)
    return why_not(row)
