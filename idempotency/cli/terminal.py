"""What all commands share: the application, the operator's token, and how answers are printed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from celery import Celery
from celery.app.utils import find_app
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..environment import environment
from ..errors import IdempotencyError

console = Console()


def application(name: str) -> Celery:
    """Find the Celery application of this name. Raises `IdempotencyError`."""
    try:
        return find_app(name)
    except (ImportError, AttributeError) as error:
        raise IdempotencyError(
            f"--app {name}: {error}; name your Celery application with -A, or in CELERY_APP"
        ) from None


def print_json(document: Any) -> None:
    """Print one JSON document on stdout; times are ISO 8601."""
    print(json.dumps(document, default=_as_text))  # noqa: T201


def print_table(*columns: str, rows: Iterable[Iterable[Any]], title: str | None = None) -> None:
    """Print a table of plain text: no markup is interpreted and no control character reaches the terminal."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(cell if hasattr(cell, "__rich_console__") else Text(plain(cell)) for cell in row))
    console.print(table)


def plain(value: Any) -> str:
    """Write a value as one line for a person."""
    if value is None:
        return ""
    if hasattr(value, "strftime"):
        return f"{value:%F %T%z}"
    if isinstance(value, dict):
        value = json.dumps(value, default=_as_text)
    return "".join(character if character.isprintable() else "\ufffd" for character in str(value))


def _as_text(value: Any) -> str:
    return str(value.isoformat() if hasattr(value, "isoformat") else value)


def operators_token() -> str | None:
    """The operator's token from the environment, if one is set."""
    token = environment().token
    return None if token is None else token.get_secret_value()
