"""Dead letters of messages that name no operation, or that of another message: the letter and the position are one commit."""

from __future__ import annotations

from sqlalchemy import Connection

from ..attempt.runtime import Runtime
from ..observe.logs import log
from ..reasons import OF_MESSAGES, OTHER_CELL
from ..store import letters, stream_letters, streams
from ..store.answers import error_text
from ..store.letters import BrokerLetter
from ..store.streams import PartitionLost
from ..text import storable
from .declaring import Stream
from .message import VALUE_KEPT
from .partition import Partition
from .preparing import Refused

# Refused before it was known for which operation a message is.
WITHOUT_OPERATION = ("beyond_limit", "undecodable", "missing_key", "invalid_key")
# The letter's error, by its reason.
EXPLANATIONS = {
    "beyond_limit": "beyond a limit, so it was not decoded, and only its beginning is kept",
    "undecodable": "the value, or what came with it, could not be decoded",
    "missing_key": "no idempotency key",
    "invalid_key": "the idempotency key or the tenant breaks a rule",
    OTHER_CELL: OF_MESSAGES[OTHER_CELL],
    "fingerprint_mismatch": "this idempotency key was used with another value; only a message with another key can be handled",
    "service_mismatch": "this idempotency key is used by another application in this database",
}


def refuse(
    runtime: Runtime,
    stream: Stream,
    partition: Partition,
    refused: Refused,
    *,
    goes_on: bool,
    generation: int | None = None,
) -> bool:
    """Store a message as a dead letter, once, and move the position beyond it. `generation`: of the operation that has its key.

    False: it stays where it is until the letter is closed, because the stream does not go on. Raises `PartitionLost`.
    """
    settings, to = runtime.settings, refused.message.offset + 1
    tenant = settings.tenant if refused.delivery is None else refused.delivery.id.tenant
    digest = refused.message.digest(partition.place)
    with runtime.transaction(tenant) as connection:
        is_open = stream_letters.has_open_letter(connection, digest)
        if is_open is None:
            letters.store_message(connection, _letter(runtime, stream, refused, digest, tenant, generation))
        passes = goes_on or is_open is False
        if passes:
            streams.advance(connection, partition.held, to, lease=settings.lease, end=partition.end)
        elif is_open is None:
            _check_owner(connection, partition)
    if is_open is None:
        log.warning(
            "stream_message_refused", stream=stream.name, place=partition.place, offset=to - 1, reason=refused.reason
        )
    return passes


def _check_owner(connection: Connection, partition: Partition) -> None:
    """Raise `PartitionLost` if the partition is another's: its letter is that one's to store."""
    row = streams.lock(connection, partition.place)
    if row is None or row.fence != partition.held.fence:
        raise PartitionLost(partition.place)


def _letter(
    runtime: Runtime,
    stream: Stream,
    refused: Refused,
    digest: str,
    tenant: str,
    generation: int | None,
) -> BrokerLetter:
    delivery = refused.delivery
    kept = refused.message.kept(limit=VALUE_KEPT if refused.reason == "beyond_limit" else None)
    said = EXPLANATIONS[refused.reason] + (f": {storable(refused.detail)}" if refused.detail else "")
    return BrokerLetter(
        message_id=None,
        tenant=tenant,
        task=None if delivery is None else delivery.id.task,
        key=None if delivery is None else delivery.id.key,
        generation=generation,
        fingerprint=None if delivery is None else delivery.fingerprint,
        queue=stream.task,
        header_task=stream.task,
        service=runtime.settings.service,
        reason=refused.reason,
        first_error=None,
        last_error=error_text(refused.reason, said),
        attempts=0,
        headers=letters.headers_text(kept),
        payload="",
        digest=digest,
    )
