"""Effects and steps: the outside world acts once per key, whatever is lost on the way."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import text
from sqlalchemy.engine import Engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from idempotency import (
    DidNotHappen,
    EffectMismatch,
    EffectNameReused,
    EffectUnknown,
    Happened,
    OpenTransaction,
    PermanentError,
    StillUnknown,
    StoredFailure,
    StoredRefusal,
    Unfinished,
)
from idempotency.attempt.effects import provider_key
from idempotency.observe import metrics
from idempotency.store import dead_letters
from idempotency.wire.keys import OperationId
from tests.support import bank as app_module
from tests.support.deliveries import Deliveries
from tests.support.operations import Entries, Record, make_due
from tests.support.outside import OutsideWorld
from tests.support.tasks import ROW, make_task

KEY = OperationId("default", "t", "k")


class Base(DeclarativeBase):
    pass


class Entry(Base):
    __tablename__ = "entries"
    id: Mapped[int] = mapped_column(primary_key=True)
    account: Mapped[str]


@pytest.mark.parametrize(
    ("error", "state"),
    [(None, "done"), (StoredRefusal("declined", "declined"), "not_happened"), (ValueError("no answer"), "begun")],
)
def test_what_an_effects_function_writes_is_committed_with_its_outcome_unless_it_raises(
    bank: Celery, deliveries: Deliveries, record: Record, entries: Entries, error: Exception | None, state: str
) -> None:
    def body(self: Any) -> None:
        def charge(*, idempotency_key: str) -> str:
            self.session.add(Entry(account="of the effect"))
            if error is not None:
                self.session.flush()
                raise error
            return "ch_1"

        with nullcontext() if error is None else pytest.raises(type(error)):
            assert self.effect("charge", charge) == "ch_1"
        self.effect("next", lambda *, idempotency_key: None)  # no transaction is open
        self.session.add(Entry(account="of the attempt"))
        self.session.flush()
        raise ConnectionError("something after it")

    assert deliveries.deliver(make_task(bank, body), key="k").state == "RETRY"
    assert (entries("of the effect"), entries("of the attempt")) == (int(error is None), 0)
    assert record("k").effects["charge"]["state"] == state


def test_a_function_that_wrote_what_the_database_refuses_leaves_its_effect_open(
    bank: Celery, deliveries: Deliveries, record: Record, entries: Entries, engine: Engine
) -> None:
    called = []

    def body(self: Any) -> Any:
        def charge(*, idempotency_key: str) -> str:
            called.append(idempotency_key)
            self.session.add(Entry(account="a", id=1))
            self.session.add(Entry(account="b", id=1 if len(called) == 1 else 2))
            return "ch_1"

        return self.effect("charge", charge)

    task = make_task(bank, body)
    assert deliveries.deliver(task, key="k").state == "RETRY"
    assert record("k").effects["charge"]["state"] == "begun"
    make_due(engine, "k")
    assert deliveries.deliver(task, key="k").value == "ch_1"
    assert (called[0] == called[1], entries("a"), entries("b")) == (True, 1, 1)


def test_a_recorded_effect_is_not_called_again(
    bank: Celery, deliveries: Deliveries, outside: OutsideWorld, record: Record, engine: Engine
) -> None:
    def body(self: Any) -> Any:
        answer = self.effect("call", app_module.call, outside.url)
        if record("k").attempts == 1:
            raise ValueError("after the effect")
        return answer

    task = make_task(bank, body)
    assert deliveries.deliver(task, key="k").state == "RETRY"
    make_due(engine, "k")
    assert deliveries.deliver(task, key="k").value == {"amount": 7}
    assert list(outside.calls.values()) == [1]


def test_a_call_whose_reply_was_lost_is_repeated_under_the_same_key(
    bank: Celery, deliveries: Deliveries, outside: OutsideWorld, record: Record, engine: Engine
) -> None:
    outside.script = ["fail after"]
    task = make_task(bank, lambda self: self.effect("call", app_module.call, outside.url))
    assert deliveries.deliver(task, key="k").state == "RETRY"
    assert record("k").effects["call"]["state"] == "begun"
    make_due(engine, "k")
    assert deliveries.deliver(task, key="k").state == "SUCCESS"
    assert (list(outside.calls.values()), list(outside.acts.values())) == ([2], [1])


def test_the_provider_is_asked_before_it_is_called_again(
    bank: Celery, deliveries: Deliveries, outside: OutsideWorld, engine: Engine
) -> None:
    doubts = []

    def find(url: str, *, doubt: Any) -> Any:
        doubts.append(doubt)
        return Happened({"amount": 7, "found": True})

    outside.script = ["fail after"]
    task = make_task(bank, lambda self: self.effect("call", app_module.call, outside.url, reconcile=find))
    deliveries.deliver(task, key="k")
    make_due(engine, "k")
    assert deliveries.deliver(task, key="k").value == {"amount": 7, "found": True}
    assert list(outside.calls.values()) == [1]
    assert doubts[0].idempotency_key in outside.calls
    assert doubts[0].ended_for is None


def test_a_proven_no_moves_the_effect_to_its_next_key(
    bank: Celery, deliveries: Deliveries, outside: OutsideWorld, record: Record, engine: Engine
) -> None:
    outside.script = ["fail before"]
    task = make_task(
        bank,
        lambda self: self.effect("call", app_module.call, outside.url, reconcile=lambda url, *, doubt: DidNotHappen()),
    )
    deliveries.deliver(task, key="k")
    make_due(engine, "k")
    assert deliveries.deliver(task, key="k").state == "SUCCESS"
    assert record("k").effects["call"]["number"] == 2
    assert (len(outside.calls), sum(outside.acts.values())) == (2, 1)


def test_a_stored_failure_is_asked_about_and_called_under_the_next_key(
    bank: Celery, deliveries: Deliveries, outside: OutsideWorld
) -> None:
    answers = [StoredFailure("stored 500")]

    def call(url: str, *, idempotency_key: str) -> Any:
        if answers:
            raise answers.pop()
        return app_module.call(url, idempotency_key=idempotency_key)

    doubts = []

    def find(url: str, *, doubt: Any) -> Any:
        doubts.append(doubt.ended_for is not None and 0 <= doubt.ended_for < 5)
        return DidNotHappen()

    task = make_task(bank, lambda self: self.effect("call", call, outside.url, reconcile=find))
    assert deliveries.deliver(task, key="k").state == "SUCCESS"
    assert doubts == [True]
    assert sum(outside.acts.values()) == 1


def test_a_stored_failure_that_stays_unknown_is_asked_and_not_called(
    bank: Celery, deliveries: Deliveries, outside: OutsideWorld, record: Record, engine: Engine
) -> None:
    calls = []

    def call(url: str, *, idempotency_key: str) -> None:
        calls.append(idempotency_key)
        raise StoredFailure("stored 500")

    found = [StillUnknown(), StillUnknown(), Happened({"amount": 7})]
    task = make_task(
        bank, lambda self: self.effect("call", call, outside.url, reconcile=lambda url, *, doubt: found.pop(0))
    )
    assert deliveries.deliver(task, key="k").state == "RETRY"
    make_due(engine, "k")
    assert deliveries.deliver(task, key="k").state == "RETRY"
    make_due(engine, "k")
    assert deliveries.deliver(task, key="k").value == {"amount": 7}
    assert len(calls) == 1
    assert record("k").attempts == 1  # too early to tell is no error


def test_a_stored_failure_without_reconcile_waits_for_a_person(
    bank: Celery, deliveries: Deliveries, record: Record
) -> None:
    def call(*, idempotency_key: str) -> None:
        raise StoredFailure("stored 500")

    outcome = deliveries.deliver(make_task(bank, lambda self: self.effect("call", call)), key="k")
    assert isinstance(outcome.value, EffectUnknown)
    assert json.loads(record("k").error)["code"] == "effect_unknown"


def test_a_stored_failure_without_reconcile_is_not_waited_for(
    bank: Celery, deliveries: Deliveries, record: Record, engine: Engine
) -> None:
    calls = []

    def call(*, idempotency_key: str) -> None:
        calls.append(idempotency_key)
        raise StoredFailure("stored 500")

    task = make_task(bank, lambda self: self.effect("call", call))
    deliveries.deliver(task, key="k")
    with engine.connect() as connection:
        letter = connection.execute(text("SELECT id FROM idempotency.dead_letters")).scalar_one()
        dead_letters.replay(connection, letter)
    assert isinstance(deliveries.deliver(task, key="k", origin="replay").value, EffectUnknown)
    assert (record("k").status, len(calls)) == ("failed", 1)


def test_a_call_is_not_repeated_beyond_the_providers_key_retention(
    bank: Celery, deliveries: Deliveries, outside: OutsideWorld, engine: Engine, record: Record
) -> None:
    outside.script = ["fail after"]
    task = make_task(bank, lambda self: self.effect("call", app_module.call, outside.url))
    deliveries.deliver(task, key="k")
    move_begun(engine, 25 * 3600)
    make_due(engine, "k")
    outcome = deliveries.deliver(task, key="k")
    assert isinstance(outcome.value, EffectUnknown)
    assert list(outside.calls.values()) == [1]
    with engine.connect() as connection:
        letter = connection.execute(text("SELECT reason FROM idempotency.dead_letters")).scalar_one()
    assert letter == "effect_unknown"


def test_within_the_retention_the_same_call_is_repeated(
    bank: Celery, deliveries: Deliveries, outside: OutsideWorld, engine: Engine
) -> None:
    outside.script = ["fail after"]
    task = make_task(bank, lambda self: self.effect("call", app_module.call, outside.url))
    deliveries.deliver(task, key="k")
    move_begun(engine, 23 * 3600)
    make_due(engine, "k")
    assert deliveries.deliver(task, key="k").state == "SUCCESS"
    assert list(outside.calls.values()) == [2]


def test_a_refusal_of_the_provider_is_a_known_outcome(bank: Celery, deliveries: Deliveries, record: Record) -> None:
    def declined(*, idempotency_key: str) -> None:
        raise PermanentError("card declined", "card_declined")

    deliveries.deliver(make_task(bank, lambda self: self.effect("call", declined)), key="k")
    assert record("k").effects["call"]["state"] == "not_happened"
    assert json.loads(record("k").error) == {"code": "card_declined", "message": "card declined", "declined": True}


def test_an_effect_with_a_transaction_open_is_refused_reads_included(
    bank: Celery, deliveries: Deliveries, outside: OutsideWorld
) -> None:
    def body(self: Any) -> None:
        self.session.execute(text("SELECT 1"))
        self.effect("call", app_module.call, outside.url)

    assert isinstance(deliveries.deliver(make_task(bank, body), key="k").value, OpenTransaction)
    assert not outside.calls


def test_an_effect_after_rollback_is_accepted(bank: Celery, deliveries: Deliveries, outside: OutsideWorld) -> None:
    def body(self: Any) -> Any:
        self.session.execute(text("SELECT 1"))
        self.session.rollback()
        return self.effect("call", app_module.call, outside.url)

    assert deliveries.deliver(make_task(bank, body), key="k").state == "SUCCESS"


def test_an_effect_with_pending_objects_in_the_session_is_refused(
    bank: Celery, deliveries: Deliveries, outside: OutsideWorld
) -> None:
    def body(self: Any) -> None:
        self.session.add(Entry(account="row"))
        self.effect("call", app_module.call, outside.url)

    assert isinstance(deliveries.deliver(make_task(bank, body), key="k").value, OpenTransaction)


def test_the_same_name_twice_is_refused_and_two_names_are_accepted(
    bank: Celery, deliveries: Deliveries, outside: OutsideWorld, record: Record
) -> None:
    def twice(self: Any) -> None:
        self.effect("call", app_module.call, outside.url)
        self.effect("call", app_module.call, outside.url)

    def two(self: Any) -> None:
        self.effect("one", app_module.call, outside.url)
        self.effect("two", app_module.call, outside.url)

    refused = deliveries.deliver(make_task(bank, twice), key="k").value
    assert isinstance(refused, Unfinished)  # the first one has happened
    assert json.loads(record("k").error)["cause"]["code"] == EffectNameReused.default_code
    assert deliveries.deliver(make_task(bank, two), key="l").state == "SUCCESS"


def test_other_arguments_under_a_begun_name_are_refused(
    bank: Celery, deliveries: Deliveries, outside: OutsideWorld, record: Record, engine: Engine
) -> None:
    outside.script = ["fail after"]

    def body(self: Any) -> Any:
        return self.effect("call", app_module.call, outside.url + f"?attempt={record('k').attempts}")

    task = make_task(bank, body)
    deliveries.deliver(task, key="k")
    make_due(engine, "k")
    assert isinstance(deliveries.deliver(task, key="k").value, EffectUnknown)  # what was begun is still open
    assert json.loads(record("k").error)["cause"]["code"] == EffectMismatch.default_code


def test_a_step_is_committed_with_its_result_and_not_repeated(
    bank: Celery, deliveries: Deliveries, entries: Entries, record: Record, engine: Engine
) -> None:
    def body(self: Any) -> Any:
        count = self.step("reserve", lambda session: session.execute(ROW).rowcount)
        if record("k").attempts == 1:
            raise ValueError("after the step")
        return count

    task = make_task(bank, body)
    assert deliveries.deliver(task, key="k").state == "RETRY"
    assert entries("row") == 1
    make_due(engine, "k")
    assert deliveries.deliver(task, key="k").value == 1
    assert entries("row") == 1


def test_a_function_may_have_parameters_that_are_called_as_those_of_step_and_effect(
    bank: Celery, deliveries: Deliveries
) -> None:
    def body(self: Any) -> Any:
        put = self.step("put", lambda session, name, fn: f"{name} {fn}", name="n", fn="f")
        return self.effect("call", lambda name, fn, idempotency_key: f"{put} {name} {fn}", name="n", fn="f")

    assert deliveries.deliver(make_task(bank, body), key="k").value == "n f n f"


def test_a_step_that_raises_leaves_nothing(
    bank: Celery, deliveries: Deliveries, entries: Entries, record: Record
) -> None:
    def reserve(session: Session) -> None:
        session.execute(ROW)
        raise PermanentError("no")

    deliveries.deliver(make_task(bank, lambda self: self.step("reserve", reserve)), key="k")
    assert entries("row") == 0
    assert record("k").effects == {}


def test_a_holder_that_was_replaced_begins_nothing_and_writes_nothing(
    bank: Celery, deliveries: Deliveries, outside: OutsideWorld, entries: Entries, engine: Engine, record: Record
) -> None:
    def body(self: Any) -> Any:
        self.session.execute(ROW)
        self.session.rollback()
        if record("k").attempts == 1:  # another attempt takes over while we are in the body
            with engine.connect() as connection:
                connection.execute(
                    text("UPDATE idempotency.records SET locked_until = clock_timestamp() - interval '1s'")
                )
            outcomes.append(deliveries.deliver(task, key="k", origin="recover"))
        self.effect("call", app_module.call, outside.url)
        self.session.execute(ROW)
        return "done"

    outcomes = []
    task = make_task(bank, body)
    outcomes.append(deliveries.deliver(task, key="k"))
    assert [outcome.value for outcome in outcomes] == ["done", "done"]
    assert (list(outside.calls.values()), entries("row")) == ([1], 1)
    assert metrics.fenced.labels(task.name)._value.get() == 1


def test_provider_keys_depend_on_everything_but_the_attempt() -> None:
    keys = {
        provider_key(KEY, "a", 1),
        provider_key(KEY, "a", 2),
        provider_key(KEY, "b", 1),
        provider_key(OperationId("other", "t", "k"), "a", 1),
        provider_key(OperationId("default", "u", "k"), "a", 1),
        provider_key(OperationId("default", "t", "l"), "a", 1),
    }
    assert len(keys) == 6
    assert provider_key(KEY, "a", 1) in keys
    assert all(len(key) <= 255 for key in keys)


def move_begun(engine: Engine, seconds: Any) -> None:
    with engine.connect() as connection:
        connection.execute(
            text(
                "UPDATE idempotency.records SET effects = jsonb_set(effects, '{call,begun_at}', "
                "to_jsonb((effects -> 'call' ->> 'begun_at')::float8 - :seconds))"
            ),
            {"seconds": seconds},
        )


def test_the_clock_of_this_process_plays_no_part(
    bank: Celery, deliveries: Deliveries, outside: OutsideWorld, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside.script = ["fail after"]
    task = make_task(bank, lambda self: self.effect("call", app_module.call, outside.url))
    deliveries.deliver(task, key="k")
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 2 * 86400)
    make_due(engine, "k")
    assert deliveries.deliver(task, key="k").state == "SUCCESS"


@pytest.mark.parametrize("answer", [None, True, DidNotHappen])
def test_an_answer_of_reconcile_that_is_none_is_an_ordinary_error(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record, answer: Any
) -> None:
    calls = []

    def lost(*, idempotency_key: str) -> None:
        calls.append(idempotency_key)
        raise ConnectionError

    task = make_task(bank, lambda self: self.effect("call", lost, reconcile=lambda doubt: answer))
    deliveries.deliver(task, key="k")
    make_due(engine, "k")
    assert deliveries.deliver(task, key="k", origin="retry").state == "RETRY"
    assert (record("k").effects["call"]["state"], len(calls)) == ("begun", 1)
    assert "reconcile must return" in record("k").error
