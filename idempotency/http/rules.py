"""What the status of an answer means for its operation."""

from __future__ import annotations

from enum import Enum
from typing import Literal

# They say nothing about the operation: the same request may be answered otherwise in a moment, or after a login.
SAYS_NOTHING = frozenset((401, 403, 404, 405, 406, 408, 413, 415, 421, 425, 426, 429, 431))


class Rule(Enum):
    """What becomes of an operation whose handler has answered."""

    COMMIT = "commit"  # the session's writes are committed with the answer, which replays get
    REFUSE = "refuse"  # the session's writes are rolled back; replays get the answer
    RELEASE = "release"  # rolled back, and the answer is not kept: the next request runs the handler again


ServerErrors = Literal["release", "store"]


def by_status(status: int, server_errors: ServerErrors = "release") -> Rule:
    """The usual rule: below 400 commit, 4xx refuse, except those that say nothing about the operation, 5xx release."""
    if status < 400:
        return Rule.COMMIT
    if status < 500:
        return Rule.RELEASE if status in SAYS_NOTHING else Rule.REFUSE
    return Rule.REFUSE if server_errors == "store" else Rule.RELEASE
