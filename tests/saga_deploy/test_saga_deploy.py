"""Sagas that wait while their code changes under them, with real workers; and the checker of that."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.saga_deploy import books
from tests.saga_deploy.application import GO, NEW, OLD
from tests.saga_deploy.books import Book
from tests.saga_deploy.run import run


@pytest.mark.long
@pytest.mark.timeout(240)
def test_sagas_go_on_across_a_deploy_and_a_bad_one_stops_them(environment: dict[str, str], database: str) -> None:
    told: list[str] = []
    result = run(environment, database, 40, lambda what, ended: told.append(what))
    assert result.wrong == []
    assert result.has_shown_all, result


def well() -> dict[str, Book]:
    path = ["step open", f"wait {GO}", "step close", "call deploys.act"]
    return {"t1": Book("appended", "COMPLETED", None, path, [], [("open", OLD), ("close", NEW), ("tell", NEW)])}


DOCTORED: dict[str, Callable[[Any], Any]] = {
    "a deed done twice": lambda book: book.deeds.append(("close", NEW)),
    "a deed that is missing": lambda book: book.deeds.pop(),
    "a path that another code goes": lambda book: book.path.pop(),
    "an end that is none": lambda book: setattr(book, "status", "RUNNING"),
    "a row that is still open": lambda book: book.open.append("call deploys.act"),
    "a letter that is still open": lambda book: book.letters.append(("saga_mismatch", True)),
}


@pytest.mark.parametrize("what", DOCTORED)
def test_the_books_of_a_deploy_show(what: str) -> None:
    assert books.wrong(well(), set()) == []
    doctored = copy.deepcopy(well())
    DOCTORED[what](doctored["t1"])
    assert books.wrong(doctored, set())


def test_a_saga_that_was_changed_by_code_that_does_not_fit_is_seen() -> None:
    letter = (f"recorded as number 2 is the wait {GO!r}; the code has the step 'approve'", True)
    stopped = Book("mismatched", "RUNNING", "saga_mismatch", ["step open", f"wait {GO}"], [f"wait {GO}"])
    stopped.deeds, stopped.letters = [("open", OLD)], [letter]
    assert books.not_stopped_well({"t1": stopped}) == []
    changes: list[dict[str, Any]] = [{"status": "COMPENSATING"}, {"deeds": []}, {"letters": []}, {"open": []}]
    for change in changes:
        assert books.not_stopped_well({"t1": _with(stopped, change)})


def _with(book: Book, change: dict[str, Any]) -> Book:
    changed = copy.deepcopy(book)
    for name, value in change.items():
        setattr(changed, name, value)
    return changed
