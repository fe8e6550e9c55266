"""The ways in which a return ends if each thing happens at most once, and no event crosses a cancel. `python -m tasks.branches` draws them.

tests/returns/test_events.py has what else may come together.

Tests take each branch and compare what they find with this list, and docs/returns.md with the list.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Branch:
    """`when` it is taken, after which status of the return, and what is there at its end.

    `problem`: of the row. `label` COLLECTED, VOIDED, or None without one. `goods`: the movement that is booked. `refunded`:
    whether the buyer has the money. `cases`: what a person has to see to.
    """

    when: str
    after: str
    status: str
    problem: str | None = None
    label: str | None = "COLLECTED"
    goods: str | None = None
    refunded: bool = False
    cases: tuple[str, ...] = ()
    # whether its saga is undone, and FAILED
    undone: bool = False


BRANCHES: dict[str, Branch] = {
    "label refused": Branch("the carrier makes no label", "REQUESTED", "ABORTED", "address_not_served", label=None),
    "cancelled": Branch(
        "a person cancels it, and nothing was collected",
        "LABELLED",
        "CANCELLED",
        "cancelled",
        label="VOIDED",
        undone=True,
    ),
    "saga fails": Branch(
        "its saga fails before the pick-up, by a defect of ours",
        "REQUESTED",
        "ESCALATED",
        "attempts_exhausted",
        label="VOIDED",
        cases=("attempts_exhausted",),
        undone=True,
    ),
    "no pick-up": Branch(
        "no pick-up in 5 days", "LABELLED", "ESCALATED", "no_pickup", label="VOIDED", cases=("no_pickup",)
    ),
    "label not void": Branch(
        "no pick-up in 5 days, and the label cannot be voided",
        "LABELLED",
        "ESCALATED",
        "no_pickup, label_not_void",
        label="CREATED",
        cases=("no_pickup", "label_not_void"),
    ),
    "late parcel": Branch(
        "it is collected after the 5 days, before its label is voided",
        "LABELLED",
        "ESCALATED",
        "no_pickup",
        cases=("no_pickup", "late_parcel"),
    ),
    "cancelled late": Branch(
        "a person cancels it, and it was collected",
        "IN_TRANSIT",
        "ESCALATED",
        "cancelled",
        cases=("cancelled",),
        undone=True,
    ),
    "no inspection": Branch(
        "no verdict in 14 days", "IN_TRANSIT", "ESCALATED", "no_inspection", cases=("no_inspection",)
    ),
    "late inspection": Branch(
        "no verdict in 14 days, and it comes later",
        "IN_TRANSIT",
        "ESCALATED",
        "no_inspection",
        cases=("no_inspection", "late_inspection"),
    ),
    "approved": Branch("APPROVED", "INSPECTED", "REFUNDED", goods="returned", refunded=True),
    "damaged": Branch("DAMAGED", "INSPECTED", "REFUNDED", goods="quarantined", refunded=True),
    "refund fails": Branch(
        "APPROVED, and the refund fails for good",
        "INSPECTED",
        "ESCALATED",
        "refund_failed",
        goods="returned",
        cases=("refund_failed",),
    ),
    "goods not booked": Branch(
        "APPROVED, and the stock cannot be booked",
        "INSPECTED",
        "ESCALATED",
        "goods_not_booked",
        refunded=True,
        cases=("goods_not_booked",),
    ),
    "both fail": Branch(
        "APPROVED, and both the refund and the booking fail for good",
        "INSPECTED",
        "ESCALATED",
        "goods_not_booked, refund_failed",
        cases=("goods_not_booked", "refund_failed"),
    ),
    "cancelled at last": Branch(
        "a person cancels it during the refund of an APPROVED one",
        "INSPECTED",
        "ESCALATED",
        "cancelled, already_refunded, already_booked",
        goods="returned",
        refunded=True,
        cases=("cancelled", "already_refunded", "already_booked"),
        undone=True,
    ),
    "rejected": Branch("REJECTED", "INSPECTED", "REJECTED"),
    "reshipped": Branch("REJECTED, and the buyer wants it back", "INSPECTED", "REJECTED"),
    "reship refused": Branch(
        "REJECTED, and the carrier makes no second label",
        "INSPECTED",
        "ESCALATED",
        "reship_refused",
        cases=("reship_refused",),
    ),
}
AHEAD = (
    ("REQUESTED", "LABELLED", "a label"),
    ("LABELLED", "IN_TRANSIT", "collected"),
    ("IN_TRANSIT", "INSPECTED", "a verdict"),
)
GOODS = {"returned": "can be ordered again", "quarantined": "in quarantine", None: ""}


def diagram() -> str:
    """The statuses of a return and what leads from one to the next, as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", "  [*] --> REQUESTED", *(f"  {a} --> {b}: {why}" for a, b, why in AHEAD)]
    lines += [f"  {each.after} --> {each.status}: {each.when}" for each in BRANCHES.values()]
    lines += [f"  {status} --> [*]" for status in dict.fromkeys(each.status for each in BRANCHES.values())]
    return "\n".join(lines)


def table() -> str:
    """The branches as a table of Markdown."""
    rows = ["| when | return | problem | label | goods | money | case for a person |", "|---|---|---|---|---|---|---|"]
    for each in BRANCHES.values():
        cells = (
            each.when,
            f"`{each.status}`" + (", saga undone" if each.undone else ""),
            f"`{each.problem}`" if each.problem else "",
            (each.label or "none").lower(),
            GOODS[each.goods],
            "refunded" if each.refunded else "",
            ", ".join(f"`{case}`" for case in each.cases),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(f"```mermaid\n{diagram()}\n```\n\n{table()}")  # noqa: T201
