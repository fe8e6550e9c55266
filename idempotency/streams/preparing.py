"""What a message is for, before anything is done with it: an operation with its event, or a reason to refuse it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..attempt.exits import Exited, exits_are_errors
from ..errors import InvalidKey, MissingKey, SettingsError, WrongCell
from ..reasons import OTHER_CELL
from ..settings import Settings
from ..store.statements import describe
from ..wire.delivery import Delivery
from .declaring import Stream
from .message import StreamMessage


@dataclass(frozen=True, slots=True)
class Prepared:
    """A message, its event, and the operation that it is for."""

    message: StreamMessage
    event: Any
    delivery: Delivery


@dataclass(frozen=True, slots=True)
class Refused:
    """A message that cannot be handled, and why: `reason` is one of the dead letters' reasons."""

    message: StreamMessage
    reason: str
    detail: str
    # The operation that it is for, if that is known.
    delivery: Delivery | None = None


def prepare(stream: Stream, message: StreamMessage, settings: Settings) -> Prepared | Refused:
    """What a message is for. Errors of the stream's own functions are reasons to refuse it.

    Raises `SettingsError` if it cannot be told which cell its tenant is of: nothing is wrong with the message then.
    """
    if (beyond := message.beyond()) is not None:
        return Refused(message, "beyond_limit", beyond)
    if message.unread is not None:
        return Refused(message, "undecodable", message.unread)
    try:
        with exits_are_errors():
            event = stream.event(message)
    except Exception as error:  # the application's function; its text may have the value in it
        return Refused(message, "undecodable", type(error).__name__)
    try:
        with exits_are_errors():
            delivery = stream.delivery(event, message, settings)
    except MissingKey as error:
        return Refused(message, "missing_key", str(error))
    except InvalidKey as error:
        return Refused(message, "invalid_key", str(error))
    except Exception as error:  # of a function for the key or the tenant
        return Refused(message, "invalid_key", describe(error))
    try:
        with exits_are_errors():
            settings.check_cell(delivery.id.tenant)
    except WrongCell as error:
        return Refused(message, OTHER_CELL, str(error), delivery)
    except Exited as error:
        raise SettingsError(f"idempotency_cell_of: {error}") from error
    return Prepared(message, event, delivery)


def prepare_many(stream: Stream, messages: Iterable[StreamMessage], settings: Settings) -> list[Prepared | Refused]:
    """What each message is for, up to the first whose cell cannot be told. Raises `SettingsError` if that is the first of all."""
    found: list[Prepared | Refused] = []
    for message in messages:
        try:
            found.append(prepare(stream, message, settings))
        except SettingsError:
            if not found:
                raise
            break
    return found


def share(prepared: Sequence[Prepared | Refused], alone: range) -> list[Prepared]:
    """The first of these messages that may share a transaction: of one tenant, and with one fingerprint for each key."""
    found: list[Prepared] = []
    fingerprints: dict[str, str] = {}
    for each in prepared:
        if isinstance(each, Refused) or each.message.offset in alone:
            break
        id = each.delivery.id
        if found and id.tenant != found[0].delivery.id.tenant:
            break
        if fingerprints.setdefault(id.key, each.delivery.fingerprint) != each.delivery.fingerprint:
            break
        found.append(each)
    return found
