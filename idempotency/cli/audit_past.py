"""`idempotency audit-past`: duplicates that have already happened in a table, before the library is used.

Exit status 0: none. 1: there are some. 2: the question could not be asked or answered, with one line on stderr.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any

import typer

from ..checks.tls import unverified_postgres
from ..errors import IdempotencyError
from ..framework import framework
from ..past.conditions import read_conditions
from ..past.duplicates import Duplicates, Question, find_duplicates
from ..past.naming import read_key
from ..past.reading import connect_parameters, reading
from ..past.table import Column, Table, find_table
from ..text import number_of
from .options import JsonOption
from .terminal import console, errors, plain, print_json, print_line, print_table

commands = typer.Typer()

FOUND, NO_ANSWER = 1, 2
# Seconds between two signs of life on stderr.
SIGN_EVERY = 10.0
_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_PERIOD = re.compile(rf"(\d{{1,9}}(?:\.\d{{1,3}})?)\s*({'|'.join(_UNITS)})")
# What usually comes so long after the row before it.
_USUALLY = {
    "minute": ("under a minute", "a double click, a client or a task that tries again"),
    "hour": ("under an hour", "a message delivered again: a lost worker, a time-out"),
    "day": ("under a day", "a message delivered again after a long time-out, a job that was run again"),
    "longer": ("longer", "probably meant; --within leaves them out"),
}


def _seconds(option: str, text: str) -> float:
    """The seconds of a period: `500ms`, `90s`, `10m`, `1h`, `7d`, `2w`. Raises `IdempotencyError` for another text."""
    if (found := _PERIOD.fullmatch(text.strip())) is None or not float(found[1]):
        raise IdempotencyError(f"{option}: must be a period like 90s, 10m, 1h or 7d, got {text!r}")
    return float(found[1]) * _UNITS[found[2]]


@commands.command("audit-past")
def audit_past(
    table: Annotated[
        str, typer.Option(help="A table or view of yours, by its exact name, with or without its schema.")
    ],
    key: Annotated[
        list[str],
        typer.Option(
            help="What names an operation: columns, separated by commas; also lower(COLUMN), day(COLUMN), COLUMN->FIELD of JSON."
        ),
    ],
    database: Annotated[
        str,
        typer.Option(
            envvar="DATABASE_URL", show_default=False, help="Its address. As an argument, others see it in ps."
        ),
    ] = "",
    at: Annotated[str | None, typer.Option(help="The column with the time at which a row was made.")] = None,
    within: Annotated[
        str | None,
        typer.Option(
            metavar="PERIOD",
            help="Count a row as a copy only if it came so soon after the one before: 90s, 10m, 1h, 7d. Needs --at.",
        ),
    ] = None,
    amount: Annotated[
        str | None, typer.Option(help="A column with an amount, to add what was there more than once.")
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(help="COLUMN=VALUE, or with != < <= > >=, or 'COLUMN is null'. All must hold. Not SQL."),
    ] = None,
    nulls: Annotated[
        bool, typer.Option("--nulls", help="NULL in the key is a value. Default: such a row names no operation.")
    ] = False,
    limit: Annotated[int, typer.Option(min=0, max=10_000, help="How many examples to show.")] = 10,
    timeout: Annotated[str, typer.Option(metavar="PERIOD", help="For each of two statements.")] = "10m",
    plain_text: Annotated[
        bool, typer.Option("--plain-text", help="Connect without TLS that verifies the host's name.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Find what has already happened twice in a table of yours. Reads only. Exit status 1 if there is any, 2 for an error."""
    try:
        # in Django, its own database, unless another one is named
        address = database or framework().database_url()
        if not address:
            raise IdempotencyError("--database: not given; name it there, or in DATABASE_URL")
        parameters = connect_parameters(address)
        if not plain_text and (wrong := unverified_postgres(parameters)) is not None:
            raise IdempotencyError(f"--database: {wrong}, or pass --plain-text")
        if within is not None and at is None:
            raise IdempotencyError("--within: needs --at, the column with the time of a row")
        window = None if within is None else _seconds("--within", within)
        with reading(parameters, _seconds("--timeout", timeout)) as connection:
            found = find_table(connection, table)
            question = Question(
                table=found,
                key=read_key(found, key),
                conditions=read_conditions(connection, found, where or ()),
                at=None if at is None else _time(found, at),
                within=window,
                amount=None if amount is None else _amount(found, amount),
                nulls=nulls,
                limit=limit,
            )
            with _signs_of_life(found):
                answer = find_duplicates(connection, question)
    except IdempotencyError as error:
        errors.print(plain(f"idempotency: {error}"), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(NO_ANSWER) from None
    except KeyboardInterrupt:  # Postgres has been told to stop, too
        raise typer.Exit(NO_ANSWER) from None
    if as_json:
        print_json(_document(question, answer))
    else:
        _print(question, answer)
    if answer.groups:
        raise typer.Exit(FOUND)


def _time(table: Table, name: str) -> Column:
    column = table.column(name, "--at")
    if not column.is_time:
        raise IdempotencyError(f"--at: {name} is of type {column.type}; must be a timestamp or a date")
    return column


def _amount(table: Table, name: str) -> Column:
    column = table.column(name, "--amount")
    if not column.is_amount:
        raise IdempotencyError(f"--amount: {name} is of type {column.type}; must be numeric or text")
    return column


@contextmanager
def _signs_of_life(table: Table) -> Iterator[None]:
    """Say on stderr that it still runs: Postgres tells nobody how far a query is."""
    done = threading.Event()

    def say() -> None:
        waited = 0.0
        while not done.wait(SIGN_EVERY):
            waited += SIGN_EVERY
            rows = f"about {number_of(table.rows, 'row')}" if table.rows else "an unknown number of rows"
            errors.print(plain(f"{table.shown}: {rows}, {waited:.0f} s so far"), markup=False, highlight=False)

    thread = threading.Thread(target=say, name="signs-of-life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _document(question: Question, answer: Duplicates) -> dict[str, Any]:
    """The answer for programs. Amounts are texts, so that no program rounds them."""
    names = [part.name for part in question.key]
    fields = asdict(answer)
    examples = [{**each, "key": dict(zip(names, each["key"], strict=True))} for each in fields.pop("examples")]
    asked: dict[str, Any] = {"table": question.table.shown, "key": names, "at": question.at and question.at.name}
    asked |= {"within_seconds": question.within, "amount_column": question.amount and question.amount.name}
    return asked | fields | {"examples": examples}


def _print(question: Question, answer: Duplicates) -> None:
    key = ", ".join(part.name for part in question.key)
    left_out = f"; {answer.without_key:,} with NULL in {key}: left out" if answer.without_key else ""
    if answer.without_time and question.at is not None:
        without = "left out" if question.within is not None else "counted, without a distance"
        left_out += f"; {answer.without_time:,} without {question.at.name} {without}"
    print_line(f"{question.table.shown}: {number_of(answer.rows, 'row')}{left_out}")
    if not answer.groups:
        print_line(f"no two rows have the same {key}{_window(question)}")
        return
    print_line(
        f"{number_of(answer.copies, 'row')} too many, if the same {key}{_window(question)} means one operation: "
        f"{number_of(answer.groups, 'group')} of {answer.copies + answer.groups:,} rows"
    )
    if question.amount is not None:
        _print_amount(question.amount, answer)
    if answer.distances:
        print_table(
            "after the row before", "rows", "usually",
            rows=[(_USUALLY[name][0], f"{count:,}", _USUALLY[name][1]) for name, count in answer.distances.items()],
        )  # fmt: skip
    if answer.examples:
        _print_examples(question, answer)


def _window(question: Question) -> str:
    return "" if question.within is None else f" within {_period(question.within)} of the row before"


def _print_amount(amount: Column, answer: Duplicates) -> None:
    differ = f"; the amounts differ in {answer.differing:,} groups, which may be no copies" if answer.differing else ""
    unreadable = f"; {answer.unreadable:,} are no number and are not added" if answer.unreadable else ""
    total = "unknown" if answer.amount is None else f"{answer.amount:,f}"
    print_line(f"{amount.name} of all rows but the largest of each group: {total}{differ}{unreadable}")


def _print_examples(question: Question, answer: Duplicates) -> None:
    parts = [part.name for part in question.key]
    timed = ["first", "last", "shortest, longest distance", "ids"] if question.at is not None else []
    amount = [question.amount.name] if question.amount is not None else []
    rows = []
    for each in answer.examples:
        times = [each.first, each.last, _distances(each.shortest, each.longest), ", ".join(each.ids)] if timed else []
        sums = [f"{each.amount:,f}" if each.amount is not None else ""] if amount else []
        rows.append([*("NULL" if value is None else value for value in each.key), each.rows, *times, *sums])
    shown = f"{len(rows)} of {answer.groups:,} groups"
    print_table(*map(plain, parts), "rows", *timed, *(f"{name} too much" for name in amount), rows=rows, title=shown)
    if len(rows) < answer.groups:
        console.print("--limit shows more")


def _distances(shortest: float | None, longest: float | None) -> str:
    if shortest is None or longest is None:
        return ""
    return _period(shortest) if shortest == longest else f"{_period(shortest)}, {_period(longest)}"


def _period(length: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if length >= size:
            return f"{length / size:.1f}".removesuffix(".0") + f" {unit}"
    return f"{length:g} s"
