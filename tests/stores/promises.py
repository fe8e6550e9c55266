"""What each store promises, in words, and which tests show it. `python -m tests.stores` runs them and prints the table."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T", bound=Callable[..., Any])
HERE = Path(__file__).parent
STORES = ("postgres", "redis", "dynamodb")
KEPT, NOT_OFFERED = "kept", "not offered"


@dataclass(frozen=True, slots=True)
class Promise:
    """`verdicts` by store: kept, "weaker: …" or not offered. `elsewhere`: the test of another folder that shows it for a store.

    `untested`: stores of which nothing here can show it.
    """

    words: str
    verdicts: Mapping[str, str]
    elsewhere: Mapping[str, str]
    untested: tuple[str, ...] = ()


def _all(words: str, **elsewhere: str) -> Promise:
    return Promise(words, dict.fromkeys(STORES, KEPT), elsewhere)


def _but(words: str, weaker: Mapping[str, str], *untested: str, **elsewhere: str) -> Promise:
    return Promise(words, dict.fromkeys(STORES, KEPT) | dict(weaker), elsewhere, untested)


_REPEATED = "weaker: it is repeated, under the same `outside_key`"
_STRUCK = "test_sigkill_at_every_crash_point_leaves_one_effect"

PROMISES = (
    _but(
        "a crash between effect and record leaves one effect",
        {"redis": _REPEATED, "dynamodb": _REPEATED},
        postgres=_STRUCK,
    ),
    _all("a crash before the effect leaves one effect", postgres=_STRUCK),
    _all("a crash after the record repeats nothing", postgres=_STRUCK),
    _but(
        "a record outlives a crash of its server",
        {
            "redis": "weaker: only with `appendonly yes`, and without its last second; a failover may forget the last writes",
            "dynamodb": "by the word of AWS; nothing here shows it",
        },
        "dynamodb",
        postgres="test_an_attempt_goes_on_after_postgres_was_killed_and_has_recovered",
    ),
    _all("one claim at a time"),
    _all("who renews is not replaced"),
    _all("who has died is replaced, under a higher fence"),
    _all("who has lost its claim changes nothing"),
    _all("a claim whose answer was lost is not made twice"),
    _but(
        "an end whose answer was lost is not refused",
        {"postgres": "kept: the operation is claimed again, which shows what happened"},
        postgres="test_the_same_token_claims_the_same_attempt",
    ),
    _all("an ended operation stays as it ended"),
    _all("a duplicate gets the stored result, byte for byte"),
    _all("the same key with other arguments is refused"),
    _all("tenants and tasks do not meet"),
    _all("a released operation waits until it is due"),
    _all("attempts are counted in the record"),
    _all(
        "a message that kills its process ends as failed",
        postgres="test_a_poison_message_ends_as_one_dead_letter_and_the_worker_lives",
    ),
    _but(
        "a failed operation stays failed for its retention",
        dict.fromkeys(STORES[1:], "weaker: for an hour by default; no dead letter keeps its message"),
    ),
    _but(
        "the key of a failed operation can be freed by hand",
        {"postgres": "not offered: a replay keeps the key and what has happened"},
    ),
    _all("a record is forgotten after its retention, and its key is free"),
    _all("leases are renewed together"),
    _but(
        "a message is not acknowledged because another attempt has a claim",
        {"postgres": "kept: once it is counted on the record, which will be recovered"},
        postgres="test_a_duplicate_in_flight_is_counted_and_let_go",
    ),
    _but(
        "without the store nothing runs",
        {},
        postgres="test_an_attempt_waits_while_postgres_takes_no_writes_and_then_goes_on",
    ),
    _all(
        "a result beyond the limit is kept elsewhere or refused, never half written",
        postgres="test_a_result_that_cannot_be_kept_fails_and_commits_no_effect",
    ),
    _all("random programs end as an oracle says"),
)


def promise(words: str, *, of: str | None = None) -> Callable[[T], T]:
    """Mark a test as one that shows a promise. `of`: the store that it is about, if none is among its parameters."""
    if words not in {each.words for each in PROMISES}:
        raise ValueError(f"no such promise: {words}")
    return pytest.mark.promise(words, of=of)


def tests_of(words: str) -> list[str]:
    """The names of the tests here that show a promise, as they are written."""
    found = []
    for module in sorted(HERE.glob("test_*.py")):
        for node in ast.parse(module.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any(_says(each, words) for each in node.decorator_list):
                found.append(node.name)
    return found


def _says(decorator: ast.expr, words: str) -> bool:
    match decorator:
        case ast.Call(func=ast.Name(id="promise"), args=[ast.Constant(value=said)]):
            return bool(said == words)
    return False


def table() -> str:
    """The table of docs/stores.md."""
    names = {"postgres": "Postgres", "redis": "Redis", "dynamodb": "DynamoDB"}
    lines = [f"| promise | {' | '.join(names.values())} | shown by |", "|---|---|---|---|---|"]
    for each in PROMISES:
        tests = [f"`{name}`" for name in dict.fromkeys([*tests_of(each.words), *each.elsewhere.values()])]
        verdicts = " | ".join(each.verdicts[store] for store in STORES)
        lines.append(f"| {each.words} | {verdicts} | {', '.join(tests)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    page = HERE.parents[1] / "docs" / "stores.md"
    begin, end = "<!-- written by tests/stores/promises.py -->\n", "<!-- end -->"
    before, _, rest = page.read_text().partition(begin)
    page.write_text(f"{before}{begin}\n{table()}\n{end}{rest.partition(end)[2]}")
