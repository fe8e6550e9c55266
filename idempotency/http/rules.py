"""What an answer means for its operation."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Literal

from ..errors import SettingsError
from .asgi import Headers

# They say nothing about the operation: the same request may be answered otherwise in a moment, after a login, with other
# headers, or at another address (301, 307, 308; a 302 or a 303 is how a form answers that it is done).
SAYS_NOTHING = frozenset(
    (301, 307, 308, 401, 403, 404, 405, 406, 407, 408, 411, 412, 413, 414, 415, 417, 421, 425, 426, 428, 429, 431)
)


class Rule(Enum):
    """What becomes of an operation whose handler has answered."""

    COMMIT = "commit"  # the session's writes are committed with the answer, which replays get
    REFUSE = "refuse"  # the session's writes are rolled back; replays get the answer
    RELEASE = "release"  # rolled back, and the answer is not kept: the next request runs the handler again
    FORGET = "forget"  # as RELEASE; and the key is free for another request, unless an effect or a step is recorded


ServerErrors = Literal["release", "store"]
SERVER_ERRORS = ("release", "store")


def by_status(status: int, server_errors: ServerErrors = "release") -> Rule:
    """The usual rule: below 400 commit, 4xx refuse, 5xx release; forget what says nothing about the operation."""
    if status in SAYS_NOTHING:
        return Rule.FORGET
    if status < 400:
        return Rule.COMMIT
    if status < 500:
        return Rule.REFUSE
    return Rule.REFUSE if server_errors == "store" else Rule.RELEASE


def rule_of(
    status: int, headers: Headers, decide: Callable[[int], Rule] | None, server_errors: ServerErrors = "release"
) -> Rule:
    """What an answer means: what `decide` says, or the usual. An error that asks to be sent again is not kept.

    Raises `SettingsError` if `decide` returns no `Rule`, and whatever it raises.
    """
    if decide is not None:
        rule = decide(status)
        if not isinstance(rule, Rule):
            raise SettingsError(f"decide: must return a Rule, got {type(rule).__name__} for the status {status}")
        return rule
    rule = by_status(status, server_errors)
    if rule is Rule.REFUSE and any(name == b"retry-after" for name, _ in headers):
        return Rule.FORGET if status < 500 else Rule.RELEASE
    return rule
