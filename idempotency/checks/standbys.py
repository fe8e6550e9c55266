"""Checks of what a failover of Postgres may lose, and of the hosts of its address. Says nothing where there is one host and no standby."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import psycopg
from sqlalchemy import Connection, text

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

_REPLICATION = text("""
SELECT current_setting('synchronous_standby_names') AS names,
       current_setting('synchronous_commit') AS synchronous_commit,
       count(*) AS standbys,
       count(*) FILTER (WHERE sync_state IN ('sync', 'quorum')) AS synchronous,
       count(*) FILTER (WHERE sync_state IS NULL) AS hidden
FROM pg_stat_replication
""")
# What vacuum and ANALYZE write into pg_class is replicated; when they last came, and what has changed since, is not.
_UNCOUNTED = text("""
SELECT count(*) FROM pg_class c JOIN pg_stat_all_tables s ON s.relid = c.oid
WHERE c.relnamespace = to_regnamespace(:schema) AND c.reltuples >= :many
  AND coalesce(s.last_vacuum, s.last_autovacuum, s.last_analyze, s.last_autoanalyze) IS NULL
""")
_SERVER = """
SELECT (SELECT system_identifier::text FROM pg_control_system()),
       CASE WHEN NOT pg_is_in_recovery() THEN left(pg_walfile_name(pg_current_wal_lsn()), 8) END
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
    elif not row.synchronous:
        advice = "commits wait until one is connected: nothing is claimed or finished, and nothing is lost"
        findings.append(warning(STANDBYS, f"none synchronous, of {row.standbys} connected", advice))
    else:
        findings.append(ok(STANDBYS, f"{row.standbys} connected, {row.synchronous} synchronous"))
    return findings


def check_counts(connection: Connection) -> list[Finding]:
    """Whether autovacuum knows what there is to do: a promotion and a crash reset what it counts."""
    if not connection.execute(_UNCOUNTED, {"schema": schema.SCHEMA, "many": MANY}).scalar_one():
        return []
    advice = (
        "autovacuum comes late, and tables grow meanwhile: run ANALYZE in this database as its owner (docs/cluster.md)"
    )
    return [warning("database statistics", "none since a promotion or a crash", advice)]


def check_hosts(given: Settings) -> list[Finding]:
    """Whether an address of several hosts leads to one primary, and to no other cluster. Asks each host by itself."""
    parameters = login(given)
    every = list(_each_host(parameters))
    if len(every) < 2:
        return []
    findings: list[Finding] = []
    servers: list[tuple[str, str | None]] = []
    for alone in every:
        with suppress(psycopg.Error), psycopg.connect(**alone) as connection:
            if (row := connection.execute(_SERVER).fetchone()) is not None:
                servers.append((row[0], row[1]))
    if len(servers) < len(every):
        advice = "nothing can take over from the others; check it"
        findings.append(warning(HOSTS, f"{len(servers)} of {len(every)} answer", advice))
    if len({system for system, _ in servers}) > 1:
        advice = "correct the address: their data have nothing in common"
        findings.append(refusal(HOSTS, "they are of different clusters", advice))
    primaries = [timeline for _, timeline in servers if timeline is not None]
    if len(primaries) > 1:
        timelines = ", ".join(str(int(timeline, 16)) for timeline in sorted(primaries))
        advice = (
            "stop the former primary, whose timeline is the lower one, before anything writes to it (docs/cluster.md)"
        )
        findings.append(refusal(HOSTS, f"{len(primaries)} take writes, on the timelines {timelines}", advice))
    if servers and not primaries:
        findings.append(warning(HOSTS, "none takes writes", "promote one; until then every claim waits"))
    return findings or [ok(HOSTS, f"{len(every)} answer, one takes writes")]


def check_target(parameters: Mapping[str, Any]) -> list[Finding]:
    """Whether libpq would pass over a standby. `parameters`: what it is given. Connects to nothing."""
    target = libpq_parameters(parameters).get("target_session_attrs") or "any"
    if target in WRITABLE or (target == "any" and len(list(_each_host(parameters))) < 2):
        return []
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
