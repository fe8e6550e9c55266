"""What the search has to find: a wrong end, the case that shows it, and the safeguard that keeps it away.

With its safeguard in place the whole case is clean; without it the search finds the violation again.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.search.exploration import Run


@dataclass(frozen=True, slots=True)
class Finding:
    """`case` is explored with so many preemptions and kills until a schedule breaks `rule` with `what` in its text."""

    name: str
    case: str
    preemptions: int
    rule: str
    what: str
    safeguards: tuple[str, ...]

    def is_in(self, done: Run) -> bool:
        return any(each.rule == self.rule and self.what in each.what for each in done.violations)


FINDINGS = (
    Finding("a former holder's write", "plain/attempt+takeover", 1, "I4", "made a held record completed", ("fence",)),
    Finding(
        "an ending outlives its attempt", "lost/attempt+takeover", 1, "I28", "which never ran its body", ("own_ending",)
    ),
    Finding(
        "attempts used up over an open effect",
        "always_lost/attempt+relay",
        0,
        "I27",
        "attempts_exhausted over",
        ("verdict",),
    ),
    Finding("cancelled over an open effect", "lost/attempt+cancel_anyway", 0, "I27", "cancelled over", ("verdict",)),
    Finding("given up over an open effect", "open/relay+message_dies", 0, "I27", "delivery_limit over", ("verdict",)),
    Finding(
        "a refused repeat closes the first call",
        "lost_refused/attempt+relay",
        0,
        "I27",
        "did not happen, and the provider has",
        ("refused_repeat",),
    ),
    Finding("an undo is not run", "declined/attempt+replay", 0, "I31", "reserved are 1000", ("undos",)),
    Finding(
        "a replay skips a step that was undone",
        "declined/attempt+replay",
        0,
        "I31",
        "reserved are -1000",
        ("forgotten_steps",),
    ),
    Finding(
        "a dead copy ends what is released",
        "lost/attempt+dead_letter",
        0,
        "I29",
        "outbox row (retry)",
        ("elsewhere",),
    ),
    Finding(
        "a dead copy ends a fresh replay",
        "refused/dead_letter+replay",
        0,
        "I29",
        "outbox row (replay)",
        ("elsewhere", "generation"),
    ),
    Finding(
        "a dead copy ends what is sent again",
        "plain/resend+dead_letter",
        0,
        "I29",
        "outbox row (resend)",
        ("elsewhere",),
    ),
    Finding(
        "a replay's failure is told to nobody",
        "declined_twice/attempt+relay",
        0,
        "I3",
        "in generation 2, and on_failed was told declined of generation 1",
        ("told_again",),
    ),
    Finding("acknowledged against a dead eager call", "direct/attempt+eager", 1, "I2", "NO_ROUTE", ("eager_route",)),
    Finding(
        "acknowledged against a deferred eager call",
        "later/attempt+eager",
        1,
        "I2",
        "nothing will deliver it",
        ("eager_delivery",),
    ),
)
