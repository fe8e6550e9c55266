"""The answers to a claim and to other statements that need a record, and the format of stored errors."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ..errors import PermanentError, UnknownVersion
from ..text import without_values
from ..wire import keys, results
from ..wire.keys import OperationId


@dataclass(frozen=True, slots=True)
class Claimed:
    """Claimed: run the body. `attempts` includes this one; `effects` are those of earlier attempts."""

    id: OperationId
    fence: int
    token: str
    attempts: int
    generation: int
    age: float  # seconds since the first claim of this generation
    effects: dict[str, dict[str, Any]]
    taken_over: bool = False  # from another holder, whose lease had run out
    revoked: bool = False  # this generation was revoked: end it, after a last look if an effect was begun
    fingerprint: str = ""  # as stored, perhaps by an older rule than the delivery's
    spent_at: int | None = None  # the first attempt that found all attempts used up
    has_hint: bool = True  # Redis may have one of this claim
    # When the claim was sent, by this process's monotonic clock: the lease cannot have begun earlier.
    asked_at: float = field(default_factory=time.monotonic)

    def resumes(self, earlier: Claimed) -> bool:
        """Whether this is the same attempt as an earlier claim with the same token.

        Decided by the count of attempts, because there may have been a claim in between whose answer was lost. Every
        claim in between was counted, and an attempt only ever takes back its own.
        """
        return (self.generation, self.attempts) == (earlier.generation, earlier.attempts)


def claim_of(id: OperationId, record: Any) -> Claimed:
    """The claim that a locked record is under, for an end by a person or a sweep."""
    return Claimed(id, record.fence, record.token or "", record.attempts, record.generation, 0.0, record.effects)


@dataclass(frozen=True, slots=True)
class Completed:
    """Completed before, with this result as stored text."""

    result: str
    # of a large one, what reads it is the runtime's
    _decode: Callable[[str], Any] = field(default=results.from_text, repr=False, compare=False)

    def value(self) -> Any:
        """The result. Raises `ResultErased`, `ResultUnreadable`, and what the place of large results raises."""
        return self._decode(self.result)


@dataclass(frozen=True, slots=True)
class Failed:
    """Failed before."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The key was used with different arguments."""

    generation: int


@dataclass(frozen=True, slots=True)
class Foreign:
    """The record belongs to another application, whose operation has the same tenant, task and key."""

    generation: int
    service: str


@dataclass(frozen=True, slots=True)
class Busy:
    """Another attempt holds it, or it is released and not due yet: for `due_in` seconds, if a claim has found that."""

    due_in: float | None = field(default=None, compare=False)
    # That it will be finished without this delivery is on disk: no duplicate has to be counted first.
    is_known: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Changed:
    """The row changed while the statement ran: ask again."""


@dataclass(frozen=True, slots=True)
class Stale:
    """The message is too old to be believed: its operation may have ended, and been purged since."""


Answer = Claimed | Completed | Failed | Mismatch | Foreign | Busy | Stale | Changed


class Renewal(StrEnum):
    HELD = "held"
    LOST = "lost"
    UNKNOWN = "unknown"  # the row is locked, or could not be read


def why_not(row: Any) -> Completed | Failed | Mismatch | Foreign | Busy | Changed:
    """Why the statement did not get the record. Raises `UnknownVersion` for a fingerprint by an unknown rule."""
    match row.answer:
        case "completed":
            return Completed(row.result)
        case "failed":
            return Failed(**error_fields(row.error))
        case "mismatch":
            version = keys.fingerprint_version(row.fingerprint)
            if version is not None and version not in keys.FINGERPRINT_RULES:
                raise UnknownVersion(f"fingerprint: made by rule {version}, which this version does not know")
            return Mismatch(row.generation)
        case "foreign":
            return Foreign(row.generation, row.service)
        case "busy":
            return Busy(getattr(row, "age", None))
        case _:
            return Changed()


# ---------------------------------------------------------------- stored errors


def error_text(
    code: str,
    message: str,
    cause: Mapping[str, Any] | None = None,
    on_failed_error: str | None = None,
    *,
    declined: bool = False,
) -> str:
    """Encode an error as JSON, without the values of rows: code and message, and what ended the operation if an open effect hides it.

    `on_failed_error`: why the application's rows do not say so. `declined`: by a provider or the application's own code.
    """
    fields: dict[str, Any] = {"code": code, "message": without_values(message)}
    if declined:
        fields["declined"] = True
    if cause:
        fields["cause"] = dict(cause)
    if on_failed_error is not None:
        fields["on_failed_error"] = without_values(on_failed_error)
    return json.dumps(fields)


def error_fields(text: str) -> dict[str, str]:
    """Decode a stored error, without its cause."""
    fields = json.loads(text)
    return {"code": fields["code"], "message": fields["message"]}


def permanent_error(message: str, code: str, *, declined: bool = False) -> PermanentError:
    """Rebuild an error, with the library's own class for each of its codes, so that `on_failed` can rely on types.

    `declined`: it was not the library's, whatever its code says.
    """
    for kind in () if declined else PermanentError.__subclasses__():
        if kind.__module__ == PermanentError.__module__ and kind.default_code == code:
            return kind(message, code)
    return PermanentError(message, code)


def stored_error(text: str, *, of_cause: bool = False) -> PermanentError:
    """Rebuild a stored error; `of_cause`: what an open effect hides, if it hides something."""
    fields = json.loads(text)
    if of_cause:
        fields = fields.get("cause") or fields
    return permanent_error(fields["message"], fields["code"], declined=fields.get("declined", False))
