"""Every row of the state table, and what no row allows, of each store."""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from idempotency.errors import UnknownVersion
from idempotency.store.answers import Claimed, Completed, Failed, Mismatch, Renewal
from idempotency.stores.addresses import open_store
from idempotency.stores.dynamodb import DynamoDBStore
from idempotency.stores.store import StoreBusy
from idempotency.wire.keys import OperationId
from tests.stores.promises import promise
from tests.stores.scene import ERROR, KEEP, LEASE, RETENTION, Scene, new_id

# ---------------------------------------------------------------- claims


@promise("one claim at a time")
def test_a_new_operation_is_claimed_and_held(scene: Scene) -> None:
    held = scene.started(holder="host|7")
    assert (held.attempts, held.taken_over) == (1, False)
    assert held.fence > 0
    assert isinstance(scene.claim(held.id), StoreBusy)
    stored = scene.store.read(held.id)
    assert stored is not None
    assert (stored.state, stored.fence, stored.attempts, stored.holder) == ("started", held.fence, 1, "host|7")


@pytest.mark.few(1)
@promise("one claim at a time")
def test_of_many_who_race_for_one_key_exactly_one_wins(scene: Scene) -> None:
    for _ in range(5):
        answers = race(scene, 8)
        assert [type(each) for each in answers].count(Claimed) == 1
        assert {type(each) for each in answers} == {Claimed, StoreBusy}


@promise("one claim at a time")
def test_of_many_who_race_for_what_its_holder_has_left_exactly_one_wins(scene: Scene) -> None:
    for _ in range(3):
        dead = scene.started()
        scene.ageing.lease_over(dead.id)
        first = scene.claim(dead.id)
        answers = [first] if isinstance(first, Claimed) else race(scene, 6, dead.id, seen=first.seen)  # type: ignore[union-attr]
        won = [each for each in answers if isinstance(each, Claimed)]
        assert len(won) == 1
        assert (won[0].attempts, won[0].taken_over) == (2, True)


@pytest.mark.parametrize("scene", ["redis", "dynamodb"], indirect=True)
def test_a_claim_that_reads_and_then_writes_would_be_noticed(scene: Scene) -> None:
    """The race can be lost: with a look before each claim instead of a condition, several win."""
    won = 0
    for _ in range(5):
        id, barrier = new_id(), threading.Barrier(8)

        def look(_: int, id: Any = id, barrier: Any = barrier) -> bool:
            barrier.wait()
            return scene.store.read(id) is None

        with ThreadPoolExecutor(8) as threads:
            won += list(threads.map(look, range(8))).count(True)
    assert won > 5


def race(scene: Scene, many: int, id: Any = None, **options: Any) -> list[Any]:
    id, barrier = id or new_id(), threading.Barrier(many)

    def one(_: int) -> Any:
        barrier.wait()
        return scene.claim(id, **options)

    with ThreadPoolExecutor(many) as threads:
        return list(threads.map(one, range(many)))


def watched(scene: Scene, id: Any) -> float:
    """For how many seconds the holder was watched, as its item keeps it."""
    assert isinstance(scene.store, DynamoDBStore)
    return float(scene.store._get(id)["watched"])


@promise("a claim whose answer was lost is not made twice")
def test_the_same_token_claims_the_same_attempt(scene: Scene) -> None:
    first = scene.started(token="mine")
    again = scene.claim(first.id, token="mine")
    assert isinstance(again, Claimed)
    assert (again.attempts, again.taken_over) == (1, False)
    assert again.fence > first.fence
    assert not scene.store.complete(first, "1", retention=RETENTION)
    assert scene.store.complete(again, "1", retention=RETENTION)


@promise("who has died is replaced, under a higher fence")
def test_after_the_lease_another_claims_under_a_higher_fence(scene: Scene) -> None:
    dead = scene.started()
    other = scene.taken_over(dead.id)
    assert other.fence > dead.fence
    assert (other.attempts, other.taken_over) == (2, True)


@promise("who renews is not replaced")
def test_a_holder_that_renews_is_not_replaced(scene: Scene) -> None:
    held = scene.started()
    first = scene.claim(held.id)
    assert isinstance(first, StoreBusy)
    assert scene.store.renew([held], lease=LEASE, keep=KEEP) == {held.token: Renewal.HELD}
    assert isinstance(scene.claim(held.id, seen=first.seen), StoreBusy)
    assert scene.store.complete(held, "1", retention=RETENTION)


@promise("who renews is not replaced")
def test_a_renewal_during_the_watch_of_another_keeps_the_claim(scene: Scene) -> None:
    held = scene.started(lease=0.6)
    first = scene.claim(held.id)
    assert isinstance(first, StoreBusy)
    threading.Timer(0.2, lambda: scene.store.renew([held], lease=LEASE, keep=KEEP)).start()
    assert isinstance(scene.claim(held.id, seen=first.seen), StoreBusy)


@pytest.mark.parametrize("scene", ["dynamodb"], indirect=True)
def test_a_watch_is_carried_on_by_the_next_claim(scene: Scene) -> None:
    """As of a task whose time limit is shorter than the lease: no delivery of it could watch for that long."""
    dead = scene.started(lease=0.9)
    answer, begun, watches = scene.claim(dead.id), time.monotonic(), 0
    while isinstance(answer, StoreBusy):
        answer, watches = scene.claim(dead.id, seen=answer.seen, patience=0.25), watches + 1
        assert watches < 20
    assert isinstance(answer, Claimed)
    assert (answer.attempts, answer.taken_over) == (2, True)
    assert time.monotonic() - begun >= 0.9
    assert watches > 2


@pytest.mark.parametrize("scene", ["dynamodb"], indirect=True)
def test_of_two_who_watch_at_once_the_first_to_end_notes_its_time(scene: Scene) -> None:
    dead = scene.started(lease=60.0)
    first = scene.claim(dead.id)
    assert isinstance(first, StoreBusy)
    begun, may_end = threading.Event(), threading.Event()

    def rest(_: float) -> None:
        begun.set()
        assert may_end.wait(30)

    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(scene.claim, dead.id, seen=first.seen, patience=0.1, rest=rest)
        assert begun.wait(30)
        assert isinstance(scene.claim(dead.id, seen=first.seen, patience=0.2), StoreBusy)
        noted = watched(scene, dead.id)
        may_end.set()
        assert isinstance(other.result(), StoreBusy)
    assert 0.2 <= noted < 60
    assert watched(scene, dead.id) == noted


@pytest.mark.parametrize("scene", ["dynamodb"], indirect=True)
def test_a_renewal_ends_what_was_watched_before(scene: Scene) -> None:
    held = scene.started(lease=0.6)
    first = scene.claim(held.id)
    assert isinstance(first, StoreBusy)
    part = scene.claim(held.id, seen=first.seen, patience=0.5)
    assert isinstance(part, StoreBusy)
    assert part.seen == first.seen
    assert scene.store.renew([held], lease=0.6, keep=KEEP) == {held.token: Renewal.HELD}
    second = scene.claim(held.id, seen=part.seen, patience=0.5)
    assert isinstance(second, StoreBusy)
    assert isinstance(scene.claim(held.id, seen=second.seen, patience=0.3), StoreBusy)


@promise("a released operation waits until it is due")
def test_a_released_operation_is_busy_until_it_is_due(scene: Scene) -> None:
    held = scene.released(delay=600.0)
    early = scene.claim(held.id)
    assert isinstance(early, StoreBusy)
    assert early.due_in is not None
    assert 500 < early.due_in <= 600
    scene.ageing.due(held.id)
    again = scene.claim(held.id)
    assert isinstance(again, Claimed)
    assert (again.attempts, again.taken_over) == (2, False)
    assert again.fence > held.fence


def test_one_that_is_released_for_now_is_due(scene: Scene) -> None:
    held = scene.released(delay=0.0)
    assert isinstance(scene.claim(held.id), Claimed)


@promise("attempts are counted in the record")
def test_attempts_are_counted_and_given_back(scene: Scene) -> None:
    id = new_id()
    for expected, give_back in ((1, False), (2, True), (2, True), (2, False), (3, False)):
        held = scene.started(id)
        assert held.attempts == expected
        assert scene.store.release(held, delay=0.0, keep=KEEP, give_back=give_back)


# ---------------------------------------------------------------- ends


@promise("a duplicate gets the stored result, byte for byte")
@pytest.mark.parametrize(
    "result", ["null", "0", '""', "[]", "{}", "1e16", '{"b": 1, "a": "\\u0000"}', '"' + "é" * 999 + '"']
)
def test_a_duplicate_gets_the_stored_result_byte_for_byte(scene: Scene, result: str) -> None:
    held = scene.completed(result=result)
    assert scene.claim(held.id) == Completed(result)


@promise("a failed operation stays failed for its retention")
def test_a_failed_operation_is_answered_with_its_error(scene: Scene) -> None:
    held = scene.failed()
    assert scene.claim(held.id) == Failed("no_account", "no such account")


@promise("a record is forgotten after its retention, and its key is free")
@pytest.mark.parametrize("end", ["completed", "failed"])
def test_after_its_retention_the_key_is_free_and_the_fence_still_grows(scene: Scene, end: str) -> None:
    held = scene.completed() if end == "completed" else scene.failed()
    scene.ageing.forgotten(held.id)
    assert scene.state(held.id) is None
    # nor is there anything to be dropped or ended, in a store that deletes later
    assert scene.name == "postgres" or not scene.store.drop(held.id)
    assert not scene.store.complete(held, "9", retention=RETENTION)
    assert not scene.store.fail(held, ERROR, retention=RETENTION)
    again = scene.started(held.id)
    assert again.fence > held.fence
    assert (again.attempts, again.taken_over) == (1, False)
    assert not scene.store.complete(held, "9", retention=RETENTION)


@promise("the key of a failed operation can be freed by hand")
@pytest.mark.parametrize("scene", ["redis", "dynamodb"], indirect=True)
def test_only_what_has_ended_is_dropped_and_its_fence_still_grows(scene: Scene) -> None:
    held = scene.failed()
    assert scene.store.drop(held.id)
    assert not scene.store.drop(held.id)
    again = scene.started(held.id)
    assert again.fence > held.fence
    assert again.attempts == 1
    assert not scene.store.drop(held.id)
    assert scene.store.complete(again, "1", retention=RETENTION)
    assert scene.store.drop(held.id)


@promise("an end whose answer was lost is not refused")
@pytest.mark.parametrize("scene", ["redis", "dynamodb"], indirect=True)
def test_an_end_is_made_once_and_can_be_asked_for_again(scene: Scene) -> None:
    held = scene.started()
    assert [scene.store.complete(held, "1", retention=RETENTION) for _ in range(2)] == [True, True]
    held = scene.started()
    assert [scene.store.fail(held, ERROR, retention=RETENTION) for _ in range(2)] == [True, True]
    held = scene.started()
    assert [scene.store.release(held, delay=0.0, keep=KEEP, give_back=True) for _ in range(2)] == [True, True]
    assert scene.started(held.id).attempts == 1


# ---------------------------------------------------------------- who has lost its claim


STALE: dict[str, Callable[[Scene, Claimed], bool]] = {
    "complete": lambda scene, held: scene.store.complete(held, "9", retention=RETENTION),
    "fail": lambda scene, held: scene.store.fail(held, ERROR, retention=RETENTION),
    "release": lambda scene, held: scene.store.release(held, delay=0.0, keep=KEEP, give_back=False),
    "renew": lambda scene, held: scene.store.renew([held], lease=LEASE, keep=KEEP)[held.token] is Renewal.HELD,
}
THEN: dict[str, Callable[[Scene, Claimed], object]] = {
    "taken over": lambda scene, held: scene.taken_over(held.id),
    "taken over and completed": lambda scene, held: scene.store.complete(
        scene.taken_over(held.id), "1", retention=RETENTION
    ),
    "taken over and failed": lambda scene, held: scene.store.fail(
        scene.taken_over(held.id), ERROR, retention=RETENTION
    ),
    "taken over and released": lambda scene, held: scene.store.release(
        scene.taken_over(held.id), delay=60.0, keep=KEEP, give_back=False
    ),
}


@pytest.mark.few(16)
@promise("who has lost its claim changes nothing")
@pytest.mark.parametrize("since", THEN)
@pytest.mark.parametrize("write", STALE)
def test_who_has_lost_its_claim_changes_nothing(scene: Scene, since: str, write: str) -> None:
    held = scene.started()
    THEN[since](scene, held)
    before = scene.store.read(held.id)
    assert not STALE[write](scene, held)
    assert scene.store.read(held.id) == before


@promise("who has lost its claim changes nothing")
@pytest.mark.parametrize("write", STALE)
def test_a_fence_or_a_token_alone_changes_nothing(scene: Scene, write: str) -> None:
    held = scene.started()
    before = scene.store.read(held.id)
    for wrong in (replace(held, fence=held.fence - 1), replace(held, fence=held.fence + 1), replace(held, token="x")):
        assert not STALE[write](scene, wrong)
    assert scene.store.read(held.id) == before
    assert STALE[write](scene, held)


@promise("an ended operation stays as it ended")
@pytest.mark.parametrize("write", STALE)
@pytest.mark.parametrize("end", ["completed", "failed"])
def test_what_has_ended_changes_no_more(scene: Scene, end: str, write: str) -> None:
    held = scene.completed() if end == "completed" else scene.failed()
    before = scene.store.read(held.id)
    is_repeat = {"completed": "complete", "failed": "fail"}[end] == write
    assert bool(STALE[write](scene, held)) is (is_repeat and scene.name != "postgres")
    assert scene.store.read(held.id) == before


def test_a_late_holder_that_nobody_has_replaced_still_ends_it(scene: Scene) -> None:
    held = scene.started()
    scene.ageing.lease_over(held.id)
    assert scene.store.complete(held, "1", retention=RETENTION)
    assert scene.claim(held.id) == Completed("1")


@pytest.mark.parametrize("scene", ["redis", "dynamodb"], indirect=True)
def test_a_renewal_that_comes_after_the_end_of_its_claim_loses_nothing(scene: Scene) -> None:
    for held in (scene.completed(), scene.failed(), scene.released()):
        assert scene.store.renew([held], lease=LEASE, keep=KEEP) == {held.token: Renewal.UNKNOWN}


# ---------------------------------------------------------------- whose operation it is


@promise("the same key with other arguments is refused")
@pytest.mark.parametrize("state", ["started", "released", "completed", "failed"])
def test_a_key_with_other_arguments_is_refused_in_every_state(scene: Scene, state: str) -> None:
    held = getattr(scene, state)()
    before = scene.store.read(held.id)
    assert scene.claim(held.id, fingerprint="v1:other") == Mismatch(1)
    assert scene.store.read(held.id) == before
    assert not isinstance(scene.claim(held.id), Mismatch)


def test_the_fingerprint_by_another_known_rule_is_the_same_request(scene: Scene) -> None:
    held = scene.released(delay=0.0)
    again = scene.claim(held.id, fingerprint="v2:same", also=("v1:same",))
    assert isinstance(again, Claimed)
    assert again.fingerprint == "v1:same"


def test_the_fingerprint_by_a_rule_of_newer_code_is_no_other_request(scene: Scene) -> None:
    held = scene.started(fingerprint="v99:same")
    with pytest.raises(UnknownVersion, match="rule v99"):
        scene.claim(held.id)


@promise("tenants and tasks do not meet")
def test_tenants_and_tasks_do_not_meet(scene: Scene) -> None:
    held = scene.completed()
    for other in (replace(held.id, tenant="acme"), replace(held.id, task="another"), replace(held.id, key="k")):
        assert scene.state(other) is None
    assert isinstance(scene.claim(replace(held.id, tenant="acme"), fingerprint="v1:other"), Claimed)


# ---------------------------------------------------------------- beside others


@promise("leases are renewed together")
def test_each_of_several_renewals_has_its_own_answer(scene: Scene) -> None:
    mine, lost = scene.started(), scene.started()
    scene.taken_over(lost.id)
    found = scene.store.renew([mine, lost], lease=LEASE, keep=KEEP)
    assert found == {mine.token: Renewal.HELD, lost.token: Renewal.LOST}


def claim_in_process(addresses: list[str], key: str, number: int, gate: Any, answers: Any) -> None:
    stores = [open_store(address, service="shop", timeout=10.0) for address in addresses]
    for store in stores:
        store.read(OperationId("default", "t", key))  # connected
        gate.wait()
        options: dict[str, Any] = {"holder": "h", "lease": LEASE, "keep": KEEP}
        id = OperationId("default", "t", key)
        answer = store.claim(id, token=f"{number}", fingerprints=["v1:same"], **options)
        answers.put((store.name, type(answer).__name__))


@pytest.mark.long
def test_of_several_processes_exactly_one_wins(redis_url: str, dynamodb_address: str) -> None:
    apart = multiprocessing.get_context("spawn")
    gate, answers, key = apart.Barrier(3), apart.Queue(), new_id().key
    given = ([redis_url, dynamodb_address], key)
    started = [apart.Process(target=claim_in_process, args=(*given, number, gate, answers)) for number in range(3)]
    for each in started:
        each.start()
    got = [answers.get(timeout=60) for _ in range(6)]
    for each in started:
        each.join(10)
    expected = [(name, answer) for name in ("dynamodb", "redis") for answer in ("Claimed", "StoreBusy", "StoreBusy")]
    assert sorted(got) == expected


def test_no_key_and_no_argument_is_in_a_name(scene: Scene) -> None:
    held = scene.completed(result=json.dumps("secret"))
    assert held.id.key not in str(getattr(scene.store, "_keys", getattr(scene.store, "_key", lambda _: ""))(held.id))
