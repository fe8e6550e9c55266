"""What a deduplicated task promises, delivery by delivery, on Redis and on DynamoDB."""

from __future__ import annotations

import json
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import kombu.pools
import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery
from celery.exceptions import Ignore, Reject, Retry
from pydantic import SecretStr

import services
from idempotency import (
    DeduplicatedTask,
    Defer,
    FingerprintMismatch,
    InvalidArguments,
    InvalidKey,
    InvalidResult,
    MissingKey,
    OperationBusy,
    OperationFailed,
    PermanentError,
    SettingsError,
    installation,
)
from idempotency.attempt.heartbeat import Heartbeat
from idempotency.store.answers import Claimed
from idempotency.stores.store import Store, StoreAway, StoreBusy, Watch
from idempotency.wire import keys
from idempotency.wire.headers import KEY_HEADER, SEEN_HEADER, WAITS_HEADER
from idempotency.wire.keys import OperationId
from idempotency.wire.signing import signed_at
from idempotency.worker import coming_again, waiting
from idempotency.worker.absent import NotHere
from idempotency.worker.store_runtimes import close_store_runtimes, store_runtime_of
from tests.stores import application
from tests.stores.application import charge, failing, returning
from tests.stores.promises import STORES, promise
from tests.stores.scene import AgeingDynamoDB, AgeingRedis
from tests.support import crashing
from tests.support.deliveries import Deliveries
from tests.support.outside import OutsideWorld
from tests.support.processes import eventually


@pytest.fixture(params=STORES[1:])
def shop(request: pytest.FixtureRequest, servers: services.Services) -> Iterator[Celery]:
    """The application with one of the stores, in this process."""
    address = request.getfixturevalue("redis_url" if request.param == "redis" else "dynamodb_address")
    queue = f"stores-{uuid4().hex[:8]}"
    application.configure({"STORE": address, "STORE_QUEUE": queue, "BROKER_URL": servers.broker_url})
    before = dict(application.app.conf.changes)
    with application.app.connection_for_write() as connection:
        application.app.amqp.queues[queue](connection.default_channel).declare()
        yield application.app
        connection.default_channel.queue_delete(queue)
    for name in [name for name in application.app.tasks if name.startswith("test.")]:
        application.app.tasks.pop(name)
    application.app.conf.changes.clear()
    application.app.conf.changes.update(before)
    close_store_runtimes(application.app)
    kombu.pools.reset()


@pytest.fixture
def deliver(shop: Celery) -> Callable[..., Any]:
    return Deliveries(shop).deliver


def store_of(shop: Celery) -> Store:
    return store_runtime_of(shop, None).store


def ageing(shop: Celery) -> Any:
    store: Any = store_of(shop)
    return AgeingRedis(store) if store.name == "redis" else AgeingDynamoDB(store)


def new_key() -> str:
    return uuid4().hex


def make(shop: Celery, body: Callable[..., Any], **options: Any) -> Any:
    body.__name__ = "body"
    name = f"test.{uuid4().hex}"
    return shop.task(base=DeduplicatedTask, bind=True, name=name, shared=False, lazy=False, **options)(body)


def id_of(task: Any, key: str) -> OperationId:
    return OperationId("default", task.name, key)


def copies(shop: Celery) -> list[Any]:
    """The messages that wait in the queue, which are taken out."""
    name = shop.conf.task_default_queue
    found = []
    with shop.connection_for_read() as connection:
        queue = shop.amqp.queues[name](connection.default_channel)
        while (message := queue.get()) is not None:
            message.ack()
            found.append(message)
    return found


# ---------------------------------------------------------------- duplicates


@promise("a duplicate gets the stored result, byte for byte")
def test_a_duplicate_gets_the_stored_result_and_runs_nothing(deliver: Any, outside: OutsideWorld) -> None:
    account = new_key()
    first, second = (deliver(charge, account, outside.url) for _ in range(2))
    assert (first.state, second.state) == ("SUCCESS", "SUCCESS")
    assert first.value == second.value
    assert list(outside.calls.values()) == [1]


@pytest.mark.few(6)
@pytest.mark.parametrize("value", [None, 0, "", [], {}, False, 1e16, -0.0, "a\u0000b", {"b": 1, "a": {"c": []}}])
def test_every_result_survives_byte_for_byte(deliver: Any, value: Any) -> None:
    key = new_key()
    first, second = (deliver(returning, value, key=key) for _ in range(2))
    assert json.dumps(first.value) == json.dumps(second.value) == json.dumps(value)


@pytest.mark.few(1)
def test_a_long_result_is_compressed_and_read_again(shop: Celery, deliver: Any) -> None:
    key, value = new_key(), "x" * 200_000
    assert [deliver(returning, value, key=key).value for _ in range(2)] == [value] * 2
    stored = store_of(shop).read(id_of(returning, key))
    assert stored is not None
    assert len(stored.result or "") < 2000


@promise("a result beyond the limit is kept elsewhere or refused, never half written")
def test_a_result_beyond_the_limit_is_refused_and_nothing_of_it_is_stored(shop: Celery, deliver: Any) -> None:
    key = new_key()
    outcome = deliver(returning, "x" * 300_000, key=key)
    assert isinstance(outcome.value, InvalidResult)
    assert "262144" in str(outcome.value)
    stored = store_of(shop).read(id_of(returning, key))
    assert stored is not None
    assert (stored.state, stored.result) == ("failed", None)


@promise("a result beyond the limit is kept elsewhere or refused, never half written")
def test_a_result_beyond_the_limit_is_kept_elsewhere(shop: Celery, deliver: Any, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    shop.conf.idempotency_store_results_at = f"file://{tmp_path}/results"
    shop.conf.idempotency_compress_results_above = None
    close_store_runtimes(shop)
    key, value = new_key(), "ä" * 500_000
    assert [deliver(returning, value, key=key).value for _ in range(2)] == [value] * 2
    assert len(list((tmp_path / "results").glob("*/*"))) == 1
    for each in (tmp_path / "results").glob("*/*"):
        each.unlink()
    gone = deliver(returning, value, key=key)
    assert isinstance(gone.value, Ignore)


@promise("the same key with other arguments is refused")
def test_one_key_with_other_arguments_is_refused_and_runs_nothing(deliver: Any, outside: OutsideWorld) -> None:
    account = new_key()
    deliver(charge, account, outside.url, amount=5)
    refused = deliver(charge, account, outside.url, amount=6)
    assert isinstance(refused.value, FingerprintMismatch)
    assert deliver(charge, account, amount=5, url=outside.url).state == "SUCCESS"
    assert list(outside.calls.values()) == [1]


# ---------------------------------------------------------------- while another attempt runs


@promise("a message is not acknowledged because another attempt has a claim")
def test_a_duplicate_of_what_runs_comes_back_after_a_pause(
    shop: Celery, deliver: Any, outside: OutsideWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRASH_DIRECTORY", str(tmp_path))
    crashing.plan(tmp_path, "called", crashing.HOLD)
    account, done = new_key(), []
    thread = threading.Thread(target=lambda: done.append(deliver(charge, account, outside.url)))
    thread.start()
    eventually((tmp_path / "called.held").exists)
    duplicate = deliver(charge, account, outside.url, task_id="again")
    (tmp_path / "called.go").touch()
    thread.join()

    assert isinstance(duplicate.value, Retry)
    (copy,) = copies(shop)
    assert (copy.headers["id"], copy.headers[KEY_HEADER], copy.headers[WAITS_HEADER]) == ("again", account, 1)
    assert copy.headers["eta"] is not None
    assert copy.headers["retries"] == 0
    assert done[0].state == "SUCCESS"
    again = deliver(charge, account, outside.url, headers=ours(copy))
    assert (again.state, again.value) == ("SUCCESS", done[0].value)
    assert list(outside.calls.values()) == [1]


def ours(copy: Any) -> dict[str, Any]:
    return {name: value for name, value in copy.headers.items() if name.startswith("idempotency-")}


@pytest.mark.few(1)
@promise("who has died is replaced, under a higher fence")
def test_a_holder_that_has_died_is_replaced_under_the_same_outside_key(
    shop: Celery, deliver: Any, outside: OutsideWorld
) -> None:
    account = new_key()
    first = dead_attempt(shop, charge, account, outside.url)
    later = deliver(charge, account, outside.url)
    if isinstance(later.value, Retry):  # a store without a clock: the message has seen the holder once
        (copy,) = copies(shop)
        assert SEEN_HEADER in copy.headers
        later = deliver(charge, account, outside.url, headers=ours(copy))
    assert later.state == "SUCCESS"
    assert later.value["fence"] > first


def dead_attempt(shop: Celery, task: Any, *args: Any) -> int:
    """A claim whose process has died, and whose lease is over. Returns its fence."""
    store, fingerprint = store_of(shop), keys.fingerprint(keys.bind(task.signature_of_run, args, {}))
    options: dict[str, Any] = {"holder": "dead", "lease": 60.0, "keep": 600.0}
    seen = ""
    for _ in range(2):
        token = uuid4().hex
        answer = store.claim(
            id_of(task, args[0]), token=token, fingerprints=[fingerprint], watch=Watch(seen), **options
        )
        if isinstance(answer, Claimed):
            ageing(shop).lease_over(answer.id)
            return answer.fence
        assert isinstance(answer, StoreBusy)
        seen = answer.seen
    raise AssertionError("not claimed")


@promise("who has lost its claim changes nothing")
def test_an_attempt_that_was_replaced_records_nothing_and_its_message_comes_back(shop: Celery, deliver: Any) -> None:
    key = new_key()

    def body(self: DeduplicatedTask, account: str) -> str:
        if self.request.id == "late":
            ageing(shop).lease_over(id_of(self, account))
            winner = deliver(task, account, task_id="winner")
            if isinstance(winner.value, Retry):
                (copy,) = copies(shop)
                winner = deliver(task, account, task_id="winner", headers=ours(copy))
            assert winner.value == "winner"
        return str(self.request.id)

    task = make(shop, body, key="{account}")
    late = deliver(task, key, task_id="late")
    assert isinstance(late.value, Retry)
    (copy,) = copies(shop)
    assert deliver(task, key, task_id="late", headers=ours(copy)).value == "winner"


def test_a_body_learns_that_it_was_replaced(shop: Celery, deliver: Any) -> None:
    def body(self: DeduplicatedTask, account: str) -> str:
        self.check_lease()
        taken = store_runtime_of(shop, None).heartbeat
        (holding,) = taken._holdings.values()
        taken.lose(holding, "a test")
        self.check_lease()
        return "never"

    key = new_key()
    task = make(shop, body, key="{account}")
    assert isinstance(deliver(task, key).value, Retry)
    stored = store_of(shop).read(id_of(task, key))
    assert stored is not None
    assert stored.state == "started"


# ---------------------------------------------------------------- ends


@promise("attempts are counted in the record")
def test_an_error_is_another_attempt_and_the_last_one_fails(shop: Celery, deliver: Any) -> None:
    key = new_key()
    states = []
    for _ in range(3):
        states.append(deliver(failing, key, "value"))
        ageing_if_waiting(shop, id_of(failing, key))
    assert [each.state for each in states] == ["RETRY", "RETRY", "FAILURE"]
    assert isinstance(states[-1].value, ValueError)
    assert [each.headers["retries"] for each in copies(shop)] == [1, 2]
    again = deliver(failing, key, "value")
    assert isinstance(again.value, OperationFailed)
    assert again.value.code == "attempts_exhausted"


def ageing_if_waiting(shop: Celery, id: OperationId) -> None:
    stored = store_of(shop).read(id)
    if stored is not None and stored.state == "released":
        ageing(shop).due(id)


def test_a_permanent_error_ends_it_at_once(deliver: Any) -> None:
    key = new_key()
    first = deliver(failing, key, "permanent")
    assert isinstance(first.value, PermanentError)
    again = deliver(failing, key, "permanent")
    assert isinstance(again.value, OperationFailed)
    assert (again.value.code, str(again.value)) == ("no_account", "no such account")


@promise("the key of a failed operation can be freed by hand")
def test_an_error_that_is_longer_than_an_item_is_cut_and_recorded(shop: Celery, deliver: Any) -> None:
    """An item of DynamoDB ends at 400 KB: what it refuses would be no end, and the body would run again."""
    ran: list[str] = []

    def body(self: DeduplicatedTask, account: str) -> None:
        ran.append(account)
        raise PermanentError("x" * 500_000, "no_account")

    key = new_key()
    task = make(shop, body, key="{account}")
    assert isinstance(deliver(task, key).value, PermanentError)
    again = deliver(task, key).value
    assert isinstance(again, OperationFailed)
    assert again.code == "no_account"
    assert len(ran) == 1
    stored = store_of(shop).read(id_of(task, key))
    assert stored is not None
    assert stored.error is not None
    assert len(stored.error) < 1000


def test_a_failed_key_is_free_once_it_is_dropped(shop: Celery, deliver: Any) -> None:
    key = new_key()
    deliver(failing, key, "permanent")
    recorded = failing.recorded(key)
    assert recorded is not None
    assert (recorded.state, recorded.attempts) == ("failed", 1)
    assert "result=" not in repr(recorded)
    assert failing.drop(key)
    assert failing.recorded(key) is None
    assert not failing.drop(key)
    assert isinstance(deliver(failing, key, "permanent").value, PermanentError)


def test_a_deferral_uses_no_attempt(shop: Celery, deliver: Any) -> None:
    key = new_key()
    for _ in range(5):
        assert deliver(failing, key, "defer").state == "RETRY"
        ageing_if_waiting(shop, id_of(failing, key))
    stored = store_of(shop).read(id_of(failing, key))
    assert stored is not None
    assert stored.attempts == 0


def test_self_retry_has_its_countdown_and_its_limit(shop: Celery, deliver: Any) -> None:
    key = new_key()
    for expected in ("RETRY", "RETRY", "FAILURE"):
        assert deliver(failing, key, "retry").state == expected
        time.sleep(0.02)


@pytest.mark.long
@promise("a message that kills its process ends as failed")
def test_a_message_whose_processes_have_died_in_every_attempt_fails_without_running(shop: Celery, deliver: Any) -> None:
    key = new_key()
    for _ in range(3):
        dead_attempt(shop, failing, key, "poison")
    outcome = deliver(failing, key, "poison")
    if isinstance(outcome.value, Retry):
        (copy,) = copies(shop)
        outcome = deliver(failing, key, "poison", headers=ours(copy))
    assert outcome.state == "FAILURE"
    assert outcome.value.code == "attempts_exhausted"


def test_a_record_of_newer_code_waits_for_a_worker_that_knows_it(shop: Celery, deliver: Any) -> None:
    key = new_key()
    options: dict[str, Any] = {"holder": "new", "lease": 60.0, "keep": 600.0}
    store_of(shop).claim(id_of(returning, key), token="t", fingerprints=["v99:x"], **options)
    assert isinstance(deliver(returning, 1, key=key).value, Retry)
    assert len(copies(shop)) == 1


# ---------------------------------------------------------------- without the store


class Away:
    """A store that does not answer."""

    name, room = "away", 1000

    def __getattr__(self, name: str) -> Any:
        def away(*args: Any, **options: Any) -> Any:
            raise StoreAway("away: ConnectionError")

        return away


@promise("without the store nothing runs")
def test_without_the_store_nothing_runs_and_the_message_is_put_off(
    shop: Celery, deliver: Any, outside: OutsideWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = new_key()
    monkeypatch.setattr(waiting, "PATIENCE", 0.3)
    monkeypatch.setattr(store_runtime_of(shop, None), "store", Away())
    put_off = deliver(charge, account, outside.url)
    assert isinstance(put_off.value, Retry)
    assert outside.calls == {}
    (copy,) = copies(shop)
    monkeypatch.undo()
    assert deliver(charge, account, outside.url, headers=ours(copy)).state == "SUCCESS"
    assert list(outside.calls.values()) == [1]


def test_a_message_whose_copy_is_not_published_goes_back_to_its_queue(
    shop: Celery, deliver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = new_key()
    monkeypatch.setattr(coming_again, "REJECT_PAUSE", 0.0)
    shop.conf.task_queues[0].exchange.name = "not-there"
    monkeypatch.setattr(failing, "signature_from_request", lambda *args, **options: 1 / 0)
    rejected = deliver(failing, key, "value")
    assert isinstance(rejected.value, Reject)
    assert rejected.value.requeue
    stored = store_of(shop).read(id_of(failing, key))
    assert stored is not None
    assert stored.state == "released"


def test_a_worker_that_stops_gives_its_message_back(
    shop: Celery, deliver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = new_key()
    store_of(shop)
    monkeypatch.setattr(store_runtime_of(shop, None), "store", Away())
    waiting.note_shutdown()
    try:
        rejected = deliver(returning, 1, key=key)
    finally:
        waiting.note_start()
    assert isinstance(rejected.value, Reject)
    assert rejected.value.requeue


# ---------------------------------------------------------------- calls


def test_a_call_is_checked_where_it_is_made(shop: Celery) -> None:
    with pytest.raises(MissingKey):
        returning.delay(1)
    with pytest.raises(InvalidKey, match="at most 255"):
        returning.apply_async((1,), idempotency_key="k" * 256)
    with pytest.raises(InvalidArguments, match="expires"):
        returning.apply_async((1,), idempotency_key="k", expires=10)
    with pytest.raises(InvalidArguments, match="arguments"):
        charge.delay("a", nonsense=1)
    assert copies(shop) == []


def test_a_message_shows_its_key_and_no_argument(shop: Celery) -> None:
    charge.delay("a1", "http://secret")
    (message,) = copies(shop)
    assert message.headers["argsrepr"] == "idempotency-key=a1"
    assert "secret" not in str(message.headers)


def test_its_messages_and_their_copies_are_signed_where_messages_are(shop: Celery, deliver: Any) -> None:
    installation.install()  # as an IdempotentTask beside it does
    secrets = (SecretStr("s" * 32),)
    shop.conf.idempotency_message_secrets = secrets[0].get_secret_value()
    close_store_runtimes(shop)
    key = new_key()
    failing.delay(key, "value")
    deliver(failing, key, "value")
    found = copies(shop)
    assert len(found) == 2
    assert all(signed_at(each.headers, each.body, secrets) is not None for each in found)


def test_an_eager_call_runs_once_under_its_key(shop: Celery, outside: OutsideWorld) -> None:
    account = new_key()
    first = charge(account, outside.url)
    assert charge.apply((account, outside.url)).get() == first
    assert list(outside.calls.values()) == [1]


def test_an_eager_call_of_what_runs_is_refused(shop: Celery) -> None:
    def body(self: DeduplicatedTask, account: str) -> str:
        with pytest.raises(OperationBusy):
            task.apply((account,), throw=True)
        return "done"

    task = make(shop, body, key="{account}")
    # who looks on sees a renewal within a second; a busy machine may be late with some
    shop.conf.idempotency_lease, shop.conf.idempotency_heartbeat = 15.0, 1.0
    close_store_runtimes(shop)
    assert task.apply((new_key(),), throw=True).get() == "done"


@pytest.mark.long
def test_an_eager_deferral_is_raised(shop: Celery) -> None:
    with pytest.raises(Defer):
        failing.apply((new_key(), "defer"), throw=True)


# ---------------------------------------------------------------- what there is none of


@pytest.mark.parametrize(
    ("option", "value"),
    [("batch", 5), ("on_failed", print), ("provider", object()), ("moves_money", True), ("on_busy", "ack")],
)
def test_an_option_that_it_cannot_keep_is_refused_by_name(option: str, value: Any) -> None:
    app = Celery("refusing", set_as_current=False)
    with pytest.raises(SettingsError, match=rf"^{option} of test\.[0-9a-f]{{32}}: .*use IdempotentTask"):
        make(app, lambda self: None, **{option: value})


def test_a_misspelt_option_and_one_of_no_use_are_refused() -> None:
    app = Celery("refusing", set_as_current=False)
    with pytest.raises(SettingsError, match="did you mean max_attempts"):
        make(app, lambda self: None, max_attempt=3)
    with pytest.raises(SettingsError, match=r"^max_attempts of test\.[0-9a-f]{32}: must be a whole number"):
        make(app, lambda self: None, max_attempts=0)


@pytest.mark.parametrize("name", ["session", "effect", "step", "enqueue", "using", "replace"])
def test_what_only_postgres_can_keep_says_so(shop: Celery, deliver: Any, name: str) -> None:
    with pytest.raises(NotHere, match=rf"^{name}: not of a DeduplicatedTask.*use IdempotentTask"):
        getattr(charge, name)
    task = make(shop, lambda self, account: getattr(self, name), key="{account}")
    outcome = deliver(task, new_key())
    assert isinstance(outcome.value, NotHere)
    assert outcome.value.code == "unsupported_control"


def test_its_errors_survive_what_celery_does_to_them() -> None:
    for error in (NotHere("session: no"), StoreAway("Redis: ConnectionError")):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), again.args) == (type(error), str(error), error.args)
        assert type(error)(*error.args).args == error.args


def test_celerys_own_tasks_stay_its_own_where_this_is_the_base_of_all() -> None:
    app = Celery("all", task_cls=DeduplicatedTask, set_as_current=False)
    app.finalize()
    assert not isinstance(app.tasks["celery.chord_unlock"], DeduplicatedTask)


def test_a_task_may_have_a_store_of_its_own(shop: Celery, redis_url: str, deliver: Any) -> None:
    task = make(shop, lambda self, account: account, key="{account}", store=f"{redis_url.removesuffix('/0')}/1")
    key = new_key()
    assert deliver(task, key).value == key
    assert store_of(shop).read(id_of(task, key)) is None
    assert store_runtime_of(shop, task.store).store.read(id_of(task, key)) is not None


def test_an_address_that_is_none_is_refused_without_being_shown(shop: Celery) -> None:
    task = make(shop, lambda self, account: account, key="{account}", store="mysql://user:secret@host")
    with pytest.raises(SettingsError, match="must begin with redis://") as refused:
        task.delay("a")
    assert "secret" not in str(refused.value)


def test_a_soft_time_limit_while_a_refused_copy_pauses_leaves_the_message_in_its_queue(
    shop: Celery, deliver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any other exception past the wrapper would be a failure to Celery, which it acknowledges."""
    key = new_key()
    monkeypatch.setattr(failing, "signature_from_request", lambda *args, **options: 1 / 0)  # the broker takes no copy

    def signalled(seconds: float) -> None:
        raise SoftTimeLimitExceeded  # as the worker's signal does, wherever it finds the task

    monkeypatch.setattr("idempotency.worker.coming_again.time.sleep", signalled)
    ended = deliver(failing, key, "value")
    assert isinstance(ended.value, Reject)
    assert ended.value.requeue


def test_what_no_one_foresaw_after_a_claim_puts_the_message_off(
    shop: Celery, deliver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a limit of pids: the heartbeat's thread begins with the first claim, after it is made."""
    key = new_key()

    def hold(self: Heartbeat, holding: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Heartbeat, "hold", hold)
    ended = deliver(returning, 1, key=key)
    assert isinstance(ended.value, Retry)
    assert len(copies(shop)) == 1
