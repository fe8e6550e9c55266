"""Which headers of a message that has arrived are kept with its record, or its letter, and sent again.

Anyone may have added headers to a copy, and a broker takes more than may be sent, because a relay adds its own. What is kept
has to go out again, for as long as the operation lives: else it is accepted and can never be delivered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..observe.traces import PARENT_HEADER, STATE_HEADER
from .headers import PROTOCOL_HEADERS
from .limits import too_much_to_send
from .signing import is_covered

# Of too many headers, the most characters of one that is not signed.
_SHORT = 512
# Those of a sender that every worker can do without are dropped then.
_KNOWN = frozenset((*PROTOCOL_HEADERS, PARENT_HEADER, STATE_HEADER))


def kept_headers(headers: Mapping[str, Any]) -> dict[str, Any]:
    """All headers, if they may be sent. Otherwise, of those that no signature covers, Celery's own and a trace's, if they are short."""
    if too_much_to_send(headers) is None:
        return dict(headers)
    return {name: value for name, value in headers.items() if is_covered(name) or (name in _KNOWN and _is_short(value))}


def _is_short(value: object) -> bool:
    return len(value) <= _SHORT if isinstance(value, str) else isinstance(value, int | float)
