"""Records in a table of DynamoDB: an item for each operation.

Every change is one conditional write. A claim begins as the write for a new record; where its condition fails, the answer
has the item, and what follows is decided from that: an answer, or a write that succeeds only if the item is still the same.

DynamoDB has no clock that a condition can read. So whether a holder has died is not judged by times that processes have
written, since their clocks differ: whoever wants its place watches the item. A holder that lives renews its lease, which
changes the number `renewals`; if fence and renewals stay the same for a whole lease, by the watcher's own monotonic clock, the
holder has lost it, by its own clock, too. To keep no slot of a worker busy with that, a claim watches only if an earlier one by
the same message has seen the item in the very same state (`seen`); otherwise it comes again after a pause. Where a task has a
time limit, the item keeps how long it was watched in this state, and the next delivery watches the rest, if any: a body has all
of its time, and none of it is spent on watching.

Wall clocks decide two things: when a released operation is due, and when a record has passed its retention (DynamoDB's own
deletion, by the attribute `expires_at`, may come days later). They have to agree far better than the shortest retention.
"""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ..extras import extra
from ..store.answers import Claimed, Completed, Failed, Mismatch, Renewal, error_fields
from ..wire.keys import OperationId
from .store import AT_ONCE, FENCE_KEPT, Answer, StoreAway, StoreBusy, Stored, Watch, mismatch

# Characters of a result. An item has at most 400 KB, of which its names and other attributes take some kilobytes.
ROOM = 380 * 1000
# The attributes that a table has to know: its key, and the one by which DynamoDB deletes.
KEY, EXPIRES = "id", "expires_at"
# An item that changes between a look and the write is looked at again, at most so often: more means that something is broken.
ROUNDS = 10
# How often a watcher looks in a lease. It stops watching at the first look that shows a renewal.
LOOKS = 6
# Seconds until a message comes back whose watch was cut short by its time limit.
WATCH_AGAIN = 1.0

_FAILED = "ConditionalCheckFailedException"
# The fence begins at the time in microseconds: it grows, too, for a key whose item was deleted.
_STARTED = """
SET #state = :started, #token = :token, fingerprint = :fingerprint, attempts = :attempts, opened = :opened, renewals = :zero,
    lease = :lease, holder = :holder, expires_at = :expires, fence = if_not_exists(fence, :first) + :one
REMOVE #result, #error, available_at
"""
_IS_NEW = "attribute_not_exists(id) OR attribute_not_exists(#state) OR expires_at < :now"  # without a state: dropped
_IS_SAME = "#state = :was AND fence = :fence AND #token = :seen_token AND renewals = :renewals"
_IS_MINE = "#state = :started AND fence = :fence AND #token = :token"
# When a watch is carried on: nothing was added to it since it was read, so that of two simultaneous watchers only the first to
# end counts.
_IS_FIRST = "(attribute_not_exists(watched_as) OR watched_as <> :mark)"
_GOES_ON = "watched_as = :mark AND watched = :before"
_NAMES = {"#state": "state", "#token": "token", "#result": "result", "#error": "error"}


class DynamoDBStore:
    """Records in a table of a region. Credentials and endpoint are boto3's: its environment variables, files and roles.

    `service`: the application, whose records are its own; `timeout`: seconds for a connection, and for one answer.
    """

    name = "dynamodb"
    room = ROOM

    def __init__(self, region: str, table: str, *, service: str, timeout: float) -> None:
        self._region, self._table, self._service, self._timeout = region, table, service, timeout
        self._clients: dict[int, Any] = {}

    def with_own_connections(self) -> DynamoDBStore:
        other = copy.copy(self)
        other._clients = {}
        return other

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        self._clients = {}

    def claim(
        self,
        id: OperationId,
        *,
        token: str,
        fingerprints: Sequence[str],
        holder: str,
        lease: float,
        keep: float,
        watch: Watch = AT_ONCE,
    ) -> Answer:
        asked_at, now = time.monotonic(), time.time()
        new = {":token": token, ":lease": lease, ":holder": holder, ":expires": int(now + keep), ":started": "started"}
        new |= {":zero": 0, ":one": 1, ":first": int(now * 1e6)}
        fresh = {":attempts": 1, ":opened": now, ":fingerprint": fingerprints[0]}

        def claimed(item: Mapping[str, Any], taken_over: bool = False) -> Claimed:
            number, age = int(item["attempts"]), max(now - item["opened"], 0.0)
            return Claimed(
                id,
                int(item["fence"]),
                token,
                number,
                1,
                age,
                {},
                taken_over=taken_over,
                fingerprint=item["fingerprint"],
                has_hint=False,
                asked_at=asked_at,
            )

        item, done = self._update(id, _STARTED, _IS_NEW, new | fresh | {":now": now})
        for _ in range(ROUNDS):
            if done:
                return claimed(item)
            if (answer := _answer(item, fingerprints, token, now)) is not None:
                return answer
            # its own, or an earlier one of this message, whose answer came too late: nothing has run under it
            is_mine = item["state"] == "started" and item["token"] in (token, *watch.unanswered.split())
            if item["state"] == "started" and not is_mine:
                if watch.seen != _mark(item):
                    return StoreBusy(seen=_mark(item))
                if (held := self._watch(id, item, watch)) is not None:
                    return held
                asked_at, now = time.monotonic(), time.time()
            same = {":was": item["state"], ":fence": item["fence"], ":seen_token": item["token"]}
            same |= {":renewals": item["renewals"]}
            kept = {":attempts": item["attempts"] + (not is_mine), ":opened": item["opened"]}
            kept |= {":fingerprint": item["fingerprint"], ":expires": int(now + keep)}
            was = item
            item, done = self._update(id, _STARTED, _IS_SAME, new | kept | same)
            if done:
                return claimed(item, taken_over=was["state"] == "started" and not is_mine)
            if "state" not in item or item[EXPIRES] < now:
                item, done = self._update(id, _STARTED, _IS_NEW, new | fresh | {":now": now})
        raise StoreAway(f"DynamoDB: the item has changed {ROUNDS} times under a claim")

    def renew(self, held: Sequence[Claimed], *, lease: float, keep: float) -> dict[str, Renewal]:
        change = "SET renewals = renewals + :one, lease = :lease, expires_at = :expires"
        values = {":one": 1, ":lease": lease, ":expires": int(time.time() + keep)}
        found = {}
        for each in held:
            item, done = self._update(each.id, change, _IS_MINE, values | _mine(each))
            # while the heartbeat was asking
            has_ended = [item.get(name) for name in ("fence", "token")] == [each.fence, each.token]
            found[each.token] = Renewal.HELD if done else Renewal.UNKNOWN if has_ended else Renewal.LOST
        return found

    def complete(self, held: Claimed, result: str, *, retention: float) -> bool:
        return self._end(held, "completed", "SET #result = :value,", {":value": result}, retention)

    def fail(self, held: Claimed, error: str, *, retention: float) -> bool:
        return self._end(held, "failed", "SET #error = :value,", {":value": error}, retention)

    def release(self, held: Claimed, *, delay: float, keep: float, give_back: bool) -> bool:
        change = "SET attempts = attempts - :back, available_at = :due,"
        return self._end(held, "released", change, {":back": int(give_back), ":due": time.time() + delay}, keep + delay)

    def drop(self, id: OperationId) -> bool:
        # the fence stays: the clock of who claims it next may be behind
        change = "SET expires_at = :expires REMOVE #state, #token, #result, #error, fingerprint"
        now, ended = time.time(), {":completed": "completed", ":failed": "failed"}
        values = ended | {":now": now, ":expires": int(now + FENCE_KEPT)}
        _, done = self._update(id, change, "#state IN (:completed, :failed) AND expires_at >= :now", values)
        return done

    def read(self, id: OperationId) -> Stored | None:
        item = self._get(id)
        if "state" not in item or item[EXPIRES] < time.time():
            return None
        return Stored(
            item["state"],
            int(item["fence"]),
            int(item["attempts"]),
            item["fingerprint"],
            item["holder"],
            item.get("result"),
            item.get("error"),
        )

    def create_table(self) -> None:
        """Make the table, paid by request, with deletion by `expires_at`. Raises botocore's errors, also if there is one."""
        client = self._client
        client.create_table(
            TableName=self._table,
            AttributeDefinitions=[{"AttributeName": KEY, "AttributeType": "S"}],
            KeySchema=[{"AttributeName": KEY, "KeyType": "HASH"}],
            BillingMode="PAY_PER_REQUEST",
        )
        client.get_waiter("table_exists").wait(TableName=self._table)
        client.update_time_to_live(
            TableName=self._table, TimeToLiveSpecification={"Enabled": True, "AttributeName": EXPIRES}
        )

    @property
    def endpoint(self) -> str:
        """The address of the server. Does not connect. Raises `MissingExtra`."""
        return str(self._client.meta.endpoint_url)

    def server(self) -> tuple[dict[str, Any], dict[str, Any], str]:
        """What the doctor looks at: the table, its time to live, and what time the server has. Raises `StoreAway`."""
        with _away():
            answer = self._client.describe_table(TableName=self._table)
            lives = self._client.describe_time_to_live(TableName=self._table)["TimeToLiveDescription"]
            return answer["Table"], lives, answer["ResponseMetadata"]["HTTPHeaders"].get("date", "")
        raise AssertionError("no condition was given, so none has failed")

    def _watch(self, id: OperationId, item: Mapping[str, Any], watch: Watch) -> StoreBusy | None:
        """None: the holder has not renewed for a whole lease, its own. Sleeps until that is known, or patience ends.

        Where patience has an end, that is only noted, and the next delivery takes the place.
        """
        lease, mark, state = float(item["lease"]), _mark(item), item["state"]
        before = float(item["watched"]) if item.get("watched_as") == mark else None
        begun = time.monotonic()
        if before is not None and before >= lease:
            return None
        until = begun + min(lease - (before or 0.0), watch.patience)
        while (left := until - time.monotonic()) > 0:
            watch.rest(min(left, lease / LOOKS))
            now = self._get(id)
            if not now or (_mark(now), now.get("state")) != (mark, state):
                return StoreBusy()
        watched = (before or 0.0) + time.monotonic() - begun
        if watched >= lease and math.isinf(watch.patience):
            return None
        same = {":was": state, ":fence": item["fence"], ":seen_token": item["token"], ":renewals": item["renewals"]}
        same |= {":watched": watched, ":mark": mark} | ({} if before is None else {":before": before})
        condition = f"{_IS_SAME} AND {_IS_FIRST if before is None else _GOES_ON}"
        self._update(id, "SET watched = :watched, watched_as = :mark", condition, same)
        return StoreBusy(0.0 if watched >= lease else WATCH_AGAIN, seen=mark)

    def _end(self, held: Claimed, state: str, change: str, values: dict[str, Any], keep: float) -> bool:
        values = values | _mine(held) | {":state": state, ":expires": int(time.time() + keep)}
        item, done = self._update(held.id, f"{change} #state = :state, expires_at = :expires", _IS_MINE, values)
        # or it was done before, and the answer was lost; unless that is forgotten by now, and only not yet deleted
        is_done = [item.get(name) for name in ("state", "fence", "token")] == [state, held.fence, held.token]
        return done or (is_done and item[EXPIRES] >= time.time())

    def _update(
        self, id: OperationId, change: str, condition: str, values: Mapping[str, Any]
    ) -> tuple[dict[str, Any], bool]:
        """Change an item if the condition holds. Returns the item as it is now, and whether it was changed."""
        said = f"{change} {condition}"
        with _away() as failed:
            answer = self._client.update_item(
                TableName=self._table,
                Key=self._key(id),
                UpdateExpression=" ".join(change.split()),
                ConditionExpression=condition,
                ExpressionAttributeNames={name: of for name, of in _NAMES.items() if name in said},
                ExpressionAttributeValues={name: _given(value) for name, value in values.items()},
                ReturnValues="ALL_NEW",
                ReturnValuesOnConditionCheckFailure="ALL_OLD",
            )
            return _read(answer["Attributes"]), True
        return _read(failed[0].get("Item") or {}), False

    def _get(self, id: OperationId) -> dict[str, Any]:
        with _away():
            answer = self._client.get_item(TableName=self._table, Key=self._key(id), ConsistentRead=True)
            return _read(answer.get("Item") or {})
        raise AssertionError("no condition was given, so none has failed")

    def _key(self, id: OperationId) -> dict[str, Any]:
        return {KEY: {"S": f"{self._service}:{id.digest}"}}

    @property
    def _client(self) -> Any:
        if os.getpid() not in self._clients:  # after a fork, two processes would use one connection
            self._clients = {os.getpid(): _new_client(self._region, self._timeout)}
        return self._clients[os.getpid()]


def _answer(
    item: Mapping[str, Any], fingerprints: Sequence[str], token: str, now: float
) -> Completed | Failed | Mismatch | StoreBusy | None:
    """What a claim is answered without a write; None: the item may be claimed."""
    if item["fingerprint"] not in fingerprints:
        return mismatch(item["fingerprint"])
    match item["state"]:
        case "completed":
            return Completed(item["result"])
        case "failed":
            return Failed(**error_fields(item["error"]))
        case "released" if item["available_at"] > now:
            return StoreBusy(item["available_at"] - now)
    return None


def _mark(item: Mapping[str, Any]) -> str:
    return f"{item['fence']:.0f}.{item['renewals']:.0f}"


def _mine(held: Claimed) -> dict[str, Any]:
    return {":fence": held.fence, ":token": held.token, ":started": "started"}


def _given(value: str | float) -> dict[str, str]:
    return {"S": value} if isinstance(value, str) else {"N": repr(value)}


def _read(item: Mapping[str, Any]) -> dict[str, Any]:
    """An item of ours as plain values: whole numbers and times."""
    return {name: _number(each["N"]) if "N" in each else each["S"] for name, each in item.items()}


def _number(text: str) -> int | float:
    return int(text) if text.lstrip("-").isdecimal() else float(text)


@contextmanager
def _away() -> Iterator[list[dict[str, Any]]]:
    """Turns what goes wrong into `StoreAway`, and an answer that a condition has failed into an item of this list."""
    from botocore.exceptions import BotoCoreError, ClientError

    failed: list[dict[str, Any]] = []
    try:
        yield failed
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "ClientError")
        if code != _FAILED:
            raise StoreAway(f"DynamoDB: {code}") from error
        failed.append(error.response)
    except (BotoCoreError, OSError) as error:
        raise StoreAway(f"DynamoDB: {type(error).__name__}") from error


def _new_client(region: str, timeout: float) -> Any:
    with extra("dynamodb"):
        import boto3
        from botocore.config import Config
    # Once more: a write whose answer was lost is found by its token.
    retries = {"mode": "standard", "total_max_attempts": 2}
    config = Config(connect_timeout=timeout, read_timeout=timeout, retries=retries)
    return boto3.session.Session().client("dynamodb", region_name=region, config=config)
