"""Servers that cannot be reached, as findings."""

from __future__ import annotations

from collections.abc import Callable

from amqp.exceptions import AMQPError
from kombu.exceptions import OperationalError as BrokerError
from redis import RedisError
from sqlalchemy.exc import ArgumentError, DBAPIError

from ..observe.unreachable import reason
from ..setting_values import NOT_AN_ADDRESS
from .findings import Finding, Level

# Seconds to wait for a server.
TIMEOUT = 5


def check_server(
    subject: str, setting: str, ask: Callable[[], list[Finding]], level: Level = Level.REFUSAL
) -> list[Finding]:
    """The findings about a server, or one of this level that says why there are none."""
    try:
        return ask()
    except (DBAPIError, RedisError, BrokerError, AMQPError, OSError) as error:
        return [Finding(level, subject, f"unreachable: {reason(error)}", f"check {setting} and the server")]
    except (ArgumentError, ValueError, KeyError, TypeError):
        return [Finding(level, setting, NOT_AN_ADDRESS, "correct it")]
