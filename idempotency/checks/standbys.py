"""Checks of what a failover of Postgres may lose, and of the hosts of its address. Says nothing where there is one host and no standby."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import psycopg
from psycopg.rows import namedtuple_row
from sqlalchemy import Connection, Row, text

from ..hosts import libpq_parameters
from ..settings import Settings
from ..store import schema
from ..store.connections import login
from .findings import Finding, ok, refusal, warning
from .unreachable import TIMEOUT

HOSTS = "database hosts"
STANDBYS = "database standbys"
# Rows of a table from which a vacuum that does not come is missed.
MANY = 10_000
# What makes libpq pass over a standby, and what else an address may say.
WRITABLE = ("read-write", "primary")
# What a commit has to have reached before it is answered, by synchronous_commit, with a synchronous standby connected.
_ANSWERED = {
    "off": "nothing: a crash of the primary alone may lose it",
    "local": "the primary's disk: a failover may lose it",
    "remote_write": "the standby's memory: a crash of both machines at once may lose it",
}

# A synchronous connection that replays nothing only copies the log (pg_receivewal); one with a logical slot is a subscriber's.
_REPLICATION = text("""
SELECT current_setting('synchronous_standby_names') AS names,
       current_setting('synchronous_commit') AS synchronous_commit,
       count(*) AS standbys,
       coalesce(array_agg(application_name ORDER BY 1) FILTER (WHERE is_synchronous), '{}') AS synchronous,
       coalesce(array_agg(application_name ORDER BY 1) FILTER (WHERE is_synchronous AND is_no_standby), '{}') AS no_standbys,
       count(*) FILTER (WHERE sync_state IS NULL) AS hidden
FROM (
    SELECT r.application_name, r.sync_state, r.sync_state IN ('sync', 'quorum') AS is_synchronous,
           r.replay_lsn IS NULL
           OR EXISTS (SELECT FROM pg_replication_slots s WHERE s.active_pid = r.pid AND s.slot_type = 'logical') AS is_no_standby
    FROM pg_stat_replication r
) connected
""")
# How many synchronous_standby_names asks for; a plain list: one.
_NEEDED = re.compile(r"\s*(?:(?:first|any)\s+)?(\d+)\s*\(", re.IGNORECASE)
# What vacuum and ANALYZE write into pg_class is replicated; when they last came, and what has changed since, is not.
_UNCOUNTED = text("""
SELECT count(*) FROM pg_class c JOIN pg_stat_all_tables s ON s.relid = c.oid
WHERE c.relnamespace = to_regnamespace(:schema) AND c.reltuples >= :many
  AND coalesce(s.last_vacuum, s.last_autovacuum, s.last_analyze, s.last_autoanalyze) IS NULL
""")
# A standby's name is what its primary knows it by, hidden from a role without pg_read_all_stats, as who is synchronous is.
_SERVER = """
SELECT (SELECT system_identifier::text FROM pg_control_system()) AS system,
       (extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint AS started,
       CASE WHEN NOT pg_is_in_recovery() THEN left(pg_walfile_name(pg_current_wal_lsn()), 8) END AS timeline,
       EXISTS (SELECT FROM pg_stat_wal_receiver) AS receives,
       current_setting('fsync') AS fsync,
       (SELECT coalesce(substring(conninfo FROM '\\mapplication_name=(\\S+)'),
                        substring(conninfo FROM '\\mfallback_application_name=(\\S+)')) FROM pg_stat_wal_receiver) AS name,
       (SELECT array_agg(application_name) FROM pg_stat_replication WHERE sync_state <> 'async') AS synchronous
"""


def check_standbys(connection: Connection) -> list[Finding]:
    """What the loss of the primary would lose, as this connection to it can see."""
    row = connection.execute(_REPLICATION).one()
    findings = []
    # without a standby that has to confirm, the others wait for the primary's disk, as "on" does
    if row.synchronous_commit == "off" or (row.names and row.synchronous_commit in _ANSWERED):
        answered = _ANSWERED[row.synchronous_commit]
        advice = f"a COMMIT of your own sessions is answered by {answered}; the library's connections set it to on"
        findings.append(warning("database synchronous_commit", f"{row.synchronous_commit}, need on", advice))
    if not row.names:
        if row.standbys:
            advice = "a failover can lose committed data; set synchronous_standby_names"
            findings.append(warning("database", f"{row.standbys} standbys, none synchronous", advice))
    elif row.hidden:
        advice = "GRANT pg_read_all_stats to this role, or look as another"
        findings.append(warning(STANDBYS, "this role may not see whether one is synchronous", advice))
    else:
        findings += _synchronous(row)
    return findings


def _synchronous(row: Row[Any]) -> list[Finding]:
    """Whether those that commits wait for are there, and are standbys."""
    findings = []
    asked = _NEEDED.match(row.names)
    needed, there = int(asked[1]) if asked else 1, len(row.synchronous)
    if there < needed:
        found = f"{there or 'none'} synchronous, of {row.standbys} connected" + (f", need {needed}" * (needed > 1))
        waiting = "one is" if needed == 1 else "as many are"
        advice = f"commits wait until {waiting} connected: nothing is finished, and nothing that was answered is lost"
        findings.append(warning(STANDBYS, found, advice))
    if row.no_standbys:
        advice = "it can never be promoted, and may be all that has confirmed a commit; leave it out of synchronous_standby_names"
        findings.append(warning(STANDBYS, f"{', '.join(row.no_standbys)} is synchronous and no standby", advice))
    if "*" in row.names:
        advice = "whatever connects may confirm commits, such as pg_receivewal or a subscriber; name the standbys"
        findings.append(warning(STANDBYS, f"synchronous_standby_names is {row.names}", advice))
    return findings or [ok(STANDBYS, f"{row.standbys} connected, synchronous: {', '.join(row.synchronous)}")]


def check_counts(connection: Connection) -> list[Finding]:
    """Whether autovacuum knows what there is to do: a promotion and a crash reset what it counts."""
    if not connection.execute(_UNCOUNTED, {"schema": schema.SCHEMA, "many": MANY}).scalar_one():
        return []
    advice = "autovacuum comes late, and tables grow meanwhile: run VACUUM (ANALYZE) in this database as its owner (docs/cluster.md)"
    return [warning("database statistics", "none since a promotion or a crash", advice)]


def check_hosts(given: Settings) -> list[Finding]:
    """Whether an address of several hosts leads to one primary, and to no other cluster. Asks each host by itself."""
    parameters = login(given)
    every = list(_each_host(parameters))
    if len(every) < 2:
        return []
    findings: list[Finding] = []
    answers: list[tuple[str, Any]] = []
    for alone in every:
        with suppress(psycopg.Error), psycopg.connect(**alone, row_factory=namedtuple_row) as connection:
            if (row := connection.execute(_SERVER).fetchone()) is not None:
                answers.append((f"{connection.info.host}:{connection.info.port}", row))
    if len(answers) < len(every):
        advice = "nothing can take over from the others; check it"
        findings.append(warning(HOSTS, f"{len(answers)} of {len(every)} answer", advice))
    servers = {(row.system, row.started): (host, row) for host, row in answers}
    if len(servers) < len(answers):
        advice = "nothing takes over from itself; correct the address"
        findings.append(warning(HOSTS, "one server is named twice", advice))
    if len({system for system, _ in servers}) > 1:
        advice = "correct the address: their data have nothing in common"
        findings.append(refusal(HOSTS, "they are of different clusters", advice))
    primaries = [row for _, row in servers.values() if row.timeline is not None]
    if len(primaries) == 1:
        findings += _followers(primaries[0], [each for each in servers.values() if each[1].timeline is None])
    if len(primaries) > 1:
        timelines = ", ".join(str(int(timeline, 16)) for timeline in sorted(row.timeline for row in primaries))
        advice = (
            "stop the former primary, whose timeline is the lower one, before anything writes to it (docs/cluster.md)"
        )
        findings.append(refusal(HOSTS, f"{len(primaries)} take writes, on the timelines {timelines}", advice))
    if servers and not primaries:
        findings.append(warning(HOSTS, "none takes writes", "promote one; until then every claim waits"))
    return findings or [ok(HOSTS, f"{len(every)} answer, one takes writes")]


def _followers(primary: Any, standbys: Iterable[tuple[str, Any]]) -> Iterator[Finding]:
    """Of the address's own standbys, those whose promotion would lose what was answered."""
    for host, row in standbys:
        if row.fsync != "on":
            confirms = bool(primary.synchronous) and (row.name is None or row.name in primary.synchronous)
            found = f"{host} is a standby with fsync {row.fsync}, need on"
            if confirms:
                advice = (
                    "it confirms commits that are not on its disk: a crash of both machines may lose what was answered"
                )
                yield refusal(HOSTS, found, advice)
            else:
                yield warning(HOSTS, found, "a crash of its machine may spoil what it has")
        if not row.receives:
            advice = (
                "it falls behind, and its promotion would lose what was committed since; look at its primary_conninfo"
            )
            yield warning(HOSTS, f"{host} is a standby that receives nothing", advice)
        elif primary.synchronous and row.name is not None and row.name not in primary.synchronous:
            advice = "its promotion can lose committed data; name it in synchronous_standby_names"
            yield warning(HOSTS, f"{host} ({row.name}) is not among the synchronous", advice)


def check_target(parameters: Mapping[str, Any]) -> list[Finding]:
    """Whether libpq would pass over a standby. `parameters`: what it is given. Connects to nothing."""
    target = libpq_parameters(parameters).get("target_session_attrs") or "any"
    if target in WRITABLE or (target in ("any", "prefer-standby") and len(list(_each_host(parameters))) < 2):
        return []  # the only one there is
    advice = "a connection may end on a standby, where every claim waits; set target_session_attrs=read-write"
    return [refusal(HOSTS, f"target_session_attrs={target}, need read-write", advice)]


def _each_host(parameters: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What to give libpq for each host alone, in any role."""
    given = {name: value for name, value in parameters.items() if name not in ("cursor_factory", "context")}
    said = libpq_parameters(given)
    lists = {name: said[name].split(",") for name in ("host", "hostaddr", "port") if said.get(name)}
    number = max((len(each) for name, each in lists.items() if name != "port"), default=1)
    for at in range(number):
        alone = {name: each[at] if at < len(each) else each[0] for name, each in lists.items()}
        yield given | alone | {"target_session_attrs": "any", "connect_timeout": TIMEOUT}
