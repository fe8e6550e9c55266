"""The statements of resend: settle the rows of ended operations, and find those whose message is lost.

An outbox row stays unsettled until its operation has ended. `relay/resend.py` decides when a message must have left its
queue; what follows from that for its row is decided here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row
from sqlalchemy.exc import DBAPIError

from ..reasons import FINGERPRINT_MISMATCH, SERVICE_MISMATCH
from . import sweeps, unpublished
from .answers import error_text
from .letters import insert_for_rows_sql
from .markers import EPOCH
from .outbox import refresh_lanes
from .record import is_scheduled, unsettled
from .sweeps import RECORD_ID, THIS_RECORD, Sweep

# Rows per statement, for short transactions.
BATCH = 1000
# Statements of each kind per pass, which the relay waits for; the next pass continues.
BATCHES = 10
# The longest pause between two resends of a row, in seconds. RabbitMQ leaves a delivery unacknowledged for 30 minutes at
# most, so after this a row is lost even if some consumer does not report what it holds.
RESEND_CAP = 3600.0
SETTLING = 2.0  # seconds of a pass, in which all that ends between two passes has to be settled; the relay waits
# How far a pass goes back before the last settled end, in seconds, since some ends commit later than their time says.
# Any that are still missed are found when their message has left its queue.
OVERLAP = 10.0

# Below, `r` is an outbox row and `p` the record of its operation.
# Fingerprints by different rules cannot be compared without the arguments; the worker that gets the message does it.
_OTHER_RULE = "split_part(p.fingerprint, ':', 1) <> split_part(r.fingerprint, ':', 1)"
_ITS_RECORD = "(p.tenant, p.task, p.key) = (r.tenant, r.task, r.key)"
_FOREIGN = "(p.service <> r.service) IS TRUE"
_ENDED = f"""p.status IN ('completed', 'failed') AND NOT {_FOREIGN}
      AND (p.fingerprint = r.fingerprint OR {_OTHER_RULE})"""
_UNTIL_RESENT = "make_interval(secs => least(%(after)s * pg_catalog.power(2, least({row}.resends, 20)), %(cap)s))"
_REFUSED = f"({_FOREIGN} OR p.fingerprint <> r.fingerprint AND NOT {_OTHER_RULE})"

# A row is settled by an ended record with the same fingerprint, and not by another request's. Any application may note that.
_SETTLES = f"idempotency.outbox r ON {_ITS_RECORD} WHERE r.status = 'published' AND {unsettled('r')} AND {_ENDED}"
SETTLE = Sweep(
    "settle",
    table="records",
    columns="r.status, r.fingerprint, r.service, r.completed_at",
    # Of what has ended, only what has such a row: however much has ended within the overlap, a pass gets beyond it.
    due=f"""r.completed_at IS NOT NULL AND r.completed_at > %(since)s AND (
        SELECT true FROM (SELECT r.tenant, r.task, r.key, r.status, r.fingerprint, r.service) p JOIN {_SETTLES} LIMIT 1)""",
    order="r.completed_at",
    one=THIS_RECORD,
    id=RECORD_ID,
    then=f"""
, rows AS MATERIALIZED (
    SELECT r.id FROM due p JOIN {_SETTLES}
    FOR UPDATE OF r SKIP LOCKED
), settled AS (
    UPDATE idempotency.outbox o SET settled_at = clock_timestamp() FROM rows WHERE o.id = rows.id RETURNING 1
)
SELECT (SELECT count(*) FROM settled) AS settled, count(*) AS ended, max(completed_at) AS until,
       (SELECT max(completed_at) FROM idempotency.records) AS newest FROM due""",
)
# Without locking the records, which would write to each.
_SETTLE = f"WITH due AS MATERIALIZED ({SETTLE.unlocked}) {SETTLE.then}"

_SINCE = "SELECT until - make_interval(secs => %(overlap)s) FROM idempotency.settled"
_MOVE = "UPDATE idempotency.settled SET until = %(until)s WHERE until < %(until)s"

# The oldest row of each queue, by skipping through the index. Queues belong to one application: if it does not declare
# one, perhaps since a deploy, its oldest row tells.
_QUEUES = """
WITH RECURSIVE oldest AS (
    (SELECT queue, published_at, service FROM idempotency.outbox
     WHERE settled_at IS NULL AND NOT taken AND queue > '' ORDER BY queue, published_at LIMIT 1)
    UNION ALL
    SELECT following.queue, following.published_at, following.service FROM oldest CROSS JOIN LATERAL (
        SELECT queue, published_at, service FROM idempotency.outbox
        WHERE settled_at IS NULL AND NOT taken AND queue > oldest.queue ORDER BY queue, published_at LIMIT 1
    ) following
)
SELECT queue FROM oldest
WHERE (queue = ANY(%(queues)s) OR service = %(service)s)
  AND published_at < clock_timestamp() - make_interval(secs => %(after)s)
"""

# A `taken` row is covered by a started record with a message, a newer row of its operation, unless that is a call for later, or
# its own dead letter. It is not examined again unless a discard returns it. (A marker's `taken_at` is unrelated.) A started
# record is left to recover; a released operation that is due has its next delivery in the newest row of its newest generation.
JUDGE = Sweep(
    "resend",
    table="outbox",
    columns="r.id, r.fingerprint, r.service, r.generation, r.message, r.published_at, r.resends, r.ctid AS version",
    due=f"""r.queue = %(queue)s AND r.service = %(service)s AND r.settled_at IS NULL AND NOT r.taken
      AND r.status = 'published' AND r.published_at < %(until)s AND r.published_at >= %(past)s
      AND (r.published_at, r.id) > (%(past)s, %(past_id)s)
      -- however many wait for their next resend, they hide none of those behind them
      AND r.published_at < (SELECT clock_timestamp()) - {_UNTIL_RESENT.format(row="r")}""",
    order="r.published_at, r.id",
    one="r.id = %(id)s",
    id="r.id::text",
    then=f"""
, judged AS MATERIALIZED (
    SELECT r.id, r.published_at, r.message, CASE
        WHEN {_REFUSED} THEN 'refused'
        WHEN {_ENDED} THEN 'ended'
        WHEN p.status = 'started' AND p.message <> ''
          OR EXISTS (SELECT FROM idempotency.outbox newer
                     WHERE (newer.tenant, newer.task, newer.key, newer.fingerprint)
                         = (r.tenant, r.task, r.key, r.fingerprint)
                       AND (newer.service = r.service) IS NOT FALSE
                       AND (newer.generation, newer.id) > (r.generation, r.id)
                       AND {unsettled("newer")} AND newer.status <> 'failed'
                       AND NOT ({is_scheduled("newer")} AND newer.generation = r.generation))
          OR (SELECT true FROM idempotency.dead_letters d WHERE d.outbox_id = r.id AND d.status = 'open') THEN 'taken'
        WHEN p.status = 'started' OR p.available_at > clock_timestamp() THEN 'early'
        ELSE 'lost'
    END AS verdict
    -- A row that was returned after this statement's snapshot is left to the next one: this one still sees why it was
    -- taken.
    FROM due r JOIN idempotency.outbox seen ON (seen.id, seen.ctid) = (r.id, r.version)
    LEFT JOIN idempotency.records p ON {_ITS_RECORD}
), settled AS (
    UPDATE idempotency.outbox o SET settled_at = clock_timestamp()
    FROM judged j WHERE o.id = j.id AND j.verdict = 'ended'
), taken AS (
    UPDATE idempotency.outbox o SET taken = true FROM judged j WHERE o.id = j.id AND j.verdict = 'taken'
)
SELECT id, published_at, verdict, CASE WHEN verdict = 'lost' THEN message END AS message,
       published_at < clock_timestamp() - make_interval(secs => %(cap)s) AS old
FROM judged ORDER BY published_at, id""",
)
_JUDGE = f"WITH due AS MATERIALIZED ({JUDGE.find}) {JUDGE.then}"

# The key was used by another request, so this one can never run, and a person has to know.
_OF_ANOTHER = f"(SELECT p.generation FROM idempotency.records p WHERE {_ITS_RECORD} AND {_REFUSED} LIMIT 1)"
_BY_ANOTHER = f"(SELECT {_FOREIGN} FROM idempotency.records p WHERE {_ITS_RECORD} LIMIT 1)"
_REFUSAL = insert_for_rows_sql(
    "refused",
    reason=f"CASE WHEN by_another THEN '{SERVICE_MISMATCH}' ELSE '{FINGERPRINT_MISMATCH}' END",
    error="CASE WHEN by_another THEN %(other_service)s ELSE %(other_request)s END",
    attempts="0",
    generation="of_record",
)
REFUSE = Sweep(
    "refuse",
    table="outbox",
    columns=f"r.id, {_OF_ANOTHER} AS of_record, {_BY_ANOTHER} AS by_another",
    due=f"r.id = ANY(%(ids)s) AND r.status = 'published' AND {unsettled('r')} AND {_OF_ANOTHER} IS NOT NULL",
    order="r.id",
    one="r.id = %(id)s",
    id="r.id::text",
    then=f"""
, refused AS (
    UPDATE idempotency.outbox o SET settled_at = clock_timestamp() FROM due WHERE o.id = due.id
    RETURNING o.*, due.of_record, due.by_another
), letters AS (
    {_REFUSAL}
)
SELECT (SELECT count(*) FROM refused)""",
)

# Not if it has started since it was examined, if another pass has resent it, or a person has edited its letter.
_RESEND = f"""
UPDATE idempotency.outbox o SET status = 'pending', origin = 'resend', resends = resends + 1,
    available_at = clock_timestamp(), relayed_until = NULL
FROM unnest(%(ids)s::bigint[], %(published)s::timestamptz[]) lost(id, published_at)
WHERE (o.id, o.published_at) = (lost.id, lost.published_at) AND status = 'published' AND {unsettled("o")} AND NOT taken
  AND NOT EXISTS (SELECT FROM idempotency.records r
                  WHERE (r.tenant, r.task, r.key) = (o.tenant, o.task, o.key)
                    AND (r.status <> 'released' OR r.available_at > clock_timestamp()))
RETURNING task, ordering_key
"""
_NAMED = """
SELECT o.id, o.id::text AS row_id, tenant, task, key, o.published_at
FROM idempotency.outbox o JOIN unnest(%(ids)s::bigint[], %(published)s::timestamptz[]) lost(id, published_at)
    ON (o.id, o.published_at) = (lost.id, lost.published_at) ORDER BY o.id
"""

# What should be in a queue: published rows whose operation has no record, or is released and due.
_WAITING = f"""
WITH newest AS MATERIALIZED (
    SELECT DISTINCT ON (o.tenant, o.task, o.key, o.fingerprint)
           o.id, o.tenant, o.task, o.key, o.fingerprint, o.queue, o.published_at, o.resends, o.status
    FROM idempotency.outbox o
    WHERE o.service = %(service)s AND o.settled_at IS NULL AND NOT o.taken AND o.status <> 'failed' AND NOT {is_scheduled("o")}
    ORDER BY o.tenant, o.task, o.key, o.fingerprint, o.generation DESC, o.id DESC
)
SELECT n.id, n.task, n.queue, n.published_at,
       n.published_at < clock_timestamp() - {_UNTIL_RESENT.format(row="n")} AS overdue
FROM newest n LEFT JOIN idempotency.records r ON (r.tenant, r.task, r.key) = (n.tenant, n.task, n.key)
WHERE n.status = 'published'
  AND (r.status IS NULL OR r.status = 'released' AND r.available_at <= clock_timestamp())
  AND NOT EXISTS (SELECT FROM idempotency.dead_letters d
                  WHERE d.outbox_id = n.id AND d.status = 'open')
ORDER BY n.published_at
"""

# If nothing shows which messages have left their queue, every waiting row has to be read anyway.
_WAITS = "r.status = 'published' AND r.settled_at IS NULL AND NOT r.taken AND r.service = %(service)s"
REFUSE_ANY = replace(
    REFUSE,
    due=f"""{_WAITS} AND r.published_at < (SELECT clock_timestamp() - make_interval(secs => %(after)s))
      AND {_OF_ANOTHER} IS NOT NULL""",
    order="r.queue, r.published_at",
)
SETTLE_ANY = Sweep(
    "settle_rows",
    table="outbox",
    columns="r.id",
    due=f"{_WAITS} AND (SELECT true FROM idempotency.records p WHERE {_ITS_RECORD} AND {_ENDED} LIMIT 1)",
    order="r.queue, r.published_at",
    one="r.id = %(id)s",
    id="r.id::text",
    then="""
, settled AS (
    UPDATE idempotency.outbox o SET settled_at = clock_timestamp() FROM due WHERE o.id = due.id RETURNING 1
)
SELECT (SELECT count(*) FROM settled)""",
)

_OTHER_REQUEST = error_text(FINGERPRINT_MISMATCH, "this idempotency key was used with other arguments")
_OTHER_SERVICE = error_text(SERVICE_MISMATCH, "this idempotency key is used by another application")


def settle(connection: Connection) -> int:
    """Settle the rows of operations that have ended since the last pass; returns how many."""
    since: datetime = connection.exec_driver_sql(_SINCE, {"overlap": OVERLAP}).scalar_one()
    total, began = unpublished.give_up_refused(connection), time.monotonic()
    while True:
        fields = {"since": since, "batch": BATCH}
        try:
            done = connection.exec_driver_sql(_SETTLE, fields).one()
        except DBAPIError as error:
            if not sweeps.is_row_error(error):
                raise
            found = _one_by_one(connection, SETTLE, fields)
            return total + sum(int(row.settled) for row in found)  # the next pass continues
        total += int(done.settled)
        is_last = done.ended < BATCH
        connection.exec_driver_sql(_MOVE, {"until": done.newest if is_last else done.until})
        if is_last or time.monotonic() - began > SETTLING:
            return total
        since = done.until


def _one_by_one(connection: Connection, sweep: Sweep, fields: dict[str, Any]) -> list[Row[Any]]:
    """Run the sweep row by row after Postgres refused a whole batch; returns all result rows."""
    found: list[Row[Any]] = []

    def handle(row: Row[Any]) -> int:
        found.extend(connection.exec_driver_sql(sweep.single, fields | sweeps.names(row)))
        return 1

    sweeps.one_by_one(connection, sweep.name, connection.exec_driver_sql(sweep.find, fields).all(), handle)
    return found


# ---------------------------------------------------------------- first-in, first-out queues


def queues(connection: Connection, service: str, own: Iterable[str], *, after: float) -> Sequence[str]:
    """Queues of `service`, the `own` ones among them, whose oldest unsettled row was published `after` seconds ago."""
    fields = {"service": service, "queues": list(own), "after": after}
    return connection.exec_driver_sql(_QUEUES, fields).scalars().all()


def judge(
    connection: Connection, queue: str, until: datetime, after: float, service: str
) -> tuple[list[Row[Any]], int]:
    """Examine rows published before `until`, which have left their queue. Returns the lost ones, and how many have ended.

    Only rows of `service`. Those whose key was used by another request get a dead letter.
    """
    lost: list[Row[Any]] = []
    ended = 0
    place: dict[str, Any] = {"past": EPOCH, "past_id": 0}
    for _ in range(BATCHES):
        parameters = {"service": service, "queue": queue, "until": until, "after": after} | place
        parameters |= {"cap": RESEND_CAP, "batch": BATCH}
        with sweeps.sweep_settings(connection):
            try:
                rows = connection.exec_driver_sql(_JUDGE, parameters).all()
            except DBAPIError as error:
                if not sweeps.is_row_error(error):
                    raise
                rows = _one_by_one(connection, JUDGE, parameters)
        lost += [row for row in rows if row.verdict == "lost"]
        ended += sum(row.verdict == "ended" for row in rows)
        if refused := [row.id for row in rows if row.verdict == "refused"]:
            _refuse(connection, REFUSE, service, ids=refused)
        if len(rows) < BATCH:
            break
        place = {"past": rows[-1].published_at, "past_id": rows[-1].id}
    return lost, ended


# ---------------------------------------------------------------- other queues, by counting


def settle_any(connection: Connection, service: str) -> int:
    """Settle the published rows of ended operations of `service`, whenever they ended; returns how many."""
    done, _ = sweeps.run(connection, SETTLE_ANY, {"service": service}, limit=BATCHES * BATCH)
    return done


def refuse_any(connection: Connection, service: str, *, after: float) -> None:
    """Store a dead letter for each row of `service` older than `after` seconds whose key was used by another request."""
    _refuse(connection, REFUSE_ANY, service, after=after)


def waiting(connection: Connection, service: str, *, after: float) -> Sequence[Row[Any]]:
    """The newest published row of each operation of `service` that has not started or is due.

    `overdue`: it was published more than `after` seconds ago; doubled for each resend.
    """
    return connection.exec_driver_sql(_WAITING, {"service": service, "after": after, "cap": RESEND_CAP}).all()


# ---------------------------------------------------------------- both


def send_again(connection: Connection, lost: Sequence[Row[Any]]) -> int:
    """Return rows to the relay unless they have changed; returns how many. Call it in one transaction."""
    rows = connection.exec_driver_sql(_RESEND, _judged(lost)).all()
    refresh_lanes(connection, [(row.task, row.ordering_key) for row in rows if row.ordering_key])
    return len(rows)


def one_by_one(connection: Connection, lost: Sequence[Row[Any]], handle: Callable[[Row[Any]], int]) -> int:
    """Handle rows one by one after Postgres refused them together; a row that is refused again is set aside."""
    rows = connection.exec_driver_sql(_NAMED, _judged(lost)).all()
    done, _ = sweeps.one_by_one(connection, JUDGE.name, rows, handle)
    return done


def _judged(lost: Sequence[Row[Any]]) -> dict[str, Any]:
    return {"ids": [row.id for row in lost], "published": [row.published_at for row in lost]}


def _refuse(connection: Connection, sweep: Sweep, service: str, **which: Any) -> None:
    fields = {"service": service, "other_request": _OTHER_REQUEST, "other_service": _OTHER_SERVICE}
    sweeps.run(connection, sweep, which | fields, limit=BATCHES * BATCH)
