"""The headers of a task message: ours, Celery's, the broker's, and those that a caller may give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import InvalidArguments
from .limits import beyond_limits

KEY_HEADER = "idempotency-key"
TENANT_HEADER = "idempotency-tenant"
# Set on outbox deliveries that repeat an earlier one (retry, recover, resend, replay). They are never acknowledged on
# the strength of a hint, because each may be the only delivery left.
ORIGIN_HEADER = "idempotency-origin"
# How often a duplicate with on_busy="wait" has come back.
WAITS_HEADER = "idempotency-waits"
# What its last delivery saw of the record in a store without a clock: if that is unchanged, its holder is watched.
SEEN_HEADER = "idempotency-seen"
# The tokens of claims that its earlier deliveries have asked for, and that had no answer: nothing has run under them.
UNANSWERED_HEADER = "idempotency-unanswered"
OUTBOX_HEADER = "idempotency-outbox-id"
# The id of a marker: a message whose arrival shows that everything queued before it has left the queue.
MARKER_HEADER = "idempotency-marker"
# The record's generation that this delivery is for: a copy from before a replay must not end the replayed operation.
GENERATION_HEADER = "idempotency-generation"
# Computed by the caller, so that a process that does not know the task can still identify the operation.
FINGERPRINT_HEADER = "idempotency-fingerprint"
# The application that sent the message: its dead letter goes to that application, whichever relay finds it.
SERVICE_HEADER = "idempotency-service"
# The version of the message's format; 1 if missing.
VERSION_HEADER = "idempotency-version"
MESSAGE_VERSION = 1
# Replaces Celery's `eta`, with which a worker would hold the message in memory and use its own clock; never stored.
ETA_HEADER = "idempotency-eta"
# The same, kept over every later delivery for the body to see. It delays nothing: an outbox row knows when it is due.
DUE_HEADER = "idempotency-due"
# Who has published a message, and when: see `signing`. Made for each delivery; not part of the stored message.
SIGNATURE_HEADER = "idempotency-signature"
# Set on a call after a task that had headers which decide over its message: their names. The guard makes it a dead letter.
REFUSED_HEADER = "idempotency-refused"
# Set on the way into the pool by a worker in which this task id is revoked; never stored or sent.
REVOKED_HEADER = "idempotency-revoked"

# The fields of Celery's message protocol 2 that travel as headers (docs.celeryq.dev, "Message Protocol").
PROTOCOL_HEADERS = (
    "lang",
    "task",
    "id",
    "shadow",
    "group",
    "group_index",
    "retries",
    "timelimit",
    "root_id",
    "parent_id",
    "argsrepr",
    "kwargsrepr",
    "origin",
    "ignore_result",
    "replaced_task_nesting",
    "stamped_headers",
    "stamps",
)
# Of Celery's message, the fields that decide what becomes of it; among the headers, each would replace Celery's own.
CELERYS_FIELDS = frozenset(
    ("task", "id", "eta", "expires", "retries", "timelimit", "group", "group_index", "root_id", "parent_id",
     "replaced_task_nesting")
)  # fmt: skip
_OURS = "idempotency-"
# Added by the relay to each delivery; not part of the stored message.
MARKS = (ORIGIN_HEADER, OUTBOX_HEADER, GENERATION_HEADER, SERVICE_HEADER, SIGNATURE_HEADER)
# Headers that the broker adds on a message's way; all others are its sender's.
_BROKERS_HEADERS = (
    "x-acquired-count", "x-death", "x-delivery-count", "x-first-death-", "x-last-death-", "x-opt-", "x-received-from",
    "x-shovelled", "x-stream-",
)  # fmt: skip
EMBEDDED = ("callbacks", "errbacks", "chain", "chord")
# The methods of Celery's `Context`, of which each header becomes an attribute.
_METHODS = ("as_execution_options", "clear", "get", "update", "_filter_x_death_headers", "_get_custom_headers")
# Where these are among the headers, a worker takes them for its own: no sender of Celery puts them there.
MISPLACED = (*EMBEDDED, *_METHODS, "_children", "_protected", "called_directly", "is_eager", "taskset")
# RabbitMQ gives a message to the routing keys in these headers, too, whatever its publisher has a right to.
COPIES = ("CC", "BCC")
# What a worker sets itself on such a `Context`, or takes from elsewhere in the message; and how kombu reads the body.
_SET_IN_A_WORKER = (
    "args", "kwargs", "children", "compression", "correlation_id", "delivery_info", "hostname",
    "logfile", "loglevel", "properties", "reply_to", "soft_time_limit", "time_limit", "utc",
)  # fmt: skip
# No caller may give these as headers, and among the nested ones of a tracing tool they are not read.
_REFUSED = CELERYS_FIELDS | frozenset((*PROTOCOL_HEADERS, *MISPLACED, *_SET_IN_A_WORKER, *COPIES))


def is_brokers(header: str) -> bool:
    """Whether the broker has added a header of this name, rather than the message's sender."""
    return header.startswith(_BROKERS_HEADERS)


def is_our_header(name: str) -> bool:
    """Whether a header of this name is one of ours."""
    return name.startswith(_OURS)


def refused_headers(given: Mapping[str, Any]) -> list[str]:
    """The names of those headers that no caller may give, because they decide what becomes of a message."""
    return sorted(_REFUSED & given.keys())


def senders_headers(given: Mapping[str, Any]) -> dict[str, Any]:
    """Of the headers that a caller gives, those that are its own; the key and the tenant, too, unless they came along.

    A body that passes its message's headers on, with a trace in them, means that. The key in them is its own operation's.
    Those of a message that a worker has received have a version. Raises `InvalidArguments` for a field of Celery's or too much.
    """
    if (beyond := beyond_limits(given, None, body_limit=0)) is not None:
        raise InvalidArguments(beyond)
    if fields := refused_headers(given):
        whose = "has RabbitMQ copy the message" if fields[0] in COPIES else "is a field of Celery's message"
        raise InvalidArguments(f"headers: {fields[0]!r} {whose}")
    return harmless_headers(given)


def harmless_headers(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same without the checks, and without what they refuse."""
    kept = () if VERSION_HEADER in given else (KEY_HEADER, TENANT_HEADER)
    others = {name: value for name, value in given.items() if name not in _REFUSED}
    return {
        name: value for name, value in others.items() if name in kept or not (is_our_header(name) or is_brokers(name))
    }


def all_headers(given: Mapping[str, Any]) -> dict[str, Any]:
    """A message's headers together with those inside its header `headers`, where tracing tools put a copy of theirs.

    Celery's `request.headers` would be that header alone. Ours and Celery's are only read outside it, where they are signed.
    """
    nested = given.get("headers") or {}
    theirs = {name: value for name, value in nested.items() if not (is_our_header(name) or name in _REFUSED)}
    return {name: value for name, value in {**theirs, **given}.items() if name not in COPIES}
