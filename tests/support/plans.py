"""What Postgres plans for a statement, and how many rows the plan reads."""

from __future__ import annotations

import re
from typing import Any

import psycopg
from celery import Celery
from sqlalchemy import Connection

from idempotency.application import runtime_of
from idempotency.store.driver import OneStatement


def explain(connection: Connection, statement: str) -> str:
    """The generic plan of a statement with psycopg's placeholders."""
    names = list(dict.fromkeys(re.findall(r"%\((\w+)\)[sb]", statement)))
    numbered = re.sub(r"%\((\w+)\)[sb]", lambda found: f"${names.index(found[1]) + 1}", statement)
    driver: Any = connection.connection.driver_connection
    # An attempt's own cursor would send it with no parameters at all; behind a pooler, the others' brings our settings.
    cursor = psycopg.Cursor(driver) if issubclass(driver.cursor_factory, OneStatement) else driver.cursor()
    rows = cursor.execute(f"EXPLAIN (GENERIC_PLAN) {numbered}").fetchall()
    return "\n".join(line for (line,) in rows)


def rows_read(app: Celery, statement: str, **parameters: Any) -> int:
    """The most rows that one node of a statement's plan read or threw away, without its changes."""
    with runtime_of(app).autocommit() as connection:
        driver: Any = connection.connection.driver_connection
        with driver.transaction(force_rollback=True):
            plan = connection.exec_driver_sql(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", parameters).scalar_one()

    def most(node: dict[str, Any]) -> int:
        own = (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
        return max([int(own), *(most(each) for each in node.get("Plans", []))])

    return most(plan[0]["Plan"])
