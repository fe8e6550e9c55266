"""What a claim answers, and what else the store says of a record that could not be had."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ..errors import UnknownVersion
from ..wire import keys, results
from ..wire.keys import OperationId


@dataclass(frozen=True, slots=True)
class Claimed:
    """Ours: run the body. `attempts` counts this one; `effects` are those of earlier attempts."""

    id: OperationId
    fence: int
    token: str
    attempts: int
    generation: int
    age: float  # seconds since the first claim of this generation
    effects: dict[str, dict[str, Any]]
    first_claim: bool
    taken_over: bool = False  # from another holder, whose lease was over
    revoked: bool = False  # Celery was told to revoke this generation: it ends, with a last look at most
    fingerprint: str = ""  # as it is stored: perhaps by an older rule than the delivery's
    spent_at: int | None = None  # the attempt that first found the attempts used up
    # By this process's clock, when the claim was sent: the lease is no older, however late its answer was read.
    asked_at: float = field(default_factory=time.monotonic)

    def resumes(self, earlier: Claimed) -> bool:
        """Whether this is the same attempt as an earlier claim of the same token.

        The count tells, and not the token that the claim has found: the answer to another claim in between may have been
        lost. Each claim in between was counted; an attempt gives back only its own.
        """
        return (self.generation, self.attempts) == (earlier.generation, earlier.attempts)


@dataclass(frozen=True, slots=True)
class Completed:
    """Done before: here is the stored result, as the text it was stored in."""

    result: str

    def value(self) -> Any:
        return results.from_text(self.result)


@dataclass(frozen=True, slots=True)
class Failed:
    """Ended before, without success."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The key belongs to a request with other arguments."""

    generation: int


@dataclass(frozen=True, slots=True)
class Busy:
    """It is held, or its next delivery is not due yet."""


@dataclass(frozen=True, slots=True)
class Changed:
    """The row moved between the upsert and its explanation: ask again."""


Answer = Claimed | Completed | Failed | Mismatch | Busy | Changed


class Renewal(StrEnum):
    HELD = "held"
    LOST = "lost"
    UNKNOWN = "unknown"  # the row is locked, or could not be read


def explained(row: Any) -> Completed | Failed | Mismatch | Busy | Changed:
    """Why a record could not be had, from the statement that tried."""
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
        case "busy":
            return Busy()
        case _:
            return Changed()


# ---------------------------------------------------------------- the error as it is stored


def error_text(code: str, message: str, cause: Mapping[str, str] | None = None) -> str:
    """Write an error as it is stored: JSON with code and message, and what ended the operation beside an open effect."""
    return json.dumps({"code": code, "message": message} | ({"cause": dict(cause)} if cause else {}))


def error_fields(text: str) -> dict[str, str]:
    """Read an error as it is stored; without its cause."""
    fields = json.loads(text)
    return {"code": fields["code"], "message": fields["message"]}
