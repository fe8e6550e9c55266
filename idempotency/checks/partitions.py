"""Checks of the records' partitions, where there are any: whether they are made ahead, emptied and dropped."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from sqlalchemy import Connection

from ..framework import framework
from ..settings import Settings
from ..store import partitioning, partitions, periods
from ..store.inserting import KEYS_AT_ONCE
from ..store.migrations.partitioning import VERSION
from ..store.periods import WIDTHS, Partitions
from .findings import Finding, ok, refusal, warning

SUBJECT = "database partitions"
# With more, the look-ups cost more than partitions save: docs/partitions.md, "What it costs".
MANY = 30
# How many statements are planned at once on a busy server: whenever a partition is made or dropped, each connection plans anew.
# As many batches lock their keys.
AT_ONCE = 20

_ROOM = "SELECT current_setting('max_locks_per_transaction')::int AS each, current_setting('max_connections')::int AS connections"


def check_partitions(connection: Connection, given: Settings) -> list[Finding]:
    """Whether upkeep keeps up with the partitions; nothing for a plain table, or for a role that does no upkeep."""
    if (rights := partitions.may_keep_up(connection)) is None:
        return []
    if not rights:
        advice = "the role that purges has to make and drop them: run `migrate --roles` again, or grant it (docs/partitions.md)"
        return [warning(SUBJECT, "this role may not make them", advice)]
    found = periods.found(connection)
    if found is None:
        return []
    findings = [*_functions(connection), *_ahead(found)]
    if not found.is_told:
        advice = (
            f"run `{framework().command} migrate --partitioned` again with one; a dump without comments leaves it out"
        )
        findings.append(warning(SUBJECT, f"nothing says how long they are; made by {found.width}, as before", advice))
    if partitions.default_waits(connection, found):
        advice = "no partition was there when they came; a relay's purge moves them, those that are running once they have ended"
        findings.append(warning(SUBJECT, "the default one has records", advice))
    if len(found.all) > MANY:
        longer = "take longer ones" if found.width != "week" else "shorten the retentions"
        advice = f"each look-up asks all of them; {longer}"
        findings.append(warning(SUBJECT, f"{len(found.all)}, more than {MANY}", advice))
    findings += _room(connection, len(found.all))
    findings += _over(found, given.retention_completed)
    return findings or [ok(SUBJECT, f"{len(found.all)}, by {found.width}, made until {_minute(found.last)}")]


def _functions(connection: Connection) -> list[Finding]:
    found = partitioning.functions_version(connection)
    if found >= VERSION:
        return []
    advice = (
        f"run `{framework().command} migrate`: with those of earlier code, a wake may be lost while an operation moves"
    )
    return [refusal(f"{SUBJECT}: functions", f"of version {found}, need {VERSION}", advice)]


def _ahead(found: Partitions) -> list[Finding]:
    if found.last is None:
        advice = "records go to the default one; a relay's purge makes them; is one running?"
        return [warning(SUBJECT, "none for the present", advice)]
    if found.last <= found.wanted - WIDTHS[found.width]:
        advice = "a relay's purge makes them; is one running?"
        return [warning(SUBJECT, f"none after {_minute(found.last)}", advice)]
    return []


def _minute(moment: datetime | None) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M} UTC" if moment else "now"


def _room(connection: Connection, many: int) -> list[Finding]:
    room = connection.exec_driver_sql(_ROOM).one()
    needed = -(-AT_ONCE * (periods.locks_of_each(connection) * many + KEYS_AT_ONCE) // room.connections)
    if room.each >= needed:
        return []
    advice = f"raise it to {needed}: with {many} partitions, plans and batches that are made at once may find no room for their locks"
    return [warning("database max_locks_per_transaction", str(room.each), advice)]


def _over(found: Partitions, retention: float) -> list[Finding]:
    """Those that were to be dropped two periods ago. The original table goes once most of it is past its retention."""
    since = found.now - timedelta(seconds=retention) - 2 * WIDTHS[found.width]
    late = [each.name for each in found.all if each.begins_at and each.ends_at and each.ends_at < since]
    if not late:
        return []
    advice = "most of it is still needed, or a transaction holds it; the log of a relay's purge says `partition_stays` if it is refused"
    return [
        warning(
            SUBJECT, f"{late[0]} is past the retention of completed operations, and there are {len(late)} such", advice
        )
    ]
