"""Whether a worker can go by a message's headers. The same rules hold where a call is made and where a message arrives.

Celery fails on some values, where nothing catches it, and takes others for attributes of its request; lines of a log must stay
lines. What is signed is not fit for that alone, and what is not signed anybody may have put into a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, tzinfo
from typing import Any

from celery.utils.time import maybe_iso8601, maybe_make_aware

from .headers import MISPLACED, VERSION_HEADER

# What Celery logs, of any message, and Flower shows: ids, and a name to be shown instead of the task's.
_SHOWN = ("id", "shadow", "root_id", "parent_id", "group")
_TIMES = ("eta", "expires")
# Seconds: longer than anybody waits for a task, and a number for every clock.
LONGEST_LIMIT = 10**9
# The options of a call that become headers of another name.
_OPTIONS = {"id": "task_id", "timelimit": "time_limit and soft_time_limit", "group": "group_id"}


def unfit(headers: Mapping[str, Any], zone: tzinfo) -> Iterator[tuple[str, str]]:
    """The headers of any task's message that a worker cannot go by: their names, and what each must be.

    `zone`: the application's, in which Celery reads times that have none.
    """
    for name in _SHOWN:
        if isinstance(value := headers.get(name), str) and not value.isprintable():
            yield name, "must be printable, in one line, with no spaces but ordinary ones"
    if type(headers.get(VERSION_HEADER, 1)) is not int:
        yield VERSION_HEADER, "must be an integer"
    for name in _TIMES:
        if headers.get(name) is not None and not is_time(headers[name], zone):
            yield name, "must be a time"
    if not _are_limits(headers.get("timelimit")):
        yield "timelimit", f"must be seconds from 0 to {LONGEST_LIMIT}, as numbers"
    names, stamps = headers.get("stamped_headers") or [], headers.get("stamps") or {}
    # Celery looks each up when the pool has room
    if not (isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)):
        yield "stamped_headers", "must be a list of names"
    if not isinstance(stamps, dict):
        yield "stamps", "must be an object"


def misplaced(headers: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Likewise the headers that no sender of an idempotent task makes."""
    if not isinstance(headers.get("headers"), dict | None):
        yield "headers", "must be an object"
    for name in MISPLACED:
        if headers.get(name) is not None:
            yield name, "is no header"


def first_unfit(headers: Mapping[str, Any], zone: tzinfo) -> str | None:
    """The first header with which a call of an idempotent task cannot be run, by the name of the option, and what it must be."""
    for name, what in (*unfit(headers, zone), *misplaced(headers)):
        return f"{_OPTIONS.get(name, name)}: {what}"
    return None


def is_time(value: Any, zone: tzinfo) -> bool:
    """Whether Celery reads a time from a header's value."""
    try:
        time_of(value, zone)
    except (ValueError, TypeError, AttributeError, OverflowError):
        return False
    return True


def time_of(value: Any, zone: tzinfo) -> datetime:
    """A time as Celery reads it from a header. Raises `ValueError`, `TypeError` and others for what is none."""
    time: datetime = maybe_make_aware(maybe_iso8601(value), zone)
    time.timestamp()
    return time


def _are_limits(value: Any) -> bool:
    try:
        limits = tuple(value or (None, None))
    except TypeError:
        return False
    # not True either; one that is negative would end its process before the claim, and so each that it comes to
    return len(limits) == 2 and all(
        limit is None or (type(limit) in (int, float) and 0 <= limit <= LONGEST_LIMIT) for limit in limits
    )
