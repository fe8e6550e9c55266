"""What the input says of the orders: a purchase's id decides what is ordered, how much there is, and what its buyer does.

The check computes from this, and not from the application's tables, how each order may have ended.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b

from demo.faults import CARRIER_FAULTS, PROVIDER_FAULTS
from demo.input import Line
from sandbox.faults import fires
from tasks.validation import MAX_QUANTITY

ARTICLES = 12
# An article of which half the pieces are there that are ordered.
SCARCE = "article-scarce"
# Shares of the purchases.
OF_NOTHING_IN_STOCK, OF_SCARCE, CANCELLED = 0.05, 0.15, 0.1
# Of the purchases, by the branches of tasks/branches.py. "label refused" is the carrier's to decide.
RETURNED = {
    "approved": 0.1,
    "damaged": 0.06,
    "rejected": 0.03,
    "reshipped": 0.04,
    "reship refused": 0.03,
    "cancelled": 0.04,
    "cancelled late": 0.02,
    "no pick-up": 0.03,
    "late parcel": 0.03,
    "no inspection": 0.02,
    "late inspection": 0.02,
}
LABEL_REFUSED = "label refused"
# What the warehouse finds, if it ever has the parcel; one that comes too late is not used.
VERDICTS = {
    "late inspection": "DAMAGED",
    "approved": "APPROVED",
    "damaged": "DAMAGED",
    "rejected": "REJECTED",
    "reshipped": "REJECTED",
    "reship refused": "REJECTED",
}
# Seconds after the order: some requests come too late.
LONGEST_HESITATION = 20.0
_PIECES = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of one run. `seed`: also the provider's, which decides which cards are declined.

    `returned`: how much is returned, as a multiple of what `RETURNED` says.
    """

    seed: int
    returned: float = 1.0

    def article(self, line: Line) -> str | None:
        """What is ordered; None: nothing that is kept in stock."""
        if self._draws("nothing in stock", line.id, OF_NOTHING_IN_STOCK):
            return None
        if self._draws("scarce", line.id, OF_SCARCE):
            return SCARCE
        return f"article-{int(self._share('article', line.id) * ARTICLES)}"

    def hesitation(self, line: Line) -> float | None:
        """After how many seconds its buyer asks for the order to be cancelled; None: never."""
        if not self._draws("cancelled", line.id, CANCELLED):
            return None
        return self._share("hesitation", line.id) * LONGEST_HESITATION

    def is_declined(self, line: Line, order_id: str) -> bool:
        """Whether the provider declines the card."""
        return line.amount > 0 and fires(self.seed, "declined", order_id, PROVIDER_FAULTS["declined"])

    def branch(self, line: Line, order_id: str) -> str | None:
        """How the return of an order ends that is not cancelled; None: it is not returned."""
        share = self._share("returned", line.id) / self.returned
        for branch, rate in RETURNED.items():
            if (share := share - rate) < 0:
                is_refused = fires(self.seed, "label_refused", return_of(order_id), CARRIER_FAULTS["label_refused"])
                return LABEL_REFUSED if is_refused else branch
        return None

    def deliveries(self, lines: Iterable[Line]) -> Counter[str]:
        """How many pieces of each article are there before the first order."""
        wanted: Counter[str] = Counter()
        for line in lines:
            article = self.article(line)
            if article is not None:
                with suppress(ValueError):  # it will be refused
                    wanted[article] += pieces(line)
        wanted[SCARCE] //= 2
        return +wanted

    def _draws(self, what: str, id: str, rate: float) -> bool:
        return self._share(what, id) < rate

    def _share(self, what: str, id: str) -> float:
        """A number from 0 to 1, another for each id."""
        digest = blake2b(f"{self.seed}\0{what}\0{id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest) / 2**64


def return_of(order_id: str) -> str:
    """The id of an order's return."""
    return f"return-{order_id}"


def pieces(line: Line) -> int:
    """How many pieces a purchase is of. Raises `ValueError`."""
    number = int(line.quantity) if _PIECES.fullmatch(line.quantity) else 0
    if not 1 <= number <= MAX_QUANTITY:
        raise ValueError(f"quantity: must be an integer between 1 and {MAX_QUANTITY}, got {line.quantity[:20]!r}")
    return number
