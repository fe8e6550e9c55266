"""The edge: what the clients of a request were told is what is stored and what was done, and all were told the same."""

from __future__ import annotations

from collections.abc import Iterator

from tests.chaos.books import Books, code_of, name_of, rows_of, sha256
from tests.chaos.evidence import Answer, Id, Violation

# The middleware's answer about an operation that has failed.
FAILED = 500


def clients_are_told_the_same(books: Books) -> Iterator[Violation]:
    """I6: every final answer to a request is the same, byte for byte, and it is the stored one."""
    for id, answers in books.evidence.answers.items():
        different = sorted(set(answers))
        if len(different) > 1:
            told = ", ".join(f"{answer.status} {answer.body.decode()}" for answer in different)
            yield Violation("I6", name_of(id), f"clients were told {len(different)} different things: {told}")
        for answer in different:
            if (what := _contradiction(books, id, answer)) is not None:
                yield Violation("I6", name_of(id), f"a client was told {answer.status}, but {what}")


def _contradiction(books: Books, id: Id, answer: Answer) -> str | None:
    ended = books.ended(id)
    if ended is None:
        return "it has not ended"
    record = books.records[id][-1].row
    if ended == "failed":
        told, code = answer.problem.get("code"), code_of(record)
        return None if (answer.status, told) == (FAILED, code) else f"it has failed as {code}, not as {told}"
    expected = books.accepted[id].status if id in books.accepted else None
    if expected is not None and answer.status != expected:
        return f"{expected} was to come"
    if answer.status != record["response_code"]:
        return f"{record['response_code']} is stored"
    return None if record["result"] == sha256(answer.stored) else "another answer is stored"


def answered_is_done(books: Books) -> Iterator[Violation]:
    """I3: a request that was answered as carried out has written one row; another answer has left nothing at all."""
    for id, answers in books.evidence.answers.items():
        written = (rows_of(books, id, "entries") - rows_of(books, id, "reversals")).total()
        for status in sorted({answer.status for answer in answers}):
            if written != (status < 400):
                yield Violation("I3", name_of(id), f"answered with {status}, and its row is there {written} times")
        for event in books.events.get(id, []):
            # recovery and people write about many operations at once
            if event.verb not in ("complete", "fail", "release", "effect"):
                continue
            if event.verb == "complete" and event.new["response_code"] < 400:
                continue
            if left := {c.book for c in books.by_transaction[event.change.txid] if _is_work(c.book)}:
                yield Violation("I3", name_of(id), f"{event.verb} with rows in {', '.join(sorted(left))}")


def _is_work(book: str) -> bool:
    return book not in ("records", "dead_letters", "audit")
