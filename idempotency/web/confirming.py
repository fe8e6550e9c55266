"""What a person has read before they confirm it: a form names each warning that its page has shown, and no other is confirmed."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

from ..operate.replay import ToConfirm


def digest(warning: ToConfirm) -> str:
    """What a form has in a warning's place: 8 characters, others once it says anything else."""
    return hashlib.sha256(repr(warning).encode()).hexdigest()[:8]


def read_of(warnings: Sequence[ToConfirm], digests: Collection[str]) -> list[ToConfirm]:
    """Those of these warnings that were shown as these digests."""
    return [each for each in warnings if digest(each) in digests]
