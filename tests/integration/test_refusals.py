"""Refusals of a provider: what a body makes of them, and how they end an operation."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine

from idempotency import EffectUnknown, Happened, PermanentError, StillUnknown, StoredRefusal
from idempotency.attempt import attempt
from tests.support.deliveries import Deliveries
from tests.support.operations import Record, code, make_due, recover_now
from tests.support.operators import replay_and_deliver
from tests.support.tasks import Provider, lost, make_task, on_failed, told_codes

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


# ---------------------------------------------------------------- a refusal of a repeated call


def test_a_refused_repeat_is_no_proof_about_the_first_call(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record
) -> None:
    provider = Provider(lost(), PermanentError("this API key was revoked", "key_revoked"))
    task = make_task(bank, lambda self: self.effect("call", provider), on_failed=on_failed)
    deliveries.deliver(task, key="k")
    make_due(engine, "k")
    assert isinstance(deliveries.deliver(task, key="k").value, EffectUnknown)
    assert (code(record("k"))[0], record("k").effects["call"]["state"]) == ("effect_unknown", "begun")


def test_a_refusal_that_the_provider_keeps_under_the_key_is_one(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record
) -> None:
    provider = Provider(lost(), StoredRefusal("the card was declined", "card_declined"))
    task = make_task(bank, lambda self: self.effect("call", provider))
    deliveries.deliver(task, key="k")
    make_due(engine, "k")
    deliveries.deliver(task, key="k")
    assert (code(record("k")), record("k").effects["call"]["state"]) == (("card_declined", None), "not_happened")


def test_after_a_refused_repeat_the_provider_is_asked(
    bank: Celery, deliveries: Deliveries, engine: Engine, record: Record
) -> None:
    provider = Provider(lost(), PermanentError("a parameter is invalid by now", "invalid"))
    answers: list[Any] = [Happened("found"), StillUnknown()]
    task = make_task(bank, lambda self: self.effect("call", provider, reconcile=lambda doubt: answers.pop()))
    deliveries.deliver(task, key="k")
    make_due(engine, "k")
    assert deliveries.deliver(task, key="k").value == "found"


def test_a_refusal_whose_text_holds_nul_is_recorded(bank: Celery, deliveries: Deliveries, record: Record) -> None:
    def refused(*, idempotency_key: str) -> None:
        raise PermanentError("no \0 such card", "no_card")

    deliveries.deliver(make_task(bank, lambda self: self.effect("call", refused)), key="k")
    assert (code(record("k")), record("k").effects["call"]["state"]) == (("no_card", None), "not_happened")


# ---------------------------------------------------------------- a recorded refusal


def test_a_refusal_ends_its_generation_even_when_its_worker_died(
    bank: Celery, deliveries: Deliveries, connection: Connection, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next attempt fails with the same code, and calls nothing; a person's replay calls under the next key."""
    keys: list[str] = []

    def charge(*, idempotency_key: str) -> str:
        keys.append(idempotency_key)
        if len(keys) == 1:
            raise PermanentError("the card was declined", "card_declined")
        return "ch_1"

    class Killed(BaseException):
        pass

    def killed(*_: Any, **__: Any) -> None:
        raise Killed  # SIGKILL between the recorded refusal and the failing commit

    task = make_task(bank, lambda self: self.effect("call", charge), on_failed=on_failed)
    with monkeypatch.context() as patch:
        patch.setattr(attempt.Attempt, "fail", killed)
        with pytest.raises(Killed):
            task.apply(idempotency_key="k")
    assert (record("k").status, record("k").effects["call"]["state"]) == ("started", "not_happened")
    recover_now(bank, connection)
    deliveries.deliver(task, key="k", origin="recover")
    assert (code(record("k"))[0], len(keys)) == ("card_declined", 1)
    assert replay_and_deliver(bank, connection, deliveries, task).value == "ch_1"
    assert len(set(keys)) == 2
