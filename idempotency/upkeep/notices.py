"""What is posted about an alert or an alarm besides its text, so that a program can act on it.

    {"text": …, "alerts": [{"reason": "card_declined", "service": "shop", "environment": "production", "count": 3,
                            "dead_letters": [71, 72, 73], "at_stake": ["3750 EUR"], "runbook": "https://…/declined.md",
                            "command": "idempotency dead-letters show 71"}]}

An alarm has its `name`, and what its page calls QUEUE, NAME or START as fields of these names in lower case; with `"over": true`
it is over. Ids of letters and names of queues and processes only: no keys, arguments or messages.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from celery import Celery
from sqlalchemy import Row

from ..reasons import page_of
from ..settings import Settings
from ..wire import encoding, keys
from ..wire.message import Message

# The most letters that an alert names, and whose amounts it adds up.
NAMED, COUNTED = 10, 1_000
# What `amount` of a task makes: a number, and perhaps its unit.
_AMOUNT = re.compile(r"(-?\d{1,30}(?:\.\d{1,10})?)(?: (\S{1,12}))?")


@dataclass(frozen=True, slots=True)
class Notice:
    """One alert or alarm. `command`: the first that its runbook's page says to type; `fields`: what else that page names."""

    reason: str
    service: str
    count: int
    command: str
    dead_letters: Sequence[int] = ()
    at_stake: Sequence[str] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)

    def document(self, settings: Settings) -> dict[str, Any]:
        """What is posted. Fields without a value are left out."""
        found = {
            "environment": settings.environment,
            "dead_letters": list(self.dead_letters),
            "at_stake": list(self.at_stake),
        }
        return {
            "reason": self.reason,
            "service": self.service,
            "count": self.count,
            **{name: value for name, value in found.items() if value},
            "runbook": runbook(settings, self.reason),
            "command": self.command,
            **self.fields,
        }


def runbook(settings: Settings, reason: str) -> str:
    """The address of the runbook's page about a reason or an alarm; its name where no address is set."""
    page = page_of(reason, settings.own_runbooks)
    at = settings.runbooks_at
    return page if at is None else f"{at.rstrip('/')}/{page}.md"


def at_stake(app: Celery, letters: Iterable[Row[Any]]) -> list[str]:
    """What these letters (`task`, `payload`) are about, added up by currency: `["1250 EUR"]`.

    Counts those whose task says so by its option `amount`, in whatever unit that is; a letter that cannot be read counts nothing.
    """
    sums: dict[str, Decimal] = defaultdict(Decimal)
    for letter in letters:
        if (said := _amount(app.tasks.get(letter.task), letter.payload)) is not None:
            sums[said[1]] += said[0]
    return [f"{number:f} {unit}".rstrip() for unit, number in sorted(sums.items())]


def _amount(task: Any, payload: str) -> tuple[Decimal, str] | None:
    template = getattr(task, "amount", None)
    if template is None:
        return None
    try:
        args, kwargs, _ = encoding.loads(Message.from_text(payload).body)
        arguments = keys.bind(task.signature_of_run, args, kwargs)
        text = template.format_map(arguments) if "{" in template else str(arguments[template])
    except Exception:  # whatever a letter holds: an alert must not fail for it
        return None
    found = _AMOUNT.fullmatch(text)
    return None if found is None or not text.isprintable() else (Decimal(found[1]), found[2] or "")
