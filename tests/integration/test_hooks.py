"""Hooks of Celery around a message, and keys that vary: nothing ends without a record or a dead letter."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from celery import Celery, Task
from celery.backends.base import DisabledBackend
from celery.worker.request import Request
from sqlalchemy import Connection, Engine, text

from idempotency import IdempotentTask, PermanentError, SettingsError
from idempotency.letters.consumer import DeadLetterConsumer
from idempotency.operate.change import Change
from idempotency.operate.replay import replay
from idempotency.worker.hooks import BATCHING
from tests.integration.bad_inputs.test_start import refusals
from tests.support import hooked
from tests.support import operations as op
from tests.support.bank import failures
from tests.support.dead_messages import die, headers, publish
from tests.support.deliveries import Deliveries, deliver_row
from tests.support.operations import Entries, make_due
from tests.support.processes import Processes, eventually
from tests.support.tasks import pay

ROWS = text("SELECT account, count(*) FROM entries GROUP BY account ORDER BY account")


@pytest.fixture
def make(bank: Celery) -> Any:
    """Makes tasks with a base of the test's own; they are gone afterwards."""
    made = []

    def make(base: Any, body: Callable[..., Any] = pay, **options: Any) -> Any:
        name = f"test.{id(base)}"
        made.append(name)
        return bank.task(base=base, bind=True, name=name, shared=False, key="{a}", **options)(body)

    yield make
    for name in made:
        bank.tasks.pop(name, None)


def body(self: Any, a: str) -> str:
    return str(pay(self))


# ---------------------------------------------------------------- before_start


def test_before_start_that_raises_in_a_worker_costs_an_attempt_and_no_message(
    bank: Celery, processes: Processes, relay: Any, engine: Engine, record: op.Record
) -> None:
    processes.worker(app="tests.support.hooked")
    hooked.checked.delay("a", "once")
    hooked.checked.delay("b", "permanent")
    eventually(lambda: record("a") and record("a").status == "completed")
    eventually(lambda: record("b") and record("b").status == "failed")
    assert record("a").attempts == 2
    with engine.connect() as connection:
        # the body's row is there once, and each attempt was announced to the hook
        assert [tuple(row) for row in connection.execute(ROWS)] == [("a", 1), ("start a", 2), ("start b", 1)]
        assert [letter.reason for letter in op.dead_letters(connection)] == ["closed"]
    assert failures(engine) == [("b", "closed")]


def test_before_start_runs_in_the_attempt_and_not_for_a_duplicate(
    make: Any, deliveries: Deliveries, entries: Entries
) -> None:
    class Base(IdempotentTask):
        abstract = True

        def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
            self.session.execute(text("INSERT INTO entries (account, amount) VALUES ('hook', 1)"))

    task = make(Base, body)
    assert [deliveries.deliver(task, "k").value for _ in range(2)] == ["paid", "paid"]
    assert (entries("hook"), entries("paid")) == (1, 1)
    assert task.apply(("other",)).get() == "paid"
    assert entries("hook") == 2


def test_a_mixins_before_start_and_what_it_calls_run_once(make: Any, deliveries: Deliveries) -> None:
    calls = []

    class Base(IdempotentTask):
        abstract = True

        def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
            calls.append("base")
            super().before_start(task_id, args, kwargs)

    class Mixin:
        def before_start(self, *given: Any) -> None:
            calls.append("mixin")
            super().before_start(*given)

    class Mixed(Mixin, Base):
        abstract = True

    task = make(Mixed, body)
    task.bind(task.app)  # as finalizing an application does
    assert deliveries.deliver(task, "k").state == "SUCCESS"
    assert calls == ["mixin", "base"]


class StartedNowhere(DisabledBackend):
    """A result backend that is away, and has come back when the task ends."""

    states: ClassVar[list[str]] = []

    def store_result(self, task_id: str, result: Any, state: str, **_: Any) -> Any:
        self.states.append(state)
        if state == "STARTED":
            raise OSError("away")
        return result


def test_a_result_backend_that_is_away_at_the_start_costs_no_message(
    bank: Celery, make: Any, deliveries: Deliveries, entries: Entries
) -> None:
    task = make(IdempotentTask, body, track_started=True, ignore_result=False, backend=StartedNowhere(bank))
    # Celery stores it before a duplicate's answer is known, too: a task that has succeeded would be started again
    assert [deliveries.deliver(task, "k").value for _ in range(2)] == ["paid", "paid"]
    assert StartedNowhere.states == ["STARTED", "SUCCESS", "SUCCESS"]
    assert entries("paid") == 1


# ---------------------------------------------------------------- __call__


class CallsSuper(IdempotentTask):
    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.session.execute(text("INSERT INTO entries (account, amount) VALUES ('call', 1)"))
        return super().__call__(*args, **kwargs)


class CallsRun(IdempotentTask):
    """As Flask's documentation has it."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.session.execute(text("INSERT INTO entries (account, amount) VALUES ('call', 1)"))
        return self.run(*args, **kwargs)


@pytest.mark.parametrize("base", [CallsSuper, CallsRun])
def test_a_call_of_the_base_runs_inside_the_attempt(
    base: Any, make: Any, deliveries: Deliveries, entries: Entries, record: op.Record
) -> None:
    task = make(base, body)
    assert [deliveries.deliver(task, "k").value for _ in range(2)] == ["paid", "paid"]
    assert (entries("call"), entries("paid"), record("k").status) == (1, 1, "completed")
    assert task("direct") == "paid"
    assert task.apply(("eager",)).get() == "paid"
    assert (entries("call"), entries("paid")) == (3, 3)


def test_a_call_of_the_base_that_raises_ends_the_attempt(
    make: Any, deliveries: Deliveries, entries: Entries, record: op.Record
) -> None:
    class Base(IdempotentTask):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            super().__call__(*args, **kwargs)
            raise PermanentError("no", "refused_by_base")

    assert deliveries.deliver(make(Base, body), "k").state == "FAILURE"
    assert (entries("paid"), record("k").error_code) == (0, "refused_by_base")


def test_a_call_that_would_never_run_is_refused_with_its_remedy() -> None:
    class Timed(Task):
        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    with pytest.raises(SettingsError, match=r"^Base: the __call__ of Timed would never run; name Timed before Idem"):

        class Base(IdempotentTask, Timed):
            abstract = True


class TriesAgain(IdempotentTask):
    """As for deadlocks: the call is made once more."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.session.execute(text("SELECT 1"))
        try:
            return super().__call__(*args, **kwargs)
        except KeyError:
            self.session.rollback()
            return super().__call__(*args, **kwargs)


def test_a_call_of_the_base_may_call_the_body_again(make: Any, deliveries: Deliveries, entries: Entries) -> None:
    runs: list[str] = []

    def fails_once(self: Any, a: str) -> str:
        runs.append(a)
        pay(self)
        if len(runs) == 1:
            raise KeyError(a)
        return a

    assert deliveries.deliver(make(TriesAgain, fails_once), "k").value == "k"
    assert (runs, entries("paid")) == (["k", "k"], 1)


class GoesToSuper(IdempotentTask):
    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


class GoesToRun(IdempotentTask):
    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


@pytest.mark.parametrize("base", [GoesToSuper, GoesToRun])
def test_a_call_in_a_body_runs_under_its_own_key_whatever_the_base_calls(
    base: Any, make: Any, deliveries: Deliveries, entries: Entries
) -> None:
    made: list[Any] = []

    def calls_itself(self: Any, a: str) -> str:
        if a == "parent":
            made[0]("child")
        pay(self)
        return a

    made.append(make(base, calls_itself))
    assert [deliveries.deliver(made[0], a).value for a in ("parent", "child")] == ["parent", "child"]
    assert entries("paid") == 2


def test_a_task_derived_from_a_registered_one_goes_through_both_calls(
    bank: Celery, deliveries: Deliveries, entries: Entries
) -> None:
    class First(CallsSuper):
        name = "test.first"
        key = "{a}"

        def run(self, a: str) -> str:
            return body(self, a)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs) + "!"

    class Second(First):
        name = "test.second"

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs) + "?"

    try:
        first, second = bank.register_task(First()), bank.register_task(Second())
        assert [deliveries.deliver(task, "k").value for task in (first, second)] == ["paid!", "paid!?"]
        assert (entries("call"), entries("paid")) == (2, 2)
    finally:
        for task in (First, Second):
            bank.tasks.pop(task.name, None)


# ---------------------------------------------------------------- other ways around the claim


def test_a_subclass_of_a_task_with_batches_may_have_none(bank: Celery) -> None:
    class Posted(IdempotentTask):
        name, key, batch = "test.posted", "{x}", 10

        def run(self, x: str) -> None: ...

    try:
        posted = bank.register_task(Posted())

        class Corrected(Posted):  # of one that is bound: its strategy is ours
            name, batch = "test.corrected", 1

        corrected = bank.register_task(Corrected())
        assert (posted.Strategy, corrected.Strategy) == (BATCHING, Task.Strategy)
    finally:
        for name in ("test.posted", "test.corrected"):
            bank.tasks.pop(name, None)


def test_a_task_with_a_strategy_of_its_own_is_refused() -> None:
    class Batches(Task):
        """As celery-batches has it."""

        abstract = True

        def Strategy(self, task: Any, app: Any, consumer: Any) -> Any: ...  # noqa: N802

    for bases in ((IdempotentTask, Batches), (Batches, IdempotentTask)):
        with pytest.raises(SettingsError, match=r"^Both: defines its own Strategy, .*use a plain task"):
            type("Both", bases, {"abstract": True})


def test_a_task_whose_request_is_not_ours_prevents_the_start(configured: Celery, make: Any) -> None:
    class Base(IdempotentTask):
        abstract = True
        Request = "celery.worker.request:Request"

    make(Base, body)
    (said,) = refusals(configured)
    assert "Request=" in said
    assert Request.__module__ in said


def test_celerys_own_tasks_are_left_alone_under_task_cls(deliveries: Deliveries) -> None:
    app = Celery("own", task_cls=IdempotentTask, broker="memory://", backend="cache+memory://", set_as_current=False)

    @app.task(key="{a}")
    def ours(a: str) -> None: ...

    app.finalize()
    own = {name: task for name, task in app.tasks.items() if name.startswith("celery.")}
    assert {"celery.backend_cleanup", "celery.chord_unlock", "celery.map"} <= own.keys()
    assert not [name for name, task in own.items() if isinstance(task, IdempotentTask)]
    assert isinstance(app.tasks[ours.name], IdempotentTask)
    assert own["celery.accumulate"].apply((1, 2)).get() == (1, 2)
    assert own["celery.backend_cleanup"]() is None


# ---------------------------------------------------------------- a key that varies


@pytest.mark.long
def test_a_message_without_a_key_stays_one_operation_whatever_its_key_function_says(
    bank: Celery, processes: Processes, relay: Any, engine: Engine, entries: Entries
) -> None:
    processes.worker(app="tests.support.hooked")
    publish(bank, json.dumps([["a", 2], {}, {}]), headers=headers(task=hooked.named_at_random.name))
    eventually(lambda: entries("a") == 1, what="the third attempt")
    with engine.connect() as connection:
        states = connection.execute(text("SELECT status, attempts FROM idempotency.records")).all()
        assert [tuple(row) for row in states] == [("completed", 3)]
    assert entries("failed a") == 2


def test_a_redelivered_message_without_a_key_keeps_its_first_key(
    deliveries: Deliveries, connection: Connection, entries: Entries
) -> None:
    for _ in range(2):  # the worker has died before the acknowledgement
        assert deliveries.deliver(hooked.named_at_random, "a", task_id="t-1").state == "IGNORED"
    assert deliveries.deliver(hooked.named_at_random, "a", task_id="t-2").state == "IGNORED"
    rows = op.outbox(connection)
    assert len({row.key for row in rows}) == len(rows) == 2
    assert [deliver_row(deliveries, hooked.named_at_random, rows[0]).state for _ in range(2)] == ["SUCCESS"] * 2
    assert entries("a") == 1


def test_two_messages_without_a_key_under_one_task_id_both_run(
    deliveries: Deliveries, connection: Connection, entries: Entries
) -> None:
    """`send_task("import", [file], task_id=f"import-{customer}")`: another file on another day."""
    for account in ("monday", "tuesday"):
        assert deliveries.deliver(hooked.named_at_random, account, task_id="import-7").state == "IGNORED"
    for row in op.outbox(connection):
        assert deliver_row(deliveries, hooked.named_at_random, row).state == "SUCCESS"
    assert (entries("monday"), entries("tuesday")) == (1, 1)


def test_a_retry_of_a_message_without_a_key_survives_another_key_template(
    make: Any, deliveries: Deliveries, engine: Engine, connection: Connection, record: op.Record
) -> None:
    def failing(self: Any, a: str) -> None:
        raise ValueError("again")

    task = make(IdempotentTask, failing)
    assert deliveries.deliver(task, "k").state == "RETRY"
    type(task)._key_function = staticmethod(lambda arguments: "another")
    make_due(engine, "k")
    assert deliver_row(deliveries, task, op.outbox(connection)[-1]).state == "RETRY"
    assert (record("k").attempts, record("another")) == (2, None)


@pytest.mark.parametrize("known", [True, False])
def test_a_dead_message_without_a_key_is_replayed_under_one_key(
    known: bool, bank: Celery, consumer: DeadLetterConsumer, connection: Connection, deliveries: Deliveries,
    entries: Entries,
) -> None:  # fmt: skip
    task = hooked.named_at_random
    if not known:  # to the relay that stores its letter
        del bank.tasks[task.name]
    die(bank, consumer, headers=headers(task=task.name))
    consumer.run_once()
    bank.tasks.register(task)
    (letter,) = op.dead_letters(connection)
    replay(bank, letter.id, Change("ann", "again"))
    (row,) = op.outbox(connection)
    assert (row.key == letter.key) is known
    assert deliver_row(deliveries, hooked.named_at_random, row).state == "SUCCESS"
    assert connection.execute(text("SELECT key, status FROM idempotency.records")).all() == [(row.key, "completed")]
    assert entries("a1") == 1
