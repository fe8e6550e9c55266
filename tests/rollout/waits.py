"""How long operations were under way: from the commit that accepted each until its end, by the ledger."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

from tests.chaos.books import becomes, id_of, name_of
from tests.chaos.evidence import Id
from tests.chaos.ledgers import Change


@dataclass(frozen=True, slots=True, order=True)
class Wait:
    """Of one operation: seconds, from when, which, and who ended it."""

    seconds: float
    accepted: datetime
    id: Id
    # as it signs its lines
    ended_by: str

    def __str__(self) -> str:
        return f"{self.seconds:.1f} s {name_of(self.id)}"


def waits(changes: Sequence[Change], accepted: Collection[Id]) -> list[Wait]:
    """Of each of these that has ended, the slowest first. A request was accepted when its first attempt began."""
    began: dict[Id, datetime] = {}
    ended: dict[Id, Change] = {}
    for change in changes:
        if change.book not in ("outbox", "records"):
            continue
        id = id_of(change.row)
        began.setdefault(id, change.at)
        if change.book == "records" and (becomes(change, "completed") or becomes(change, "failed")):
            ended.setdefault(id, change)
    found = [
        Wait((ended[id].at - began[id]).total_seconds(), began[id], id, ended[id].writer)
        for id in accepted
        if id in ended
    ]
    return sorted(found, reverse=True)
