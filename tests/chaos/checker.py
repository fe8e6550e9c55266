"""The checker: recomputes every invariant from the ledgers of a run, and from nothing that the library says.

    findings = check(Evidence(engine, accepted, acts=provider.acts, queues={"bank": 0}))
    assert not findings.violations

Each invariant is one small function over the books; `CHECKS` is the list of them. What it needs: the ledgers
(`ledgers.py`), what was accepted and what should come of it, what the provider outside wrote down, and what the broker
still holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tests.chaos.books import Books, surplus_rows, whereabouts
from tests.chaos.checks import delivery, edge, ends, forged, outside, records, upkeep
from tests.chaos.evidence import Accepted, Counts, Evidence, Findings, Id, Step, Violation

__all__ = ["CHECKS", "Accepted", "Counts", "Evidence", "Findings", "Id", "Step", "Violation", "check", "count"]


def check(evidence: Evidence) -> Findings:
    """Recompute every invariant. Everything that is wrong is in the findings, by key; nothing is raised."""
    books = Books(evidence)
    violations = tuple(violation for each in CHECKS for violation in each(books))
    return Findings(violations, count(books), books.changes)


CHECKS: tuple[Callable[[Books], Iterable[Violation]], ...] = (
    records.one_result_per_generation,
    delivery.everything_ends,
    records.rows_exactly_with_their_end,
    records.the_fence_only_grows,
    records.ended_is_ended,
    records.stored_results_are_the_expected,
    edge.clients_are_told_the_same,
    edge.answered_is_done,
    delivery.acknowledged_is_held_elsewhere,
    delivery.every_row_is_published,
    delivery.nothing_rolled_back_is_sent,
    delivery.ordered_by_commit,
    records.events_apply_once,
    outside.one_act_outside,
    outside.nothing_fails_over_an_effect,
    outside.the_books_agree,
    outside.undone_steps_are_forgotten,
    ends.failures_are_bounded_and_lettered,
    ends.attempts_are_used_before_they_are_exhausted,
    ends.every_failure_waits_for_a_person,
    ends.a_copy_ends_nothing_that_lives,
    ends.replays_are_one,
    ends.commands_count_once,
    delivery.nothing_disappears,
    upkeep.takeovers_are_justified,
    upkeep.purged_is_past_its_time,
    delivery.sweepers_do_not_add_up,
    upkeep.tenants_are_apart,
    forged.nothing_forged_took_effect,
    forged.letters_name_no_operation,
)


def count(books: Books) -> Counts:
    """How much of what there was."""
    found, lost = whereabouts(books)
    events = [event for each in books.events.values() for event in each]
    surplus = sum(number - 1 for _, _, number in surplus_rows(books))
    return Counts(
        accepted=found.total() + len(lost),
        completed=found["completed"],
        failed=found["failed"],
        dead=found["dead"],
        queued=found["queued"],
        lost=len(lost),
        doubled=surplus + sum(acts - 1 for acts in books.evidence.acts.values() if acts > 1),
        duplicated=sum(event.verb == "count" for event in events),
        takeovers=sum(event.verb in ("takeover", "recover") for event in events),
        fenced=books.evidence.fenced,
    )
