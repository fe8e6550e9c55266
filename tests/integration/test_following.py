"""What Celery sends after a task: refused where the whole is sent, or kept as a dead letter, and never the task's failure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.signals import task_failure

from idempotency import CallRefused
from idempotency.letters.examine import examine
from tests.support import bank as b
from tests.support import queues
from tests.support.deliveries import Deliveries
from tests.support.operations import Entries, Record


def stored(signature: Any) -> Any:
    """A signature as a message has it."""
    return json.loads(json.dumps(signature))


@pytest.fixture
def failed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The task ids of which `on_failure` was told."""
    told: list[str] = []
    for task in (b.deposit, b.failing):
        monkeypatch.setattr(task, "on_failure", lambda _error, task_id, *_: told.append(task_id))
    return told


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """The task ids of which the signal `task_failure` was sent."""
    told: list[str] = []

    def listen(task_id: str, **_: Any) -> None:
        told.append(task_id)

    task_failure.connect(listen)
    yield told
    task_failure.disconnect(listen)


def kept_as(bank: Celery) -> list[str | None]:
    """What the guard of a worker says of the messages in the queue."""
    messages = queues.drained(bank)
    for message in messages:
        message.accept = None
    return [examine(bank, message).reason for message in messages]


REFUSED: dict[str, tuple[Callable[[], Any], list[str | None]]] = {
    "the template does not take the result": (lambda: b.deposit.s(), ["invalid_key"]),
    "no key": (lambda: b.returning.s(), ["missing_key"]),
    "the arguments do not fit": (lambda: b.deposit.si(), ["invalid_arguments"]),
    "it would expire": (lambda: b.deposit.si("next").set(expires=60), [None]),
    "a header decides which task runs": (
        lambda: b.deposit.s().set(headers={"task": b.returning.name, "CC": ["elsewhere"]}, idempotency_key="follows"),
        ["invalid_header"],
    ),
    "one of a group": (lambda: group(b.returning.s(), b.deposit.si("next")), ["missing_key", None]),
    "the first of a chain": (lambda: b.returning.s() | b.deposit.si("next"), ["missing_key"]),
}


@pytest.mark.few(5)
@pytest.mark.parametrize("embedded", ["chain", "callbacks"])
@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_call_after_a_task_is_kept_and_does_not_fail_it(
    case: str, embedded: str, bank: Celery, deliveries: Deliveries, record: Record, failed: list[str], heard: list[str]
) -> None:
    make, reasons = REFUSED[case]
    errback = b.returning.si("refund").set(idempotency_key="refund")
    queues.drained(bank)
    headers = {embedded: [stored(make())], "errbacks": [stored(errback)]}
    assert deliveries.deliver(b.deposit, "first", headers=headers).state == "SUCCESS"
    assert (record("first").status, failed, heard) == ("completed", [], [])
    assert kept_as(bank) == reasons


def test_a_refused_call_after_a_task_keeps_its_key_and_the_rest_of_its_chain(
    bank: Celery, deliveries: Deliveries
) -> None:
    queues.drained(bank)
    follows = b.deposit.si("next").set(expires=60, idempotency_key="mine")
    deliveries.deliver(b.deposit, "first", headers={"chain": [stored(b.deposit.si("last")), stored(follows)]})
    (message,) = queues.drained(bank)
    assert queues.keys([message]) == ["mine"]
    assert [each["args"] for each in json.loads(message.body)[2]["chain"]] == [["last"]]


def test_a_refused_errback_is_kept_and_hook_and_signal_are_told(
    bank: Celery, deliveries: Deliveries, failed: list[str], heard: list[str]
) -> None:
    queues.drained(bank)
    errbacks = [stored(b.returning.s())]
    deliveries.deliver(b.failing, "a", "permanent", task_id="t-1", headers={"errbacks": errbacks})
    assert (failed, heard, kept_as(bank)) == (["t-1"], ["t-1"], ["missing_key"])


def frozen(canvas: Any) -> Any:
    """As Celery makes it where its results are known: the header of a chord is then a group."""
    canvas.freeze()
    return canvas


CALLS: dict[str, Callable[[], Any]] = {
    "a chain, no key": lambda: chain(b.deposit.s("first"), b.returning.s()).apply_async(),
    "a chain, later": lambda: chain(b.deposit.s("first"), b.deposit.si("2"), b.returning.s()).apply_async(),
    "a chain, no key of its own": lambda: chain(b.deposit.s("first"), b.returning.si("x")).apply_async(),
    "a chain, expires": lambda: chain(b.deposit.s("first"), b.deposit.s().set(expires=60)).apply_async(),
    "a group in a chain": lambda: chain(b.deposit.s("first"), group(b.returning.s(), b.deposit.si("2"))).apply_async(),
    "link": lambda: b.deposit.apply_async(("first",), link=b.returning.s()),
    "a frozen chord in a link": lambda: b.deposit.apply_async(
        ("first",), link=frozen(group(chord([b.returning.si("x")], b.deposit.si("2"))))
    ),
    "link_error": lambda: b.deposit.apply_async(("first",), link_error=[b.returning.si("x")]),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_is_refused_if_what_follows_could_not_be_sent(call: str, bank: Celery) -> None:
    queues.drained(bank)
    with pytest.raises(CallRefused):
        CALLS[call]()
    assert queues.drained(bank) == []


def test_what_follows_and_can_be_sent_is_sent(bank: Celery, deliveries: Deliveries, entries: Entries) -> None:
    queues.drained(bank)
    chain(b.deposit.s("first"), b.deposit.si("next"), b.returning.s().set(idempotency_key="last")).apply_async()
    for _ in range(3):
        (message,) = queues.drained(bank)
        args, kwargs, embedded = json.loads(message.body)
        task = bank.tasks[message.headers["task"]]
        headers = message.headers | embedded
        assert (
            deliveries.deliver(task, *args, headers=headers, task_id=message.headers["id"], **kwargs).state == "SUCCESS"
        )
    assert (entries("first"), entries("next"), entries("returning")) == (1, 1, 1)
