"""Bad inputs of calls: keys, arguments, amounts, and keys that are used already."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session

from idempotency import (
    FingerprintMismatch,
    IdempotentTask,
    InvalidArguments,
    InvalidKey,
    MissingKey,
    OperationBusy,
    OperationId,
    OperationNotFound,
    SettingsError,
    lookup,
)
from idempotency.wire import keys
from tasks import validation
from tests.integration.bad_inputs.cases import cases, nested
from tests.integration.bad_inputs.failures import failed
from tests.support import bank as b
from tests.support import operations as op
from tests.support.deliveries import Deliveries
from tests.support.refused_messages import PAST, SECRET
from tests.support.tasks import enqueued

# ---------------------------------------------------------------- calls


@dataclass(frozen=True)
class Call:
    """A call, refused with this error and this text."""

    error: type[Exception]
    says: str
    task: Any = b.returning
    args: tuple[Any, ...] = (SECRET,)
    options: dict[str, Any] = field(default_factory=dict)


def keyed(error: type[Exception], says: str, key: Any) -> Call:
    return Call(error, says, options={"idempotency_key": key})


def given(error: type[Exception], says: str, value: Any) -> Call:
    return Call(error, says, args=([SECRET, value],), options={"idempotency_key": "k"})


CALLS = {
    "01-no-key": Call(
        MissingKey, r"tests\.support\.bank\.returning: give idempotency_key=, or the task a key template"
    ),
    "01-no-argument-for-the-key": Call(MissingKey, "argument account: .*must not be None", b.deposit, (None, 5)),
    "02-key-empty": keyed(InvalidKey, "idempotency key: must not be empty or blank", ""),
    "02-key-blank": keyed(InvalidKey, "idempotency key: must not be empty or blank", " \t "),
    "02-argument-for-the-key-blank": Call(InvalidKey, "argument account: .*blank", b.deposit, (" ", 5)),
    "03-key-longer-than-255": keyed(InvalidKey, "idempotency key: at most 255 characters, got 256", SECRET[:1] * 256),
    "03-tenant-longer-than-255": Call(
        InvalidKey, "tenant: at most 255", options={"idempotency_key": "k", "tenant": "t" * 256}
    ),
    "04-key-with-NUL": keyed(InvalidKey, r"only printable ASCII, got U\+0000 at position 19", f"{SECRET}\0"),
    "04-key-with-CR-LF": keyed(InvalidKey, r"got U\+000D at position 19", f"{SECRET}\r\nX: y"),
    "04-key-with-a-control-character": keyed(InvalidKey, r"got U\+001B at position 0", f"\x1b[31m{SECRET}"),
    "04-key-not-ASCII": keyed(InvalidKey, r"got U\+00E9 at position 19", f"{SECRET}é"),
    "04-key-with-a-blank-at-its-end": keyed(InvalidKey, "must not begin or end with a blank", f"{SECRET} "),
    "04-key-no-text": keyed(InvalidKey, "idempotency key: must be text or a UUID, got int", 17),
    "11-NaN": given(InvalidArguments, r"arguments: not JSON: \S+\[1\]: NaN or infinity", float("nan")),
    "11-Infinity": given(InvalidArguments, r"arguments: not JSON: \S+\[1\]: NaN or infinity", float("-inf")),
    "11-1e999": given(InvalidArguments, r"arguments: not JSON: \S+\[1\]: NaN or infinity", json.loads("1e999")),
    "11-depth-1000": given(InvalidArguments, "arguments: nested at most 100 deep", nested(1000)),
    "11-depth-101": given(InvalidArguments, "arguments: nested at most 100 deep", nested(99)),
    "11-not-JSON": given(InvalidArguments, r"arguments: not JSON: \S+\[1\]: object; pass an id", object()),
    "11-lone-surrogate-in-the-key": keyed(InvalidKey, r"got U\+D800 at position 19", f"{SECRET}\ud800"),
    "11-too-large": given(InvalidArguments, "arguments: at most 1048576 bytes as JSON, got 11000", "x" * 1_100_000),
    "11-another-argument": Call(InvalidArguments, "arguments: too many positional", b.deposit, ("k", 5, SECRET)),
}


@pytest.mark.few(10)
@pytest.mark.parametrize("call", cases(CALLS))
def test_a_call_is_refused_where_it_is_made(
    call: Call, bank: Celery, nothing_happens: Callable[[], Any], engine: Engine
) -> None:
    ways: dict[str, Callable[[Session], Any]] = {
        "apply_async": lambda _: call.task.apply_async(call.args, **call.options),
        "a signature": lambda _: call.task.s(*call.args).apply_async(**call.options),
        "enqueue": lambda session: call.task.enqueue(session, *call.args, **call.options),
        "apply": lambda _: call.task.apply(call.args, **call.options),
    }
    with nothing_happens():
        for way, make in ways.items():
            with Session(engine) as session, session.begin():
                with pytest.raises(call.error) as refused:
                    make(session)
                assert re.search(call.says, str(refused.value)), way
                if call.error in (MissingKey, InvalidKey):
                    assert str(refused.value).startswith(f"{call.task.name}: "), way
                assert SECRET not in "".join(traceback.format_exception_only(refused.value))


@pytest.mark.parametrize("key", ["k", "k" * 255, "a b~!", " ~".strip(), "0192f0a4-7b1c-7d3e-8f00-0123456789ab"])
def test_a_call_with_a_good_key_is_accepted(key: str, bank: Celery, connection: Connection) -> None:
    enqueued(connection, b.returning, SECRET, idempotency_key=key)
    assert [row.key for row in op.outbox(connection)] == [key]


@pytest.mark.parametrize(
    "value", cases({"11-twin-NUL": "a\0b", "11-twin-lone-surrogate": "\ud800", "11-twin-depth-100": nested(98)})
)
def test_arguments_that_are_unusual_arrive_as_they_were_sent(value: Any, deliveries: Deliveries) -> None:
    for _ in range(2):
        assert deliveries.deliver(b.returning, value, key="k").value == value


EXPIRING: dict[str, Callable[[Any, Session], Any]] = {
    "20-expires-in-the-call": lambda _, session: b.deposit.apply_async((SECRET,), expires=-1),
    "20-expires-at-once": lambda _, session: b.deposit.apply_async((SECRET,), expires=0),
    "20-expires-in-a-signature": lambda _, session: b.deposit.s(SECRET).set(expires=PAST).apply_async(),
    "20-expires-of-the-task": lambda expiring, session: expiring.delay(SECRET),
    "20-expires-in-enqueue": lambda _, session: b.deposit.enqueue(session, SECRET, expires=60),
}


@pytest.mark.parametrize("call", cases(EXPIRING))
def test_what_would_expire_is_refused_at_publish(
    call: Callable[[Any, Session], Any],
    task_of: Callable[..., Any],
    engine: Engine,
    nothing_happens: Callable[[], Any],
) -> None:
    expiring = task_of(lambda self, account: None, key="{account}", expires=60)
    with nothing_happens(), Session(engine) as session, pytest.raises(InvalidArguments, match="expires") as refused:
        call(expiring, session)
    assert SECRET not in str(refused.value)


def test_a_message_of_celerys_first_protocol_is_refused_at_publish(
    configured: Celery, nothing_happens: Callable[[], Any]
) -> None:
    configured.conf.task_protocol = 1
    with nothing_happens(), pytest.raises(SettingsError, match="task_protocol: must be 2"):
        b.deposit.delay(SECRET)


# ---------------------------------------------------------------- used keys


def fingerprint(amount: int) -> str:
    return keys.fingerprint({"account": "a1", "amount": amount})


@pytest.mark.parametrize(
    "state",
    cases({"07-completed": op.completed, "07-failed": op.failed, "07-started": op.started, "07-early": op.early}),
)
def test_a_used_key_with_other_arguments_is_refused_and_the_record_stays(
    state: Any, deliveries: Deliveries, connection: Connection, nothing_happens: Callable[[], Any]
) -> None:
    state(connection, ID, fingerprint=fingerprint(5))
    before = op.record(connection, ID)
    with nothing_happens(), pytest.raises(FingerprintMismatch, match="used with other arguments") as refused:
        b.deposit("a1", 666)
    delivered = deliveries.deliver(b.deposit, "a1", 666)
    assert isinstance(delivered.value, FingerprintMismatch)
    for said in (str(refused.value), str(delivered.value)):
        assert "666" not in said
    assert op.record(connection, ID) == before
    # one letter keeps what was asked for, however often it comes
    deliveries.deliver(b.deposit, "a1", 666)
    assert [letter.reason for letter in op.dead_letters(connection)] == ["fingerprint_mismatch"]


def test_07_twin_the_same_arguments_get_the_stored_result(deliveries: Deliveries, connection: Connection) -> None:
    op.completed(connection, ID, fingerprint=fingerprint(5), result='{"of": "then"}')
    assert deliveries.deliver(b.deposit, "a1", 5).value == {"of": "then"}
    assert b.deposit("a1", 5) == {"of": "then"}
    assert op.dead_letters(connection) == []


@pytest.mark.parametrize("state", cases({"08-started": op.started, "08-waits-for-its-next-attempt": op.early}))
def test_a_key_that_is_running_is_busy(
    state: Any, deliveries: Deliveries, connection: Connection, nothing_happens: Callable[[], Any]
) -> None:
    state(connection, ID, fingerprint=fingerprint(5))
    with nothing_happens():
        with pytest.raises(OperationBusy, match=r"tests\.support\.bank\.deposit: another attempt holds this operation"):
            b.deposit("a1", 5)
        assert deliveries.deliver(b.deposit, "a1", 5).state == "IGNORED"
    row = op.record(connection, ID)
    assert row is not None
    assert row.duplicates == 2  # each let go only because it was counted


@pytest.mark.parametrize(
    "state", cases({"09-started": op.started, "09-completed": op.completed, "09-failed": op.failed, "09-none": None})
)
def test_another_tenants_key_is_independent_and_not_hinted_at(
    state: Any, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    theirs = OperationId("theirs", b.deposit.name, "a1")
    before = None
    if state is not None:
        state(connection, theirs, fingerprint=fingerprint(666))
        before = op.record(connection, theirs)
    # the same words whether they have it or not
    with pytest.raises(OperationNotFound, match=r"^tests\.support\.bank\.deposit: no operation has this key$"):
        lookup(bank, b.deposit.name, "a1", tenant="mine")
    outcome = deliveries.deliver(b.deposit, "a1", 5, tenant="mine")
    assert (outcome.state, outcome.value) == ("SUCCESS", {"account": "a1", "amount": 5})
    assert op.record(connection, theirs) == before


@pytest.mark.parametrize(
    ("one", "other"),
    cases(
        {
            "10-members-in-another-order": ({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1}),
            "10-white-space": (json.loads('{"a":[1,2]}'), json.loads('{ "a" :\n [ 1 , 2 ] }')),
            "10-escapes": (json.loads('"\\u00e9"'), json.loads('"é"')),
        }
    ),
)
def test_the_same_json_in_another_spelling_is_the_same_request(
    one: Any, other: Any, deliveries: Deliveries, entries: Callable[[str], int]
) -> None:
    first = deliveries.deliver(b.returning, one, key="k")
    again = deliveries.deliver(b.returning, other, key="k")
    assert (first.state, again.state, again.value) == ("SUCCESS", "SUCCESS", first.value)
    assert entries("returning") == 1


# ---------------------------------------------------------------- amounts and effects


AMOUNTS = {
    "13-amount-a-float": (12.5, "amount_cents: must be an integer in the minor unit, got float"),
    "13-amount-NaN": (float("nan"), "amount_cents: must be an integer in the minor unit, got float"),
    "13-amount-text": (SECRET, "amount_cents: must be an integer in the minor unit, got str"),
    "13-amount-a-bool": (True, "amount_cents: must be an integer in the minor unit, got bool"),
    "13-amount-none": (None, "amount_cents: must be an integer in the minor unit, got NoneType"),
    "13-amount-negative": (-1, "amount_cents: must be between 1 and 99999999, got -1"),
    "13-amount-zero": (0, "amount_cents: must be between 1 and 99999999, got 0"),
    "13-amount-above-the-limit": (100_000_000, "amount_cents: must be between 1 and 99999999, got 100000000"),
    "13-amount-beyond-bigint": (2**63, "amount_cents: must be between 1 and 99999999, got 9223372036854775808"),
}


@pytest.mark.parametrize(("amount", "says"), cases(AMOUNTS))
def test_an_amount_is_refused_by_its_field_and_limit(amount: Any, says: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        validation.check_amount("amount_cents", amount, at_least=1)
    assert [validation.check_amount("a", good, at_least=1) for good in (1, 99_999_999)] == [1, 99_999_999]


@pytest.mark.parametrize("currency", cases({"13-currency-unknown": "XXX", "13-currency-small": "usd", "13-none": None}))
def test_a_currency_is_refused_by_its_field(currency: Any) -> None:
    with pytest.raises(ValueError, match=r"^currency: must be one of AUD, .*, USD$"):
        validation.check_currency("currency", currency)
    assert validation.check_currency("currency", "USD") == "USD"


@pytest.mark.parametrize("kind", cases({"13-effect-name-twice": "effect", "13-step-name-twice": "step"}))
def test_the_same_name_twice_in_one_attempt_is_a_permanent_failure(
    kind: str, task_of: Callable[..., Any], deliveries: Deliveries, connection: Connection
) -> None:
    calls = []

    def act(*args: Any, **kwargs: Any) -> None:
        calls.append(kwargs)

    def body(self: IdempotentTask) -> None:
        for _ in range(2):
            getattr(self, kind)("once", act, *([SECRET] if kind == "effect" else []))

    deliveries.deliver(task_of(body), key="k")
    assert failed(connection, over_an_effect=kind == "effect") == (
        "effect_name_reused",
        "'once' is used twice in one attempt; give each effect and step its own name",
        1,
    )
    assert len(calls) == 1


@pytest.mark.parametrize("kind", cases({"13-effect-with-other-arguments": "effect", "13-step-with-other": "step"}))
def test_an_effect_with_other_arguments_later_is_a_permanent_failure(
    kind: str, task_of: Callable[..., Any], deliveries: Deliveries, connection: Connection
) -> None:
    calls = []

    def act(*args: Any, **kwargs: Any) -> None:
        calls.append(kwargs)

    def body(self: IdempotentTask) -> None:
        getattr(self, kind)("once", act, f"{SECRET} {self.request.retries}")
        raise ValueError("again")

    task = task_of(body)
    assert deliveries.deliver(task, key="k").state == "RETRY"
    connection.execute(text("UPDATE idempotency.records SET available_at = clock_timestamp() - interval '1 s'"))
    deliveries.deliver(task, key="k", origin="retry")
    assert failed(connection, over_an_effect=kind == "effect") == (
        "effect_mismatch",
        "'once' was begun with other arguments in an earlier attempt",
        2,
    )
    assert len(calls) == 1


# ---------------------------------------------------------------- used keys


ID = OperationId("default", b.deposit.name, "a1")
