"""Numbers with their words, and how often an operation was tried."""

from __future__ import annotations

import pytest

from idempotency.text import attempts_made, number_of


@pytest.mark.parametrize(
    ("number", "said"), [(0, "0 letters"), (1, "1 letter"), (2, "2 letters"), (12_345, "12,345 letters")]
)
def test_a_number_has_the_word_that_fits(number: int, said: str) -> None:
    assert number_of(number, "letter") == said


def test_a_word_may_have_a_plural_of_its_own() -> None:
    assert [number_of(each, "process", "processes") for each in (1, 2)] == ["1 process", "2 processes"]


@pytest.mark.parametrize(
    ("attempts", "spent_at", "said"),
    [
        (0, None, "0 attempts"),
        (1, None, "1 attempt"),
        (3, None, "3 attempts"),
        # `retry` has noted that the next claim ends it
        (3, 4, "3 attempts"),
        (4, 4, "3 attempts, and 1 claim to end it"),
        (6, 4, "3 attempts, and 3 claims to end it"),
        # of a saga that is only to finish what has happened
        (1, 1, "0 attempts, and 1 claim to end it"),
    ],
)
def test_the_claim_that_ends_an_operation_is_no_attempt(attempts: int, spent_at: int | None, said: str) -> None:
    assert attempts_made(attempts, spent_at) == said
