"""`assert_idempotent`: silent about correct tasks, and precise about what is wrong with the others."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import httpx
import psutil
import pytest
from celery import Celery
from sqlalchemy import create_engine, text
from sqlalchemy.engine import Engine, make_url

import services
from idempotency import IdempotentTask, PermanentError, events, publish, subscribe
from idempotency.application import close_runtime
from idempotency.store import ends
from idempotency.testing import NotIdempotent
from idempotency.testing.processes import Action, Delivery, Interruption
from idempotency.wire.message import Message
from tests.support.bank import deposit, failing, slow_deposit, transfer
from tests.support.operations import Entries, Record
from tests.support.tasks import ROW, transactional

pytestmark = pytest.mark.long


@pytest.fixture
def define(bank: Celery) -> Iterator[Callable[..., Any]]:
    """Makes a task of a body, known to the application for this test only."""
    names = []

    def make(body: Any, **options: Any) -> Any:
        names.append(f"tests.{body.__name__}")
        return bank.task(base=IdempotentTask, bind=True, name=names[-1], shared=False, **{"key": "{name}", **options})(
            body
        )

    yield make
    for name in names:
        bank.tasks.pop(name, None)


@pytest.fixture
def call(recording_server: Any) -> Callable[..., Any]:
    """A call outside, as a gateway makes it; without a key unless it is given one."""

    def post(what: str = "act", *, idempotency_key: Any = None) -> Any:
        headers = {} if idempotency_key is None else {"Idempotency-Key": idempotency_key}
        return httpx.post(f"{recording_server.url}/acts", json={"what": what}, headers=headers, timeout=10).json()

    return post


@pytest.fixture
def own_engine(database: str) -> Iterator[Engine]:
    """An engine of the application's own, past the task's session; the parent has used it, too."""
    engine = create_engine(database)
    with engine.connect() as connection:
        connection.execute(text("SELECT 1"))
    yield engine
    engine.dispose()


@pytest.fixture
def report(assert_idempotent: Any) -> Callable[..., Any]:
    """The report about an incorrect task."""

    def of(task: Any, *args: Any, **options: Any) -> Any:
        with pytest.raises(NotIdempotent) as raised:
            assert_idempotent(task, *args, **{"tables": ["entries"], **options})
        print(raised.value)  # noqa: T201
        return str(raised.value)

    return of


# ---------------------------------------------------------------- tasks that are right


def test_a_task_that_only_uses_its_session_is_idempotent(bank: Celery, assert_idempotent: Any) -> None:
    checked = assert_idempotent(deposit, "a", amount=5, tables=["entries"])

    assert checked.not_compared == ("entries.id",)
    assert "killed (SIGKILL) after the body, before the finishing COMMIT, then delivered again" in checked.scenarios
    assert "the COMMIT of the finish carried out, and its answer lost" in checked.scenarios


def test_a_step_an_effect_and_a_session_are_idempotent_together(
    bank: Celery, assert_idempotent: Any, recording_server: Any
) -> None:
    recording_server.answer = lambda call: (200, {"amount": 7})
    checked = assert_idempotent(transfer, "a", f"{recording_server.url}/act", tables=["entries"])

    assert (
        "killed (SIGKILL) after the call of an effect, before its result was recorded, then delivered again"
        in checked.scenarios
    )
    assert "the COMMIT of a step carried out, and its answer lost" in checked.scenarios


def test_what_is_enqueued_and_published_in_the_session_is_idempotent(
    define: Callable[..., Any], assert_idempotent: Any, bank: Celery, engine: Engine
) -> None:
    def hear(self: Any, event: Any) -> None:
        pass

    def telling(self: Any, name: str) -> None:
        self.session.execute(ROW)
        deposit.enqueue(self.session, f"{name}/next")
        publish(self.session, "order.paid", {"order": name}, app=bank)

    with transactional(engine).begin() as connection:
        deposit.enqueue(connection, "another one's")
    heard = subscribe("order.*", consumer="tests", app=bank)(hear)
    try:
        checked = assert_idempotent(define(telling), "a", tables=["entries"])
    finally:
        events._subscriptions.pop(bank)
        bank.tasks.pop(heard.name)
    # an event's id and time are new ones in each run, and committed once
    assert checked.not_compared == ("enqueued.args", "enqueued.key", "entries.id")
    with engine.connect() as connection:  # nothing sends what the scenarios have left, and nothing else is gone
        assert connection.execute(text("SELECT key FROM idempotency.outbox")).all() == [("another one's",)]
        assert connection.execute(text("SELECT count(*) FROM idempotency.records")).scalar_one() == 0


def test_two_effects_without_a_session_are_idempotent(
    define: Callable[..., Any], assert_idempotent: Any, recording_server: Any, call: Callable[..., Any]
) -> None:
    def effects(self: Any, name: str) -> Any:
        httpx.get(f"{recording_server.url}/rate", timeout=10)
        one = self.effect("one", call, "one")["id"]
        return one + self.effect("two", lambda *, idempotency_key: call("two", idempotency_key=f"own-{name}"))["id"]

    checked = assert_idempotent(define(effects), "a")
    assert "killed (SIGKILL) before the call of an effect (2), then delivered again" in checked.scenarios
    assert "the COMMIT of the finish carried out, and its answer lost" in checked.scenarios


def test_a_signature_brings_its_key_and_one_attempt_is_enough(
    define: Callable[..., Any], assert_idempotent: Any
) -> None:
    def once(self: Any, setup: Any, tables: Any) -> None:
        self.session.execute(ROW)

    signature = define(once, key=None, max_attempts=1).s(setup=1, tables=2).set(idempotency_key="given")
    assert_idempotent(signature, ignore=["entries"])


def test_a_task_that_needs_two_attempts_is_idempotent(
    define: Callable[..., Any], assert_idempotent: Any, recording_server: Any, call: Callable[..., Any]
) -> None:
    def stubborn(self: Any, name: str) -> None:
        self.session.execute(ROW)
        if not self.request.retries:
            raise ConnectionError("not yet")

    assert_idempotent(define(stubborn), "a", tables=["entries"])


def test_a_task_that_is_meant_to_fail_is_compared_too(bank: Celery, assert_idempotent: Any) -> None:
    with pytest.raises(ValueError, match="the plain run failed, so there is nothing to compare with: no_account"):
        assert_idempotent(failing, "a", "permanent", tables=["entries", "failures"])
    assert_idempotent(failing, "a", "permanent", tables=["entries", "failures"], may_fail=True)


def test_setup_brings_the_rows_back_before_each_scenario(
    define: Callable[..., Any], assert_idempotent: Any, own_engine: Engine
) -> None:
    def deposit_more(self: Any, name: str) -> None:
        self.session.execute(text("UPDATE entries SET amount = amount + 1"))

    def setup() -> None:
        with own_engine.begin() as connection:
            connection.execute(ROW)

    assert_idempotent(define(deposit_more), "a", tables=["entries"], setup=setup)


# ---------------------------------------------------------------- tasks that are wrong


def test_a_separate_session_is_found_by_the_row_it_leaves_twice(
    define: Callable[..., Any], report: Callable[..., Any], own_engine: Engine
) -> None:
    def own_session(self: Any, name: str) -> None:
        with own_engine.begin() as connection:
            connection.execute(ROW)
        self.session.execute(text("INSERT INTO failures (account, code) VALUES ('right', '')"))

    said = report(define(own_session), "a", tables=["entries", "failures"])
    assert "Scenario:  killed (SIGKILL) after the body, before the finishing COMMIT" in said
    assert 'Where:     table entries: {"account": "row", "amount": 1}' in said
    assert "Expected:  once\n    Seen:      2 times" in said
    assert "not in self.session's transaction" in said
    assert "Not compared, because two plain runs differ in it: entries.id, failures.id" in said


def test_a_counter_changed_past_the_session_is_shown_with_both_values(
    define: Callable[..., Any], report: Callable[..., Any], own_engine: Engine
) -> None:
    def setup() -> None:
        with own_engine.begin() as connection:
            connection.execute(ROW)

    def counting(self: Any, name: str) -> None:
        with own_engine.begin() as connection:
            connection.execute(text("UPDATE entries SET amount = amount + 1"))
        self.session.execute(text("SELECT 1"))

    said = report(define(counting), "a", setup=setup)
    assert 'Where:     table entries, amount of {"account": "row"}' in said
    assert "Expected:  2\n    Seen:      3" in said


def test_a_call_outside_of_an_effect_is_found_by_its_second_time(
    define: Callable[..., Any], report: Callable[..., Any], call: Callable[..., Any]
) -> None:
    def bare_call(self: Any, name: str) -> None:
        call()
        self.session.execute(ROW)

    said = report(define(bare_call), "a")
    assert 'Where:     calls: {"body": {"what": "act"}, "key": null, "method": "POST", "path": "/acts"}' in said
    assert "Expected:  once\n    Seen:      2 times" in said
    assert "a call outside self.effect" in said


def test_a_call_outside_of_an_effect_is_found_even_under_one_key(
    define: Callable[..., Any], report: Callable[..., Any], call: Callable[..., Any]
) -> None:
    def keyed_call(self: Any, name: str) -> None:
        call(idempotency_key=f"own-{name}")
        self.session.execute(ROW)

    said = report(define(keyed_call), "a")
    assert "made again although its outcome was known" in said


def test_an_effect_that_does_not_pass_its_key_on_is_found(
    define: Callable[..., Any], report: Callable[..., Any], call: Callable[..., Any]
) -> None:
    def keyless(self: Any, name: str) -> None:
        self.effect("act", lambda *, idempotency_key: call())

    said = report(define(keyless), "a")
    assert "Scenario:  killed (SIGKILL) after the call of an effect, before its result was recorded" in said
    assert "does not pass on the idempotency_key" in said


def test_a_random_key_outside_is_found(
    define: Callable[..., Any], report: Callable[..., Any], call: Callable[..., Any]
) -> None:
    def random_key(self: Any, name: str) -> None:
        self.effect("act", lambda *, idempotency_key: call(idempotency_key=str(uuid4())))

    said = report(define(random_key), "a")
    assert "a key made anew for each call" in said
    assert "calls.key" in said


def test_an_effect_whose_name_changes_with_the_attempt_is_found(
    define: Callable[..., Any], report: Callable[..., Any], call: Callable[..., Any]
) -> None:
    def changing_name(self: Any, name: str) -> None:
        self.effect(f"act-{self.request.retries}", call)
        self.session.execute(ROW)

    said = report(define(changing_name), "a")
    assert "Where:     effects, name" in said
    assert 'Expected:  "act-0"\n    Seen:      "act-1"' in said
    assert "name is not the same in every attempt" in said


def test_an_effect_with_a_random_name_is_found(
    define: Callable[..., Any], report: Callable[..., Any], call: Callable[..., Any]
) -> None:
    def random_name(self: Any, name: str) -> None:
        self.effect(f"act-{uuid4()}", call)
        self.session.execute(ROW)

    assert "name is not the same in every attempt" in report(define(random_name), "a")


def test_an_effect_that_says_something_else_under_the_same_key_is_found(
    define: Callable[..., Any], report: Callable[..., Any], call: Callable[..., Any]
) -> None:
    def clock_in_body(self: Any, name: str) -> None:
        self.effect("act", lambda *, idempotency_key: call(time.time_ns(), idempotency_key=idempotency_key))

    said = report(define(clock_in_body), "a")
    assert "two calls of POST /acts under the key idem-" in said
    assert "Providers refuse a key" in said


def test_an_effect_with_other_arguments_in_each_attempt_is_found(
    define: Callable[..., Any], report: Callable[..., Any], call: Callable[..., Any]
) -> None:
    def clock_argument(self: Any, name: str) -> None:
        self.effect("act", call, time.time_ns())
        self.session.execute(ROW)

    said = report(define(clock_argument), "a")
    assert "Where:     outcome" in said
    assert "'act' was begun with other arguments in an earlier attempt" in said


@pytest.mark.parametrize("key", [lambda arguments: str(uuid4()), lambda arguments: str(int(time.time() * 10))])
def test_a_key_that_differs_with_each_call_is_found(
    define: Callable[..., Any], report: Callable[..., Any], key: Any
) -> None:
    def keyed(self: Any, name: str) -> None:
        self.session.execute(ROW)

    said = report(define(keyed, key=key), "a")
    assert "Where:     the idempotency key" in said
    assert "made from the clock, a random value or a counter" in said


def test_a_message_sent_past_the_outbox_is_found(define: Callable[..., Any], report: Callable[..., Any]) -> None:
    def sending(self: Any, name: str) -> None:
        deposit.delay(f"{name}/next")
        self.session.execute(ROW)

    said = report(define(sending), "a")
    assert 'Where:     sent: {"args": ["a/next"], "kwargs": {}, "task": "tests.support.bank.deposit"}' in said
    assert "Expected:  once\n    Seen:      2 times" in said
    assert "delay() or apply_async() in the body" in said


def test_a_message_enqueued_in_a_separate_session_is_found(
    define: Callable[..., Any], report: Callable[..., Any], own_engine: Engine
) -> None:
    def enqueueing(self: Any, name: str) -> None:
        with own_engine.begin() as connection:
            deposit.enqueue(connection, f"{name}/next")
        self.session.execute(ROW)

    said = report(define(enqueueing), "a")
    assert "Where:     enqueued" in said
    assert "Give it self.session" in said


def test_a_result_that_counts_the_runs_is_found(define: Callable[..., Any], report: Callable[..., Any]) -> None:
    def counting_runs(self: Any, name: str) -> Any:
        self.session.execute(ROW)
        return {"attempt": self.request.retries}

    said = report(define(counting_runs), "a")
    assert "Where:     result, attempt" in said
    assert "Expected:  0\n    Seen:      1" in said


def test_a_task_that_only_a_former_holder_breaks_is_found_when_overtaken(
    define: Callable[..., Any], report: Callable[..., Any], own_engine: Engine
) -> None:
    def looking_first(self: Any, name: str) -> None:
        # right after any crash, because it looks; wrong beside another attempt, because it has looked before
        with own_engine.connect() as connection:
            found = connection.scalar(text("SELECT count(*) FROM entries"))
        self.step("between", lambda session: None)
        with own_engine.begin() as connection:
            if not found:
                connection.execute(ROW)

    said = report(define(looking_first), "a")
    assert "Scenario:  stopped after the COMMIT of a step, its lease lost; goes on after another attempt" in said
    assert "Expected:  once\n    Seen:      2 times" in said


def test_what_a_process_remembers_is_found_after_a_lost_commit(
    define: Callable[..., Any], report: Callable[..., Any]
) -> None:
    done = set()

    def remembering(self: Any, name: str) -> None:
        if name not in done:
            done.add(name)
            self.session.execute(ROW)
        self.session.execute(text("SELECT 1"))

    said = report(define(remembering), "a")
    assert "Scenario:  the COMMIT of the finish lost with its connection" in said
    assert "Expected:  once\n    Seen:      not at all" in said
    assert "a flag in the process's memory" in said


@pytest.mark.quick
def test_a_plain_run_that_is_never_the_same_is_said(define: Callable[..., Any], report: Callable[..., Any]) -> None:
    def first_time_only(self: Any, name: str) -> None:
        if not self.session.scalar(text("SELECT count(*) FROM failures")):
            self.session.execute(ROW)
        self.session.execute(text("INSERT INTO failures (account, code) VALUES ('x', '')"))

    said = report(define(first_time_only), "a", ignore=["failures"])
    assert "Scenario:  run plainly a second time, on a fresh state" in said
    assert "something that does not start afresh" in said


# ---------------------------------------------------------------- the faults are real


@pytest.fixture
def message() -> Callable[..., Any]:
    def compose(task: Any, *args: Any, key: str) -> Any:
        headers = {"idempotency-key": key, "idempotency-tenant": "default"}
        return Message.composed(task.app, task.name, args, {}, task_id=str(uuid4()), headers=headers)

    return compose


@pytest.fixture
def lives() -> Iterator[Callable[..., Any]]:
    """What a process that delivers a message went through."""
    started = []

    def live(task: Any, message: Any, interruption: Any) -> Any:
        started.append(Delivery(task.app, task, message, interruption=interruption))
        assert started[-1].wait(60)
        return started[-1].journal()

    yield live
    for each in started:
        each.end()


@pytest.mark.parametrize(
    ("action", "written", "claims"), [(Action.LOSE_ANSWER, 1, 2), (Action.LOSE_COMMIT, 2, 2), (Action.KILL, 1, 1)]
)
def test_what_is_done_to_the_finishing_commit_is_done(
    bank: Celery,
    message: Callable[..., Any],
    lives: Callable[..., Any],
    entries: Entries,
    record: Record,
    action: Any,
    written: int,
    claims: int,
) -> None:
    journal = lives(deposit, message(deposit, "a", key="a"), Interruption(action, "finish.written"))

    points = [point for point, _ in journal.points]
    claimed = points.count("claimed") + (action is Action.LOSE_ANSWER)
    assert (points.count("finish.written"), claimed) == (written, claims)
    if action is Action.KILL:
        assert (journal.outcome, record("a").status, entries("a")) == ("killed by SIGKILL", "started", 0)
    else:
        assert (journal.outcome, record("a").status, entries("a")) == ("SUCCESS", "completed", 1)


@pytest.mark.parametrize(("action", "runs"), [(Action.LOSE_ANSWER, 1), (Action.LOSE_COMMIT, 2)])
def test_a_finish_without_a_session_is_broken_as_well(
    define: Callable[..., Any],
    message: Callable[..., Any],
    lives: Callable[..., Any],
    record: Record,
    action: Any,
    runs: int,
) -> None:
    def nothing(self: Any, name: str) -> None:
        pass

    task = define(nothing)
    journal = lives(task, message(task, "a", key="a"), Interruption(action, "body.entered"))

    assert [point for point, _ in journal.points].count("body.entered") == runs
    assert (journal.outcome, record("a").status) == ("SUCCESS", "completed")


def test_without_the_fence_a_right_task_is_found_wrong(
    bank: Celery, report: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    unfenced = ends._COMPLETE.replace("AND status = 'started' AND fence = %(fence)s AND token = %(token)s", "")
    assert unfenced != ends._COMPLETE
    monkeypatch.setattr(ends, "_COMPLETE", unfenced)

    said = report(deposit, "a")
    assert "Scenario:  stopped as the body began, its lease lost" in said
    assert "Expected:  once\n    Seen:      2 times" in said


def test_without_an_end_to_doubts_a_right_task_is_found_wrong(
    bank: Celery, report: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("idempotency.attempt.run.DOUBT_ROUNDS", 1)

    said = report(deposit, "a")
    assert "a delivery was rejected" in said
    assert "still in doubt after 1 rounds" in said


# ---------------------------------------------------------------- what it refuses, and what it leaves


def test_columns_may_be_left_out_and_a_misspelt_one_is_refused(
    define: Callable[..., Any], assert_idempotent: Any
) -> None:
    def attempts(self: Any, name: str) -> None:
        self.session.execute(text(f"INSERT INTO entries (account, amount) VALUES ('row', {self.request.retries})"))

    task = define(attempts)
    assert_idempotent(task, "a", tables=["entries"], ignore=["entries.amount"])
    with pytest.raises(ValueError, match=r"ignore: 'entires.amount' names no table"):
        assert_idempotent(task, "a", tables=["entries"], ignore=["entires.amount"])


@pytest.mark.quick
def test_a_table_that_the_task_writes_to_has_to_be_named(bank: Celery, assert_idempotent: Any) -> None:
    with pytest.raises(ValueError, match="the plain run writes to entries too"):
        assert_idempotent(deposit, "a")


@pytest.mark.quick
def test_a_database_whose_name_does_not_say_test_is_left_alone(
    servers: services.Services, template: str, bank: Celery, assert_idempotent: Any, engine: Engine
) -> None:
    admin = create_engine(servers.database_url, isolation_level="AUTOCOMMIT")
    name = f"shop_{uuid4().hex[:8]}"
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {template}"))
    url = make_url(servers.database_url).set(database=name).render_as_string(hide_password=False)
    shop = create_engine(url)
    try:
        with shop.begin() as connection:
            connection.execute(ROW)
        close_runtime(bank)
        bank.conf.idempotency_database_url = url
        with pytest.raises(ValueError, match=f"'{name}' does not say that it is one for tests"):
            assert_idempotent(deposit, "a", tables=["entries"])
        with shop.connect() as connection:
            assert connection.execute(text("SELECT count(*) FROM entries")).scalar_one() == 1
        with pytest.raises(ValueError, match="there is no table 'elsewhere'"):  # it would have been emptied now
            assert_idempotent(deposit, "a", tables=["elsewhere"], allow_database=name)
    finally:
        close_runtime(bank)
        shop.dispose()
        servers.drop_database(name)
        admin.dispose()


def pythons() -> Any:
    """Our living descendants that run Python: the servers are descendants too, and theirs come and go."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "python" in process.name():
                found.add(process)
    return found


def test_a_body_that_hangs_is_ended_and_named(bank: Celery, report: Callable[..., Any]) -> None:
    before = pythons()
    said = report(slow_deposit, "a", 60, timeout=1.0)
    assert "a delivery did not end within 1 s" in said
    assert "Scenario:  run plainly" in said
    assert pythons() <= before


@pytest.mark.quick
def test_a_transaction_left_open_in_the_test_is_said(
    bank: Celery, assert_idempotent: Any, own_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("idempotency.testing.ground.LOCK_TIMEOUT", "100ms")
    with own_engine.connect() as connection:
        connection.execute(ROW)
        with pytest.raises(ValueError, match="leave no transaction open in the test"):
            assert_idempotent(deposit, "a", tables=["entries"])


def test_an_error_of_the_body_is_an_outcome_like_any_other(
    define: Callable[..., Any], report: Callable[..., Any], own_engine: Engine
) -> None:
    def stumbling(self: Any, name: str) -> None:
        with own_engine.begin() as connection:
            if connection.scalar(text("SELECT count(*) FROM entries")):
                raise PermanentError("it is there already", "already_there")
            connection.execute(ROW)
        self.session.execute(text("SELECT 1"))

    said = report(define(stumbling), "a")
    assert "already_there" in said
    assert "stumbles over what an interrupted one left" in said
