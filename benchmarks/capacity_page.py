"""The arithmetic of docs/capacity.md, and its tables: all of it from what docs/capacity.json has measured."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from idempotency.relay.relay import BATCH

PAGE = Path(__file__).parent.parent / "docs" / "capacity.md"
MEASURED = PAGE.with_suffix(".json")
RATES = (1_000, 10_000, 100_000)
# Not measured: what the arithmetic takes for granted. Written into the JSON, and shown.
ASSUMED: dict[str, float] = {
    "utilisation": 0.6,  # of a core, on average; the rest is for peaks
    "call_seconds": 0.2,  # how long the call of an effect takes, outside
    "server_cores": 32,  # of a Postgres server
    "server_wal_mb": 200,  # MB/s that its disk takes, synced
    "node_cores": 16,  # of a node of RabbitMQ
    "copies": 3,  # of each message of a quorum queue; measured is one node
    "connections": 500,  # of a Postgres server; beyond that, poolers
    "pooler_transactions": 20_000,  # a second, of one PgBouncer
    "retention_hours": 72,  # retention_completed
}
Measured = Mapping[str, Any]
_SERVERS = {"postgres": "Postgres", "redis": "Redis", "rabbitmq": "RabbitMQ"}
_BLOCK = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def needed(measured: Measured, kind: str, rate: float) -> dict[str, float]:
    """What so many operations a second of a kind need. The formulas of the page."""
    cost, a = measured["costs"][kind], measured["assumed"]
    cpu, use = cost["cpu"], a["utilisation"]
    waits = a["call_seconds"] if kind == "effect" else 0.0
    postgres, wal = rate * cpu["postgres"] / use, rate * cost["wal"] / 1e6
    cells = max(1, ceil(postgres / a["server_cores"]), ceil(wal / a["server_wal_mb"]))
    processes, relays = ceil(rate * (cpu["worker"] / use + waits)), max(cells, ceil(rate * of_relay(measured, kind)))
    opened = cost["connections"]
    connections = ceil(
        (processes * opened["worker"]["postgres"] / cost["concurrency"] + relays * opened["relay"]["postgres"]) / cells
    )
    commits, broker = rate * cost["commits"], rate * cpu["rabbitmq"] * a["copies"] / use
    return {
        "callers' cores": rate * cpu["caller"] / use,
        "pool processes": processes,
        "workers' cores": rate * cpu["worker"] / use,
        "relays": relays,
        "Postgres' cores": postgres,
        "WAL MB/s": wal,
        "commits/s": commits,
        "cells": cells,
        "connections of each": connections,
        "poolers of each": 0 if connections <= a["connections"] else ceil(commits / cells / a["pooler_transactions"]),
        "messages/s": rate * cost["messages"],
        "RabbitMQ's cores": broker,
        "its nodes": max(a["copies"], ceil(broker / a["node_cores"])),
        "Redis commands/s": rate * cost["redis_commands"],
        "Redis servers": max(1, ceil(rate * cpu["redis"] / use)),
        "disk TB": rate * cost["bytes"] * a["retention_hours"] * 3600 / 1e12,
    }


def carries(measured: Measured, kind: str) -> dict[str, float]:
    """Operations a second that one of each carries, at the assumed utilisation; what has the least saturates first."""
    cost, a = measured["costs"][kind], measured["assumed"]
    cpu, use = cost["cpu"], a["utilisation"]
    waits = a["call_seconds"] if kind == "effect" else 0.0

    def of(cores: float, seconds: float) -> float:
        return cores * use / seconds if seconds else float("inf")

    return {
        f"all on this machine ({measured['machine']['processors']} cores)": of(
            measured["machine"]["processors"], sum(cpu.values())
        ),
        "one pool process": 1 / (cpu["worker"] / use + waits),
        "one relay": 1 / each if (each := of_relay(measured, kind)) else float("inf"),
        f"one Postgres of {a['server_cores']:.0f} cores: its cores": of(a["server_cores"], cpu["postgres"]),
        "the same: its log": a["server_wal_mb"] * 1e6 / cost["wal"] if cost["wal"] else float("inf"),
        f"{a['copies']:.0f} RabbitMQ nodes of {a['node_cores']:.0f} cores": of(
            a["copies"] * a["node_cores"], cpu["rabbitmq"] * a["copies"]
        ),
        "one Redis": of(1, cpu["redis"]),
    }


def of_relay(measured: Measured, kind: str) -> float:
    """Seconds of a relay for a message, at the assumed utilisation: of its processor, or its share of the quickest pass with whole
    messages, which also waits for confirms."""
    shares = [each["relay"] / BATCH for each in measured.get("waiting", []) if each["is_whole"]]
    busy: float = max(measured["costs"][kind]["cpu"]["relay"], min(shares, default=0.0))
    return busy / float(measured["assumed"]["utilisation"])


def number(value: float) -> str:
    """A figure as the page has it: three digits that count."""
    if value in (0, float("inf")):
        return "0" if value == 0 else "–"
    if value >= 1000:
        return f"{float(f'{value:.3g}'):,.0f}"
    return f"{value:.3g}"


def table(head: Sequence[str], rows: Iterator[Sequence[str]] | Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _about(measured: Measured) -> str:
    machine, servers = measured["machine"], measured["servers"]
    load = ", ".join(f"{each:.1f}" for each in machine["load"])
    return (
        f"Measured on {measured['at']}: {machine['processors']} cores, {machine['platform']}, Python {machine['python']}, Postgres "
        f"{servers['postgres']}, {servers['broker']}, Redis {servers['redis']}, everything on one machine. Its load averages when "
        f"this began: {load}. {measured['operations']:,} operations of each kind.\n"
    )


def _costs(measured: Measured) -> str:
    kinds = measured["costs"]
    names = list(next(iter(kinds.values()))["cpu"])
    rows = [
        [f"CPU of {_SERVERS.get(name, 'the ' + name)}, ms", *(number(1e3 * kinds[kind]["cpu"][name]) for kind in kinds)]
        for name in names
    ]
    rows.append(["all CPU, ms", *(number(1e3 * sum(kinds[kind]["cpu"].values())) for kind in kinds)])
    for said, name in (
        ("WAL, bytes", "wal"),
        ("commits", "commits"),
        ("messages", "messages"),
        ("Redis commands, in scripts too", "redis_commands"),
        ("bytes on disk until it is purged", "bytes"),
        ("characters of its message in the outbox", "message_length"),
    ):
        rows.append([said, *(number(kinds[kind][name]) for kind in kinds)])
    for process in ("worker", "relay"):
        for server in ("postgres", "redis", "rabbitmq"):
            opened = (str(kinds[kind]["connections"][process][server]) for kind in kinds)
            of = f"a worker of {kinds['plain']['concurrency']}" if process == "worker" else "a relay"
            rows.append([f"connections of {of}, to {_SERVERS[server]}", *opened])
    return table(["of one operation", *kinds], rows)


def _assumed(measured: Measured) -> str:
    return table(["assumed", "value"], [[f"`{name}`", number(value)] for name, value in measured["assumed"].items()])


def _first(measured: Measured) -> str:
    found = {kind: carries(measured, kind) for kind in measured["costs"]}
    rows = [[name, *(number(found[kind][name]) for kind in found)] for name in found["plain"]]
    return table(["operations a second of", *found], rows)


def _needed(measured: Measured) -> str:
    head, columns = ["for so many a second"], []
    for kind in measured["costs"]:
        for rate in RATES:
            head.append(f"{kind} {rate:,}")
            columns.append(needed(measured, kind, rate))
    return table(head, [[name, *(number(column[name]) for column in columns)] for name in columns[0]])


def _waiting(measured: Measured) -> str:
    found, shown = measured["waiting"], ("relay", "reserve", "settle", "judge", "recover", "look")
    said = {
        "relay": f"the relay's pass of {BATCH} messages, ms",
        "reserve": f"of that, reserving {BATCH} rows in Postgres, ms",
        "settle": "settling what has ended: nothing, ms",
        "judge": f"judging {found[0]['judged']:,} rows of a queue, ms" if found else "",
        "recover": "recovering orphans: none, ms",
        "look": "a scrape, ms",
    }
    rows = [[said[name], *(number(1e3 * each[name]) for each in found)] for name in shown]
    rows.insert(0, ["each with a whole message", *("yes" if each["is_whole"] else "no" for each in found)])
    rows.append(["bytes of each, with indexes", *(number(each["bytes"]) for each in found)])
    rows.append(["seconds to fill and index", *(number(each["fill_seconds"]) for each in found)])
    text = table(["waiting", *(f"{each['waiting']:,}" for each in found)], rows)
    return f"Measured on {measured['waited_at']}.\n\n{text}"


def _compared(measured: Measured) -> str:
    """The arithmetic says: a pass costs the same, whatever waits. And how long all of it then takes."""
    found, relay_cpu = measured["waiting"], measured["costs"]["plain"]["cpu"]["relay"]
    rows: list[list[str]] = []
    for name, said in (("relay", "the relay's pass"), ("judge", "judging"), ("look", "a scrape")):
        rows.append(
            [
                f"{said}, over that with {found[0]['waiting']:,}",
                "1",
                *(number(each[name] / found[0][name]) for each in found),
            ]
        )
    predicted = number(1 / relay_cpu) if relay_cpu else "–"
    rows.append(
        [
            "messages a second of one relay",
            f"{predicted} (a core, with everything it does)",
            *(number(BATCH / each["relay"]) for each in found),
        ]
    )
    once = found[0]["judge"] / found[0]["judged"]
    rows.append(
        [
            "hours to publish all of them by one relay",
            f"{number(relay_cpu * 1e3)} ms each",
            *(number(each["waiting"] * each["relay"] / BATCH / 3600) for each in found),
        ]
    )
    rows.append(
        [
            "minutes of Postgres to judge all of them once",
            f"{number(once * 1e6)} µs each",
            *(number(each["waiting"] * each["judge"] / each["judged"] / 60) for each in found),
        ]
    )
    text = table(["", "by the arithmetic", *(f"{each['waiting']:,}" for each in found)], rows)
    return text + (f"\nLeft out: {measured['left_out']}\n" if measured.get("left_out") else "")


BLOCKS: dict[str, Callable[[Measured], str]] = {
    "about": _about,
    "costs": _costs,
    "assumed": _assumed,
    "first": _first,
    "needed": _needed,
    "waiting": _waiting,
    "compared": _compared,
}


def rendered(page: str, measured: Measured) -> str:
    """The page with its tables as these figures make them. Raises `ValueError` for a page that lacks one."""
    names = [name for _, name, _ in _BLOCK.findall(page)]
    if names != list(BLOCKS):
        raise ValueError(f"docs/capacity.md must have the blocks {', '.join(BLOCKS)}, has {', '.join(names)}")
    return _BLOCK.sub(lambda block: f"{block[1]}\n{BLOCKS[block[2]](measured)}\n{block[3]}", page)
