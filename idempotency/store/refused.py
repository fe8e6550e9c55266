"""What to do about a statement of ours that Postgres refuses: our tables are missing, or a right on them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import DBAPIError, StatementError

from ..errors import SettingsError
from ..framework import framework
from .schema import SCHEMA
from .statements import describe, driver_error

# undefined_table, undefined_column, invalid_schema_name, undefined_function
_NOT_MIGRATED = ("42P01", "42703", "3F000", "42883")
INSUFFICIENT_PRIVILEGE = "42501"
# What a role needs on each of our tables, except that the audit table is append-only.
_RIGHTS, _AUDIT_RIGHTS = "SELECT, INSERT, UPDATE, DELETE", "SELECT, INSERT"


def remedy(error: BaseException) -> str | None:
    """What a person has to do, in one line that names the command or the rights; None if it is something else.

    For the errors of SQLAlchemy, psycopg, psycopg 2 and asyncpg.
    """
    driver = (error.orig if isinstance(error, DBAPIError) else driver_error(error)) or error
    state = getattr(driver, "sqlstate", None) or getattr(driver, "pgcode", None)
    if state in _NOT_MIGRATED:
        run = f"run `{framework().command} migrate`"
        return f"the database does not have the tables of this version ({describe(driver)}); {run}"
    if state == INSUFFICIENT_PRIVILEGE and "idempotency.tenant" in describe(driver):
        return f"{describe(driver)}; `SELECT idempotency.about('tenant')` sets it for a transaction (docs/tenants.md)"
    if state == INSUFFICIENT_PRIVILEGE and "must be owner" in describe(driver):
        return f"a right is missing ({describe(driver)}); log in as its owner or as a member of it"
    if state == INSUFFICIENT_PRIVILEGE:
        return f"a right is missing ({describe(driver)}); {_needed(getattr(error, 'statement', None) or '')}"
    return None


def _needed(statement: str) -> str:
    tables = sorted(set(re.findall(rf"\b{SCHEMA}\.(\w+)\b(?!\()", statement)))
    needs = (f"; {_AUDIT_RIGHTS if table == 'audit' else _RIGHTS} on {SCHEMA}.{table}" for table in tables)
    return f"this role needs USAGE on schema {SCHEMA}" + "".join(needs)


@contextmanager
def explained() -> Iterator[None]:
    """Raise `SettingsError` with the remedy for what a statement of ours meets in a caller's transaction.

    Any other error passes, without the call's arguments in its text, whatever the caller's engine would show.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, StatementError):
            error.hide_parameters = True
        if (said := remedy(error)) is None:
            raise
        raise SettingsError(said) from error
