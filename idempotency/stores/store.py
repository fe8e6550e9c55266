"""A store: where the record of an operation is kept if not in Postgres, and the few ways in which it changes.

A record here and the effects of a body are two commits. So a store promises less than `attempt/`: a crash between an
effect and its record repeats the effect. What it does keep is that one attempt at a time holds an operation, and that
whoever has lost it changes nothing: every write compares the fence and the token of its claim.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..errors import Unanswered, UnknownVersion
from ..store.answers import Busy, Claimed, Completed, Failed, Mismatch, Renewal
from ..wire import keys
from ..wire.keys import OperationId

# Seconds to wait for a store. A claim that waits longer is asked again; a renewal has to come back well within a lease.
TIMEOUT = 2.0
# Seconds for which the fence of an operation stays when it is dropped: clocks differ by less.
FENCE_KEPT = 3600.0


class PlaceAway(Exception):
    """The place of long results did not take one. Names the kind of error."""


class StoreAway(Exception):
    """A store did not answer, or could not do what was asked. Names the kind of error, and no address."""


class ClaimUnanswered(Unanswered):
    """A store did not answer a claim. `claims`: the tokens under which the record may be claimed, with nothing run: see `Watch`."""

    def __init__(self, claims: str) -> None:
        super().__init__()
        self.claims = claims


@dataclass(frozen=True, slots=True)
class StoreBusy(Busy):
    """Another attempt holds the operation, or it is released and not due yet.

    `seen`: what the record looked like, for the next claim by the same message. A store without a clock needs it to tell a
    holder that has died from one that is at work.
    """

    seen: str = ""


@dataclass(frozen=True, slots=True)
class Stored:
    """A record as it is. `state` is started, released, completed or failed; `holder` names the process of its last claim."""

    state: str
    fence: int
    attempts: int
    fingerprint: str
    holder: str
    result: str | None = field(default=None, repr=False)
    error: str | None = field(default=None, repr=False)

    @property
    def has_ended(self) -> bool:
        return self.state in ("completed", "failed")


@dataclass(frozen=True, slots=True)
class Watch:
    """What a claim may do to find out whether a holder is dead, where the store has no clock.

    `seen`: what an earlier claim by this message was answered. `rest` sleeps so many seconds, and may raise to end the waiting.
    `patience`: how many seconds the watch may last; the next claim carries it on. `unanswered`: tokens of earlier claims by this
    message, with spaces between them, that had no answer: one of these may be in the record, and nothing has run under it.
    """

    seen: str = ""
    rest: Callable[[float], object] = time.sleep
    patience: float = math.inf
    unanswered: str = ""


AT_ONCE = Watch()

Answer = Claimed | Completed | Failed | Mismatch | StoreBusy


def mismatch(fingerprint: str) -> Mismatch:
    """The answer for a record with another fingerprint. Raises `UnknownVersion` for one by a rule that newer code has."""
    version = keys.fingerprint_version(fingerprint)
    if version is not None and version not in keys.FINGERPRINT_RULES:
        raise UnknownVersion(f"fingerprint: made by rule {version}, which this version does not know")
    return Mismatch(1)


class Store(Protocol):
    """Records by operation. Every method raises `StoreAway` if the store does not answer; whoever asks again loses nothing.

    Durations are in seconds. What `complete`, `fail`, `release` and `drop` return says whether the change was made: False
    means that this claim holds the operation no more. Repeated with the same claim, they say the same again, so an answer
    that was lost is asked for once more.
    """

    # as docs/stores.md names it
    name: str
    # Characters that a result may have in the record; a longer one is kept elsewhere, or refused.
    room: int

    def claim(
        self,
        id: OperationId,
        *,
        token: str,
        fingerprints: Sequence[str],
        holder: str,
        lease: float,
        keep: float,
        watch: Watch = AT_ONCE,
    ) -> Answer:
        """Claim an operation under a new fence, higher than all before it, or say why not.

        The same token claims the same attempt again. `fingerprints`: of the arguments, by every known rule, that of new records
        first. `keep`: seconds for which a record is kept if nothing ends it. Raises `UnknownVersion` for a record of newer code.
        """

    def renew(self, held: Sequence[Claimed], *, lease: float, keep: float) -> dict[str, Renewal]:
        """Renew the leases of these claims. Returns what became of each, by token: UNKNOWN if this claim itself has ended meanwhile."""

    def complete(self, held: Claimed, result: str, *, retention: float) -> bool:
        """End the operation with a result, which answers duplicates for `retention` seconds."""

    def fail(self, held: Claimed, error: str, *, retention: float) -> bool:
        """End the operation as failed, for `retention` seconds; then its key is free."""

    def release(self, held: Claimed, *, delay: float, keep: float, give_back: bool) -> bool:
        """Let go: the next claim succeeds after `delay` seconds. With `give_back`, this attempt is not counted."""

    def drop(self, id: OperationId) -> bool:
        """Forget an operation that has ended, so that its key is free. False: it has not ended, or there is none."""

    def read(self, id: OperationId) -> Stored | None:
        """The record as it is now."""

    def with_own_connections(self) -> Store:
        """The same store over separate connections: under gevent no socket may serve two threads."""

    def close(self) -> None:
        """Close the connections."""
