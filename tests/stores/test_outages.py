"""Stores that are slow, a place of long results that is away, and clocks that differ."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Retry

from idempotency import OperationFailed, objects
from idempotency.store.answers import Claimed
from idempotency.stores import dynamodb
from idempotency.stores.dynamodb import DynamoDBStore
from idempotency.stores.redis import RedisStore
from idempotency.stores.store import StoreAway, Watch
from idempotency.wire.headers import UNANSWERED_HEADER
from idempotency.worker import waiting
from idempotency.worker.store_runtimes import close_store_runtimes, store_runtime_of
from tests.stores.scene import KEEP, LEASE, RETENTION, new_id
from tests.stores.test_tasks import ageing, copies, deliver, id_of, make, new_key, shop, store_of

__all__ = ["deliver", "shop"]
CLAIM: dict[str, Any] = {"fingerprints": ["v1:same"], "holder": "host|1", "lease": LEASE, "keep": KEEP}


class AnswersLost:
    """A store that does what it is asked, and whose answers come too late."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.name, self.room = store.name, store.room

    def __getattr__(self, name: str) -> Any:
        def late(*args: Any, **options: Any) -> Any:
            getattr(self._store, name)(*args, **options)
            raise StoreAway("TimeoutError")

        return late


def deliver_without_answers(shop: Celery, deliver: Any, task: Any, key: str, headers: dict[str, Any]) -> dict[str, Any]:
    """A delivery that gives up. Returns the headers of its copy."""
    with pytest.MonkeyPatch.context() as slow:
        slow.setattr(waiting, "PATIENCE", 0.0)
        runtime = store_runtime_of(shop, None)
        slow.setattr(runtime, "store", AnswersLost(runtime.store))
        assert isinstance(deliver(task, 1, key=key, headers=headers).value, Retry)
    (copy,) = copies(shop)
    return {UNANSWERED_HEADER: copy.headers[UNANSWERED_HEADER]}


@pytest.mark.long
def test_claims_whose_answers_are_late_are_no_attempts(shop: Celery, deliver: Any) -> None:
    """However many: nothing has run under them."""
    runs: list[int] = []
    task, key = make(shop, lambda self, value: runs.append(self.request.retries), max_attempts=1), new_key()
    headers: dict[str, Any] = {}
    for number in range(12):
        headers = deliver_without_answers(shop, deliver, task, key, headers)
        if number == 5:
            ageing(shop).lease_over(id_of(task, key))
    ageing(shop).lease_over(id_of(task, key))
    found = deliver(task, 1, key=key, headers=headers)
    assert found.state == "SUCCESS"
    assert len(runs) == 1


@pytest.mark.long
def test_a_death_after_a_claim_that_was_late_counts(shop: Celery, deliver: Any) -> None:
    """The message comes again with the same tokens: none is that of the attempt which died."""
    task, key = make(shop, lambda self, value: value, max_attempts=1), new_key()
    headers = deliver_without_answers(shop, deliver, task, key, {})
    id, store = id_of(task, key), store_of(shop)
    stored = store.read(id)
    assert stored is not None
    watch = Watch(unanswered=headers[UNANSWERED_HEADER])
    claimed: Any = store.claim(id, token="died", **CLAIM | {"fingerprints": [stored.fingerprint]}, watch=watch)
    assert (claimed.attempts, claimed.taken_over) == (1, False)
    assert isinstance(deliver(task, 1, key=key, headers=headers).value, Retry)  # it is held
    (copy,) = copies(shop)
    ageing(shop).lease_over(id)
    assert "no result after 1 attempt" in str(deliver(task, 1, key=key, headers=copy.headers).value)


def long(value: int) -> str:
    return "".join(chr(32 + (each * 7919 + value) % 94) for each in range(1_200_000))


@pytest.fixture
def place(shop: Celery, tmp_path: Path) -> Path:
    (tmp_path / "results").mkdir()
    shop.conf.idempotency_store_results_at = f"file://{tmp_path}/results"
    shop.conf.idempotency_compress_results_above = None
    close_store_runtimes(shop)
    return tmp_path / "results"


@pytest.mark.long
def test_while_the_place_of_long_results_is_away_the_attempts_count(
    shop: Celery, deliver: Any, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has had its effect; the last one ends the operation."""
    runs: list[int] = []

    def body(self: Any, value: int) -> str:
        runs.append(self.fence)
        return long(value)

    task, key = make(shop, body, max_attempts=2), new_key()
    monkeypatch.setattr(waiting, "PATIENCE", 0.0)
    monkeypatch.setattr(objects, "keep", lambda *given: 1 / 0)
    assert isinstance(deliver(task, 1, key=key).value, Retry)
    copies(shop)
    ageing(shop).due(id_of(task, key))
    assert "store_results_at does not take one: ZeroDivisionError" in str(deliver(task, 1, key=key).value)
    assert len(runs) == 2
    again = deliver(task, 1, key=key).value
    assert isinstance(again, OperationFailed)
    assert "attempt 2 of 2" in str(again)
    assert len(runs) == 2


@pytest.mark.long
def test_a_place_that_is_away_for_a_moment_repeats_no_body(
    shop: Celery, deliver: Any, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []
    keep, away = objects.keep, [True]

    def kept(*given: Any) -> str:
        if away:
            away.pop()
            raise OSError("no route")
        return keep(*given)

    def body(self: Any, value: int) -> str:
        runs.append(self.fence)
        return long(value)

    monkeypatch.setattr(objects, "keep", kept)
    task, key = make(shop, body), new_key()
    assert deliver(task, 1, key=key).value == long(1)
    assert deliver(task, 1, key=key).value == long(1)
    assert (len(runs), away, len(list(place.iterdir()))) == (1, [], 1)


def test_after_drop_the_fence_grows_whatever_the_clocks_of_processes_say(
    dynamodb_store: DynamoDBStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, id = dynamodb_store, new_id()

    class Ahead:
        """The clock of one worker: two seconds ahead."""

        monotonic = staticmethod(time.monotonic)
        sleep = staticmethod(time.sleep)

        @staticmethod
        def time() -> float:
            return time.time() + 2.0

    with monkeypatch.context() as other:
        other.setattr(dynamodb, "time", Ahead)
        first: Any = store.claim(id, token="one", **CLAIM)
        assert store.complete(first, '"done"', retention=RETENTION)
    assert store.drop(id)
    assert store.read(id) is None
    second: Any = store.claim(id, token="two", **CLAIM | {"fingerprints": ["v1:other"]})
    assert second.fence > first.fence
    assert (second.attempts, second.taken_over) == (1, False)
    assert not store.drop(id)


def test_after_drop_the_fence_grows_also_if_the_clock_of_redis_is_set_back(redis_url: str) -> None:
    store, id = RedisStore(redis_url, service="shop", timeout=30.0), new_id()
    first: Any = store.claim(id, token="one", **CLAIM)
    ahead = first.fence + 60_000_000  # as of a claim a minute later, before the clock was set back
    store._client.hset(store._keys(id)[1], "fence", ahead)
    assert store.complete(Claimed(id, ahead, "one", 1, 1, 0.0, {}), '"done"', retention=RETENTION)
    assert store.drop(id)
    assert store.read(id) is None
    second: Any = store.claim(id, token="two", **CLAIM | {"fingerprints": ["v1:other"]})
    assert second.fence > ahead
    assert (second.attempts, second.taken_over) == (1, False)
    store.close()
