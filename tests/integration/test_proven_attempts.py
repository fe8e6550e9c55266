"""What a second reader proved wrong about attempts: their refusals, pauses, keys, limits, and the application's part."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.orm import Session

from idempotency import (
    AttemptsExhausted,
    DidNotHappen,
    EffectUnknown,
    Happened,
    IdempotentTask,
    Operation,
    OperationFailed,
    PermanentError,
    StillUnknown,
    StoredRefusal,
)
from idempotency.attempt.attempt import ON_FAILED_TRIES
from idempotency.attempt.runtime import Runtime
from idempotency.operate import operators
from idempotency.store import records
from idempotency.upkeep import maintenance
from idempotency.upkeep.maintenance import SPARE_CLAIMS
from tests.support import operations as op
from tests.support.deliveries import Deliveries, deliver_row
from tests.support.operations import Entries, Record, code, deaths, make_due, recover_now
from tests.support.operators import ANN, replay, shown
from tests.support.tasks import Provider, lost, make_task, on_failed, told, told_codes, unwrite, write

NOTE = text("INSERT INTO failures (account, code) VALUES ('note', 'x')")


# ---------------------------------------------------------------- refusals


class Declined(PermanentError):
    """The application's own."""

    def __init__(self, message: str, code: str, *, card: str) -> None:
        super().__init__(message, code)
        self.card = card


@pytest.mark.parametrize("refused", [StoredRefusal, Declined])
def test_a_refusal_that_a_body_handles_is_handled_in_its_next_attempt(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record, refused: Any
) -> None:
    second_card = Provider(lost())

    def first_card(*, idempotency_key: str) -> str:
        more = {"card": "first"} if refused is Declined else {}
        raise refused("the card was declined", "card_declined", **more)

    def body(self: Any) -> Any:
        try:
            return self.effect("first", first_card)
        except refused:
            return self.effect("second", second_card)

    task = make_task(bank, body, on_failed=on_failed)
    assert deliveries.deliver(task, key="k").state == "RETRY"
    make_due(engine, "k")
    assert deliveries.deliver(task, key="k", origin="retry").value == {"charge": "ch_1"}
    assert (record("k").status, told_codes(), len(set(second_card.keys))) == ("completed", [], 1)


class Slotted(StoredRefusal):
    """Keeps what it prints where it is not looked for."""

    __slots__ = ("advice",)

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message, code)
        self.advice = "try another one"

    def __str__(self) -> str:
        return f"{self.message} ({self.advice})"


class Opaque(StoredRefusal):
    """Keeps what is no JSON."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message, code)
        self.response = object()


class Particular(StoredRefusal):
    """Cannot be made from a message and a code."""

    def __new__(cls, *args: object, **card: str) -> Particular:
        return super().__new__(cls, *args) if card else int("no card")  # type: ignore[return-value]

    def __init__(self, message: str, code: str, **card: str) -> None:
        super().__init__(message, code)


def local() -> type[StoredRefusal]:
    class Local(StoredRefusal):
        pass

    return Local


@pytest.mark.parametrize("kind", [local(), Slotted, Opaque, functools.partial(Particular, card="first")])
def test_a_refusal_that_cannot_be_made_again_keeps_its_code_and_message(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record, kind: Callable[..., StoredRefusal]
) -> None:
    refusal = kind("the card was declined", "card_declined")
    runs: list[type] = []

    def charge(*, idempotency_key: str) -> str:
        raise refusal

    def body(self: Any) -> None:
        try:
            self.effect("call", charge)
        except StoredRefusal as refused:
            runs.append(type(refused))
            if len(runs) == 1:
                raise ValueError("a deadlock, say") from None
            raise

    task = make_task(bank, body)
    deliveries.deliver(task, key="k")
    make_due(engine, "k")
    assert deliveries.deliver(task, key="k", origin="retry").state == "FAILURE"
    assert (runs, code(record("k"))) == ([type(refusal), StoredRefusal], ("card_declined", None))
    assert json.loads(record("k").error)["message"] == str(refusal)


class Explained(StoredRefusal):
    """The application's own, with what it prints and what its handler reads."""

    def __init__(self, message: str, advice: dict[str, str]) -> None:
        super().__init__(message, "card_declined")
        self.advice = advice

    def __str__(self) -> str:
        return f"{self.message} (use {self.advice['card']})"


def test_a_refusal_comes_back_with_the_attributes_its_handler_reads(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record
) -> None:
    second, said = Provider(lost(), lost()), []

    def first(*, idempotency_key: str) -> str:
        raise Explained("the card was declined", {"card": "second"})

    def body(self: Any) -> Any:
        try:
            return self.effect("first", first)
        except Explained as refused:
            said.append(str(refused))
            return self.effect(f"instead with {refused.advice['card']}", second)

    task = make_task(bank, body, max_attempts=3)
    for _ in range(3):
        outcome = deliveries.deliver(task, key="k", origin="retry")
        make_due(engine, "k")
    assert (outcome.value, len(set(second.keys)), record("k").status) == ({"charge": "ch_1"}, 1, "completed")
    assert said == ["the card was declined (use second)"] * 3


class Coded(PermanentError):
    """As gateways' errors are often written: the code is the provider's, set after the base class has had its turn."""

    def __init__(self, message: str, code: Any) -> None:
        super().__init__(message)
        self.code = code


@pytest.mark.parametrize(
    ("value", "stored"), [(None, "permanent_error"), ("declined\0", "declined\ufffd"), (402, "402")]
)
def test_a_code_set_after_the_constructor_ends_its_operation(
    bank: Celery, deliveries: Deliveries, record: Record, value: Any, stored: str
) -> None:
    def body(self: Any) -> None:
        raise Coded("the card was declined", value)

    assert deliveries.deliver(make_task(bank, body, on_failed=on_failed), key="k").state == "FAILURE"
    assert (code(record("k")), record("k").attempts, told_codes()) == ((stored, None), 1, [stored])


@pytest.mark.parametrize("value", ["declined\0", "declined\ud800", 402], ids=["NUL", "half a pair", "a number"])
@pytest.mark.parametrize("where", ["body", "effect"])
def test_a_refusal_ends_its_operation_whatever_its_code_is_made_of(
    bank: Celery, deliveries: Deliveries, record: Record, value: Any, where: str
) -> None:
    def refuse(*, idempotency_key: str = "") -> None:
        raise PermanentError(ValueError("declined"), value)  # type: ignore[arg-type]

    task = make_task(bank, lambda self: refuse() if where == "body" else self.effect("call", refuse), max_attempts=3)
    assert deliveries.deliver(task, key="k").state == "FAILURE"
    assert (record("k").status, record("k").attempts) == ("failed", 1)
    assert code(record("k"))[0].startswith("declined" if isinstance(value, str) else "402")
    assert {entry["state"] for entry in record("k").effects.values()} <= {"not_happened"}


# ---------------------------------------------------------------- attempts that are used up


def test_a_lower_max_attempts_runs_undo_and_on_failed(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record, entries: Entries
) -> None:
    def body(self: Any) -> None:
        self.step("reserve", write, "reserved", undo=unwrite)
        raise ValueError("again")

    task = make_task(bank, body, max_attempts=10, on_failed=on_failed)
    for _ in range(8):
        assert deliveries.deliver(task, key="k", origin="retry").state == "RETRY"
        make_due(engine, "k")
    type(task).max_attempts = 2  # the deploy
    deliveries.deliver(task, key="k", origin="retry")
    assert code(record("k")) == ("attempts_exhausted", None)
    assert (entries("reserved"), entries("undone reserved"), told_codes()) == (0, 1, ["attempts_exhausted"])


def test_a_lower_max_attempts_asks_the_provider_before_an_end(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record
) -> None:
    provider = Provider(*(lost() for _ in range(9)))
    answers: list[Any] = []
    task = make_task(
        bank,
        lambda self: self.effect("call", provider, reconcile=answers[0] if answers else None),
        max_attempts=5,
        on_failed=on_failed,
    )
    for _ in range(4):
        deliveries.deliver(task, key="k", origin="retry")
        make_due(engine, "k")
    answers.append(lambda doubt: Happened({"charge": "ch_1"}))
    type(task).max_attempts = 2
    assert deliveries.deliver(task, key="k", origin="retry").value == {"charge": "ch_1"}
    assert (record("k").status, told_codes()) == ("completed", [])


def test_a_lower_max_attempts_leaves_the_end_to_a_worker(
    bank: Celery, connection: Connection, engine: Engine, deliveries: Deliveries, record: Record
) -> None:
    """The sweep ends only what has died in so many claims since its attempts were found used up."""

    def body(self: Any) -> None:
        raise ValueError("again")

    task = make_task(bank, body, max_attempts=50)
    deliveries.deliver(task, key="k")
    type(task).max_attempts = 2
    for died_in, noted, ends in (
        (20, None, "released"),
        (1 + 2 * SPARE_CLAIMS, None, "released"),
        (20 + SPARE_CLAIMS, 22, "released"),
        (21 + SPARE_CLAIMS, 22, "failed"),
    ):
        deaths(engine, "k", died_in, spent_at=noted)
        maintenance.recover(bank)
        assert record("k").status == ends


def test_an_operation_that_dies_in_every_claim_is_ended_by_the_sweep(
    bank: Celery, engine: Engine, deliveries: Deliveries, record: Record
) -> None:
    def body(self: Any) -> None:
        raise ValueError("again")

    deliveries.deliver(make_task(bank, body, max_attempts=2), key="k")
    deaths(engine, "k", 2 + 2 * SPARE_CLAIMS)
    maintenance.recover(bank)
    assert code(record("k"))[0] == "attempts_exhausted"


@pytest.mark.parametrize("limit", ["max_retries", "max_attempts"])
def test_retries_used_up_get_a_last_look_like_attempts(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record, limit: str
) -> None:
    provider = Provider(lost(), lost())

    def find(*, doubt: Any) -> Any:
        return Happened({"charge": "ch_1"}) if len(provider.keys) == 2 else StillUnknown()

    def body(self: Any) -> Any:
        try:
            return self.effect("call", provider, reconcile=find)
        except ConnectionError as error:
            raise self.retry(exc=error, countdown=0, max_retries=1 if limit == "max_retries" else None) from None

    task = make_task(bank, body, max_attempts=2 if limit == "max_attempts" else None, on_failed=on_failed)
    for _ in range(3):
        outcome = deliveries.deliver(task, key="k", origin="retry")
        make_due(engine, "k")
    assert (outcome.value, record("k").status, told_codes()) == ({"charge": "ch_1"}, "completed", [])


@pytest.mark.parametrize("options", [{}, {"autoretry_for": (Exception,), "retry_backoff": False}], ids=str)
def test_a_lock_that_somebody_holds_uses_no_attempt(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record, options: dict[str, Any]
) -> None:
    """A frozen attempt keeps the locks of its transaction for several leases."""

    def body(self: Any) -> str:
        self.session.execute(text("SET LOCAL lock_timeout = '20ms'"))
        self.session.execute(text("SELECT * FROM entries WHERE account = 'payment' FOR UPDATE"))
        return "paid"

    task = make_task(bank, body, max_attempts=2, **options)
    with engine.connect() as frozen:
        frozen.execute(text("INSERT INTO entries (account, amount) VALUES ('payment', 100)"))
        with create_engine(engine.url).connect() as holder:
            holder.execute(text("SELECT * FROM entries FOR UPDATE"))
            for _ in range(4):
                assert deliveries.deliver(task, key="k", origin="recover").state == "RETRY"
                assert record("k").attempts == 0
                make_due(engine, "k")
    assert deliveries.deliver(task, key="k", origin="recover").value == "paid"


def test_a_retry_beyond_the_calendar_ends_the_operation(bank: Celery, deliveries: Deliveries, record: Record) -> None:
    task = make_task(bank, lambda self: self.retry(countdown=2.0**60))
    assert deliveries.deliver(task, key="k").state == "FAILURE"
    assert code(record("k"))[0] == "call_refused"


# ---------------------------------------------------------------- calls


def undo_without_result(session: Session) -> None: ...


@pytest.mark.parametrize(
    "body",
    [
        lambda self: self.effect("call", lambda: calls.append("called")),
        lambda self: self.effect("call", lambda *, idempotency_key: calls.append("called"), reconcile=lambda: None),
        lambda self: self.step("step", lambda session: calls.append("called"), undo=undo_without_result),
    ],
    ids=["no idempotency_key", "no doubt", "no result"],
)
def test_a_function_that_cannot_be_called_so_is_refused_before_anything_is_begun(
    bank: Celery, deliveries: Deliveries, record: Record, body: Any
) -> None:
    calls.clear()
    assert deliveries.deliver(make_task(bank, body), key="k").state == "FAILURE"
    assert (code(record("k"))[0], record("k").effects, calls) == ("call_refused", {}, [])


calls: list[str] = []


def test_an_attempt_that_resumes_after_its_lease_calls_nothing(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was paused between the beginning of its effect and the call, and its own heartbeat with it."""
    charged: list[str] = []
    begin = records.begin_effect
    paused: list[int] = []

    def charge(*, idempotency_key: str) -> str:
        charged.append(idempotency_key)
        return f"ch_{len(charged)}"

    def begin_and_freeze(connection_: Connection, claim: Any, *args: Any) -> Any:
        begun = begin(connection_, claim, *args)
        if paused:
            return begun
        paused.append(1)
        (holding,) = Runtime.of(bank).heartbeat._holdings.values()
        holding.renewed_at -= 600.0  # ten leases pass
        connection.execute(text("UPDATE idempotency.records SET locked_until = clock_timestamp() - interval '9 min'"))
        connection.execute(text("UPDATE idempotency.records SET revoked_generation = generation"))
        deliveries.deliver(task, key="k", origin="recover")
        assert (code(record("k"))[0], charged) == ("effect_unknown", [])
        operators.resolve_effect(bank, shown(connection, task), "call", DidNotHappen(), ANN)
        assert replay(bank, connection, deliveries, task).value == "ch_1"
        return begun

    task = make_task(bank, lambda self: self.effect("call", charge), on_failed=on_failed)
    monkeypatch.setattr(records, "begin_effect", begin_and_freeze)
    assert deliveries.deliver(task, key="k").value == "ch_1"
    assert (record("k").status, len(charged)) == ("completed", 1)


def test_a_call_is_not_repeated_when_its_key_could_expire_on_the_way(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record
) -> None:
    provider = Provider(lost())
    task = make_task(bank, lambda self: self.effect("call", provider), on_failed=on_failed)
    deliveries.deliver(task, key="k")
    settings = Runtime.of(bank).settings
    earlier = settings.provider_key_retention - settings.longest_run + 1.0
    connection.execute(
        text("""UPDATE idempotency.records SET effects = jsonb_set(effects, '{call,begun_at}',
                to_jsonb((effects -> 'call' ->> 'begun_at')::float8 - :earlier))"""),
        {"earlier": earlier},
    )
    make_due(engine, "k")
    deliveries.deliver(task, key="k", origin="retry")
    assert (code(record("k"))[0], len(provider.keys)) == ("effect_unknown", 1)


@pytest.mark.parametrize("used_up", [False, True])
def test_an_operation_does_not_complete_over_a_call_that_it_passed_over(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record, used_up: bool
) -> None:
    """Attempt 1 called and the reply is lost; before attempt 2 the order is cancelled, so that its body returns early."""
    provider, cancelled = Provider(lost()), []

    def body(self: Any) -> Any:
        if cancelled:
            return {"status": "cancelled, nothing charged"}
        return self.effect("call", provider, reconcile=lambda doubt: StillUnknown())

    task = make_task(bank, body, on_failed=on_failed, max_attempts=1 if used_up else 5)
    deliveries.deliver(task, key="k")
    cancelled.append(1)
    make_due(engine, "k")
    assert deliveries.deliver(task, key="k", origin="retry").state == "FAILURE"
    assert code(record("k")) == ("effect_unknown", "attempts_exhausted" if used_up else None)
    assert (told_codes(), len(op.dead_letters(connection))) == (["effect_unknown"], 1)
    operators.resolve_effect(bank, shown(connection, task), "call", DidNotHappen(), ANN)
    assert replay(bank, connection, deliveries, task).value == {"status": "cancelled, nothing charged"}


def test_what_a_person_has_said_is_remembered_for_its_retention(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record
) -> None:
    provider = Provider(lost())
    task = make_task(bank, lambda self: self.effect("call", provider), max_attempts=1, on_failed=on_failed)
    deliveries.deliver(task, key="k")
    operators.cancel(bank, shown(connection, task), ANN, may_have_happened=True)
    ago = "UPDATE idempotency.records SET expires_at = expires_at - :ago, completed_at = completed_at - :ago"
    connection.execute(text(ago), {"ago": timedelta(days=31)})
    operators.resolve_effect(bank, shown(connection, task), "call", Happened({"charge": "ch_1"}), ANN)
    connection.execute(text("UPDATE idempotency.dead_letters SET status = 'discarded', settled_at = clock_timestamp()"))
    connection.execute(text("DELETE FROM idempotency.outbox"))
    assert maintenance.purge(bank) == 0
    assert isinstance(deliveries.deliver(task, key="k").value, OperationFailed)
    assert len(provider.keys) == 1


def test_on_failed_is_told_one_type_for_each_code(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection
) -> None:
    heard: list[PermanentError] = []
    provider = Provider(lost())
    task = make_task(
        bank, lambda self: self.effect("call", provider), max_attempts=1, on_failed=lambda *told: heard.append(told[2])
    )
    deliveries.deliver(task, key="k")
    make_due(engine, "k")
    deliveries.deliver(task, key="k", origin="retry")
    operators.resolve_effect(bank, shown(connection, task), "call", DidNotHappen(), ANN, end=True)
    assert [(type(error), error.code) for error in heard] == [
        (EffectUnknown, "effect_unknown"),
        (AttemptsExhausted, "attempts_exhausted"),
    ]


def test_a_renamed_parameter_does_not_strand_what_is_between_attempts(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record
) -> None:
    def old(self: Any, account: str) -> None:
        raise ValueError("again")

    task = make_task(bank, old)
    with Session(engine) as session, session.begin():
        task.enqueue(session, "a", idempotency_key="k")
    assert deliver_row(deliveries, task, op.outbox(connection)[0]).state == "RETRY"
    make_due(engine, "k")

    def new(self: Any, account_id: str) -> str:
        return account_id

    del bank.tasks[task.name]
    renamed = bank.task(base=IdempotentTask, bind=True, name=task.name, shared=False)(new)
    assert deliver_row(deliveries, renamed, op.outbox(connection)[-1]).value == "a"
    assert record("k").status == "completed"


# ---------------------------------------------------------------- the application's part of an end


def commit_the_connection(session: Session, operation: Operation, error: PermanentError) -> None:
    told.append((error.code, operation))
    session.execute(NOTE)
    session.connection().commit()


def roll_the_connection_back(session: Session, operation: Operation, error: PermanentError) -> None:
    told.append((error.code, operation))
    session.execute(NOTE)
    session.connection().rollback()


def invalidate(session: Session, operation: Operation, error: PermanentError) -> None:
    """SQLAlchemy's advice after a gevent time-out."""
    told.append((error.code, operation))
    session.execute(NOTE)
    session.invalidate()


def commit_in_sql(session: Session, operation: Operation, error: PermanentError) -> None:
    """Hand-written SQL."""
    told.append((error.code, operation))
    session.execute(NOTE)
    session.execute(text("COMMIT"))


def commit_behind_another_statement(session: Session, operation: Operation, error: PermanentError) -> None:
    """In one string with another statement, where nothing sees it before Postgres does."""
    told.append((error.code, operation))
    session.execute(text("INSERT INTO failures (account, code) VALUES ('note', 'x'); COMMIT"))


HANDLERS = [commit_the_connection, roll_the_connection_back, invalidate, commit_in_sql, commit_behind_another_statement]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("handler", HANDLERS)
def test_an_on_failed_that_ends_its_transaction_ends_its_operation_without_it(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record, handler: Any
) -> None:
    def waiting(self: Any) -> None:
        raise ValueError("again")

    def declined(self: Any) -> None:
        raise PermanentError("no", "declined")

    task = make_task(bank, waiting, on_failed=handler)
    deliveries.deliver(task, key="k")
    operators.cancel(bank, shown(connection, task), ANN)
    assert code(record("k"))[0] == "cancelled"

    task = make_task(bank, declined, on_failed=handler)
    assert deliveries.deliver(task, key="k2").state == "FAILURE"
    assert (code(record("k2"))[0], record("k2").attempts) == ("declined", 1)
    assert told_codes() == ["cancelled", "declined"]
    assert [letter.reason for letter in op.dead_letters(connection)] == ["on_failed_error"] * 2


@pytest.mark.filterwarnings("ignore")
def test_undos_that_on_failed_has_committed_are_not_run_again(
    bank: Celery, deliveries: Deliveries, record: Record, entries: Entries
) -> None:
    def body(self: Any) -> None:
        self.step("reserve", write, "reserved", undo=unwrite)
        raise PermanentError("no", "declined")

    task = make_task(bank, body, on_failed=commit_behind_another_statement)
    deliveries.deliver(task, key="k")
    assert code(record("k")) == ("unfinished", "declined")
    assert (entries("undone reserved"), told_codes()) == (1, ["declined"])


def test_a_soft_time_limit_in_the_applications_part_is_no_end(
    bank: Celery, deliveries: Deliveries, record: Record, entries: Entries
) -> None:
    def hurry(session: Session, operation: Operation, error: PermanentError) -> None:
        told.append((error.code, operation))
        if len(told) == 1:
            raise SoftTimeLimitExceeded

    def body(self: Any) -> None:
        self.step("reserve", write, "reserved", undo=unwrite)
        raise PermanentError("no", "declined")

    task = make_task(bank, body, on_failed=hurry)
    assert deliveries.deliver(task, key="k").state == "FAILURE"
    assert (code(record("k")), told_codes()) == (("declined", None), ["declined", "declined"])
    assert (entries("reserved"), entries("undone reserved")) == (0, 1)


def test_what_dies_in_its_end_is_ended_without_the_applications_part(
    bank: Celery, connection: Connection, engine: Engine, deliveries: Deliveries, record: Record
) -> None:
    """`on_failed` kills its process: five more claims, then the end goes on without it."""

    def body(self: Any) -> None:
        raise ValueError("again")

    def die(session: Session, operation: Operation, error: PermanentError) -> None:
        raise SystemExit(9)

    task = make_task(bank, body, max_attempts=1, on_failed=die)
    for _ in range(10):
        with contextlib.suppress(SystemExit):
            deliveries.deliver(task, key="k", origin="recover")
        if record("k").status == "failed":
            break
        recover_now(bank, connection)
    assert (record("k").status, record("k").attempts) == ("failed", 1 + 1 + ON_FAILED_TRIES)
