"""A second breaker: attempts whose calls, locks, refusals and used-up counts lead to a wrong end."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, Row, text

from idempotency import AttemptsExhausted, PermanentError, StillUnknown, StoredRefusal, maintenance
from idempotency import task as task_module
from idempotency.lease import Holding
from idempotency.runtime import Runtime
from tests.bank import INSERT
from tests.deliveries import Deliveries
from tests.services.test_conclusions import Provider, code, deaths, lost
from tests.services.test_core import age, make_task

Record = Callable[[str], Row[Any]]
LOCKED = text("SELECT * FROM entries WHERE account = 'payment' FOR UPDATE")


@pytest.fixture
def connection(engine: Engine) -> Iterator[Connection]:
    with engine.connect() as connection:
        yield connection


@pytest.fixture
def locked(engine: Engine) -> Iterator[None]:
    """A row that somebody else holds for as long as the test takes."""
    with engine.connect() as setup:
        setup.execute(text("INSERT INTO entries (account, amount) VALUES ('payment', 100)"))
    # past SQLAlchemy: to an eager call a transaction of this thread would be its caller's
    address = engine.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(address) as holder:
        holder.execute(str(LOCKED))
        yield
        holder.rollback()


# ---------------------------------------------------------------- calls that are checked


def keyed(function: Any) -> Any:
    """How a gateway is often made: a wrapper turns the key into a header of the client that it hands in."""

    @functools.wraps(function)
    def call(*args: Any, idempotency_key: str, **kwargs: Any) -> Any:
        return function({"Idempotency-Key": idempotency_key}, *args, **kwargs)

    return call


@keyed
def charge(headers: dict[str, str], amount: int) -> str:
    return f"charged {amount}"


def test_a_call_through_a_decorator_is_refused_although_it_can_be_made(
    bank: Celery, deliveries: Deliveries, record: Record
) -> None:
    """`inspect.signature` follows `functools.wraps` to the function inside, which is called otherwise."""
    assert charge(5, idempotency_key="k") == "charged 5"
    task = make_task(bank, lambda self: self.effect("call", charge, 5))
    assert deliveries.deliver(task, key="k").state == "FAILURE"
    assert (code(record("k"))[0], record("k").attempts, record("k").effects) == ("call_refused", 1, {})


@pytest.mark.parametrize("name", ["what", "function"])
def test_an_argument_named_like_one_of_the_check_uses_up_all_attempts(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record, name: str
) -> None:
    """`check_call(what, function, *args, **kwargs)` takes the effect's own keywords for its own."""

    def order(*, idempotency_key: str, **of: str) -> str:
        return f"ordered {of}"

    assert order(idempotency_key="k", **{name: "shoes"})
    task = make_task(bank, lambda self: self.effect("call", order, **{name: "shoes"}), max_attempts=2)
    for _ in range(3):
        deliveries.deliver(task, key="k", origin="retry")
        age(engine, "k")
    assert (record("k").status, code(record("k"))[0], record("k").effects) == ("failed", "attempts_exhausted", {})


# ---------------------------------------------------------------- locks


def test_an_eager_call_that_meets_a_lock_recurses_until_python_gives_up(
    bank: Celery, record: Record, locked: None
) -> None:
    """Given back, without a pause: no attempt is used, so nothing but the recursion limit ends the call."""
    runs: list[int] = []

    def body(self: Any) -> None:
        runs.append(1)
        self.session.execute(text("SET LOCAL lock_timeout = '1ms'"))
        self.session.execute(LOCKED)

    task = make_task(bank, body, max_attempts=2)
    with pytest.raises(RecursionError):
        task.apply(idempotency_key="k", throw=True).get()
    assert len(runs) > 100
    assert record("k").status != "failed"


def test_autoretry_makes_a_lock_use_up_the_attempts(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record, locked: None
) -> None:
    """Celery's own option wraps the error into a `Retry`, and what the lock time-out means is not looked for in it."""

    def body(self: Any) -> None:
        self.session.execute(text("SET LOCAL lock_timeout = '20ms'"))
        self.session.execute(LOCKED)

    task = make_task(bank, body, max_attempts=2, autoretry_for=(Exception,), retry_backoff=False)
    for _ in range(3):
        deliveries.deliver(task, key="k", origin="retry")
        age(engine, "k")
    assert code(record("k"))[0] == "attempts_exhausted"


# ---------------------------------------------------------------- refusals that are rebuilt


class Declined(StoredRefusal):
    def __init__(self, message: str, *, card: str) -> None:
        super().__init__(message, "card_declined")
        self.card = card


class Explained(StoredRefusal):
    def __init__(self, message: str, advice: str) -> None:
        super().__init__(message, "card_declined")
        self.advice = advice

    def __str__(self) -> str:
        return f"{self.message} ({self.advice})"


def test_a_rebuilt_refusal_lacks_what_its_handler_reads(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record
) -> None:
    """The handler worked in the first attempt; in the next ones the same class comes without its attributes."""
    second = Provider(lost())

    def first(*, idempotency_key: str) -> str:
        raise Declined("the card was declined", card="first")

    def body(self: Any) -> Any:
        try:
            return self.effect("first", first)
        except Declined as declined:
            return self.effect(f"instead of {declined.card}", second)

    task = make_task(bank, body, max_attempts=3)
    for _ in range(4):
        deliveries.deliver(task, key="k", origin="retry")
        age(engine, "k")
    assert code(record("k")) == ("effect_unknown", "attempts_exhausted")
    assert len(second.keys) == 1  # never repeated, though its key would have settled it


def test_a_rebuilt_refusal_that_cannot_be_printed_ends_as_attempts_exhausted(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record
) -> None:
    """The worker died after the refusal was recorded; `str()` of the rebuilt error raises in the middle of the end."""
    states: list[str] = []
    died: list[int] = []

    def refuse(*, idempotency_key: str) -> str:
        raise Explained("the card was declined", "try another one")

    def body(self: Any) -> Any:
        try:
            return self.effect("call", refuse)
        except Explained:
            if not died:
                died.append(1)
                raise ValueError("a deadlock, say") from None
            raise

    task = make_task(bank, body, max_attempts=3)
    states.append(deliveries.deliver(task, key="k").state)
    for _ in range(4):
        age(engine, "k")
        states.append(deliveries.deliver(task, key="k", origin="retry").state)
        connection.execute(
            text(
                "UPDATE idempotency.records SET locked_until = clock_timestamp() - interval '1s' WHERE status = 'started'"
            )
        )
        maintenance.recover(bank)
    assert states[:3] == ["RETRY", "REJECTED", "REJECTED"]
    assert code(record("k"))[0] == "attempts_exhausted"


# ---------------------------------------------------------------- attempts used up


def test_an_older_relay_ends_what_the_newer_workers_would_still_try(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record
) -> None:
    """A rolling deploy raises max_attempts; one death is swept by a relay that has the old number."""
    runs: list[int] = []

    def body(self: Any) -> str:
        runs.append(1)
        if len(runs) == 1:
            raise ValueError("again")
        return "paid"

    task = make_task(bank, body, max_attempts=20)
    deliveries.deliver(task, key="k")
    deaths(engine, "k", 6)
    type(task).max_attempts = 5  # the relay's code
    maintenance.recover(bank)
    type(task).max_attempts = 20
    deliveries.deliver(task, key="k", origin="recover")
    assert (code(record("k"))[0], record("k").attempts, len(runs)) == ("attempts_exhausted", 7, 1)


class GaveUp(AttemptsExhausted):
    default_code = "gave_up"


def test_a_bodys_own_word_of_giving_up_is_replaced(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record
) -> None:
    """Over an effect that happened the body is run again, and its own code and message are nowhere in the record."""

    def body(self: Any) -> None:
        self.effect("call", Provider())
        raise GaveUp("the bank has closed the account")

    task = make_task(bank, body)
    deliveries.deliver(task, key="k")
    age(engine, "k")
    deliveries.deliver(task, key="k", origin="retry")
    assert code(record("k")) == ("unfinished", "attempts_exhausted")
    assert "closed" not in record("k").error


# ---------------------------------------------------------------- the process's clock


def test_a_body_that_holds_the_interpreter_longer_than_a_lease_never_completes(
    bank: Celery, deliveries: Deliveries, engine: Engine, connection: Connection, record: Record
) -> None:
    """Nobody took the operation and its finish would match: it is thrown away five times in each delivery."""
    runs: list[int] = []

    def body(self: Any) -> str:
        self.session.execute(INSERT, {"account": "a", "amount": 1})
        runs.append(1)
        # a C extension that keeps the GIL: neither the heartbeat nor anything else of the process runs meanwhile
        (holding,) = Runtime.of(bank).heartbeat._holdings.values()
        assert isinstance(holding, Holding)
        holding.renewed_at -= 61.0
        return "paid"

    task = make_task(bank, body, max_attempts=2)
    states = []
    for _ in range(3):
        states.append(deliveries.deliver(task, key="k", origin="recover").state)
        connection.execute(
            text(
                "UPDATE idempotency.records SET locked_until = clock_timestamp() - interval '1s' WHERE status = 'started'"
            )
        )
        maintenance.recover(bank)
    assert (states, len(runs)) == (["REJECTED", "REJECTED", "FAILURE"], 10)
    assert (code(record("k"))[0], record("k").duplicates) == ("attempts_exhausted", 0)


def test_after_an_outage_longer_than_a_lease_every_body_begins_twice(
    bank: Celery, deliveries: Deliveries, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`since` is from before the wait for Postgres, which lasts up to five minutes: the new claim counts as lost."""
    runs: list[str] = []
    clock = iter([61.0])  # how long the first claim has waited for its answer

    class Time:
        @staticmethod
        def monotonic() -> float:
            return time.monotonic() - next(clock, 0.0)

    def body(self: Any) -> str:
        runs.append("the client's mail is written")
        self.session.execute(INSERT, {"account": "a", "amount": 1})
        return "paid"

    task = make_task(bank, body)
    monkeypatch.setattr(task_module, "time", Time)
    assert deliveries.deliver(task, key="k").value == "paid"
    assert (len(runs), record("k").attempts) == (2, 1)


def test_a_deploy_that_breaks_a_signature_ends_what_is_open_at_its_first_claim(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record
) -> None:
    """Four attempts are left, and the next release would repair it: checked before it looks at what was begun."""
    provider = Provider(lost())
    reconciles: list[Any] = [lambda doubt: StillUnknown()]
    task = make_task(bank, lambda self: self.effect("call", provider, reconcile=reconciles[0]))
    deliveries.deliver(task, key="k")
    age(engine, "k")
    reconciles[0] = lambda in_doubt: StillUnknown()  # the deploy
    assert deliveries.deliver(task, key="k", origin="retry").state == "FAILURE"
    assert (code(record("k")), record("k").attempts) == (("effect_unknown", "call_refused"), 2)


class Coded(PermanentError):
    """As gateways' errors are often written: the code is the provider's, set after the base class has had its turn."""

    def __init__(self, message: str, code: Any) -> None:
        super().__init__(message)
        self.code = code


@pytest.mark.parametrize("value", [None, "declined\0"], ids=["none", "NUL"])
def test_a_code_set_after_the_constructor_loses_the_refusal(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record, value: Any
) -> None:
    """What is stored is cleaned in `PermanentError.__init__` only: the end is refused by Postgres, claim after claim."""
    states: list[str] = []
    told: list[str] = []

    def body(self: Any) -> None:
        raise Coded("the card was declined", value)

    task = make_task(bank, body, max_attempts=2, on_failed=lambda *end: told.append(end[2].code))
    for _ in range(4):
        states.append(deliveries.deliver(task, key="k", origin="recover").state)
        connection.execute(
            text(
                "UPDATE idempotency.records SET locked_until = clock_timestamp() - interval '1s' WHERE status = 'started'"
            )
        )
        maintenance.recover(bank)
        if record("k").status == "failed":
            break
    assert states == ["REJECTED", "REJECTED", "FAILURE"]
    assert (code(record("k"))[0], told[-1], len(told)) == ("attempts_exhausted", "attempts_exhausted", 11)


def test_a_body_that_changes_its_provider_charges_at_both_before_it_is_stopped(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record
) -> None:
    """A failover, or an effect that a deploy has renamed: what was passed over is looked for at the end only."""
    first, second, up = Provider(lost()), Provider(), [True]

    def body(self: Any) -> Any:
        if up.pop():
            return self.effect("charge at the first", first, reconcile=lambda doubt: StillUnknown())
        return self.effect("charge at the second", second)

    task = make_task(bank, body)
    deliveries.deliver(task, key="k")
    up.append(False)
    age(engine, "k")
    assert deliveries.deliver(task, key="k", origin="retry").state == "FAILURE"
    assert (len(first.keys), len(second.keys)) == (1, 1)
    assert code(record("k")) == ("effect_unknown", None)
