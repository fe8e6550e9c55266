"""Headers of a caller that decide over its message: for Celery, or for RabbitMQ."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import kombu
import pytest
from celery import Celery
from celery.app.task import Context
from sqlalchemy import Engine, text

from idempotency.application import close_runtime
from idempotency.broker.queues import declare_queues
from idempotency.errors import InvalidArguments
from idempotency.letters.examine import examine
from idempotency.queues import dead_letter_queues
from idempotency.relay.relay import Relay
from idempotency.wire.headers import MISPLACED, refused_headers
from idempotency.worker.prepared import BUDGET, PREPARED
from tests.support import bank as b
from tests.support import queues
from tests.support.processes import Processes, eventually
from tests.support.tasks import transactional

OF_CELERY, OF_RABBITMQ = "is a field of Celery's message", "has RabbitMQ copy the message"
DECIDING = {
    **dict.fromkeys(["task", "chain", "chord", "taskset", "called_directly", "get"], OF_CELERY),
    **dict.fromkeys(["compression", "stamps", "shadow", "delivery_info", "reply_to", "args"], OF_CELERY),
    **dict.fromkeys(["CC", "BCC"], OF_RABBITMQ),
}


# a space that does not break, as names of customers have it: `str.isprintable` says no
UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"task_id": "refund\u00a0of ann"}, "task_id: must be printable"),
    ({"headers": {"headers": "text"}}, "headers: must be an object"),
    (
        {"headers": {f"h{number}": 1 for number in range(1950)}},
        "headers: at most 1900, with those inside others, got 19",
    ),
    ({"headers": {"long": "x" * 125_000}}, "headers: at most 122880 bytes, got 125"),
]
UNFIT_SENT = [
    ({"shadow": "refund\u00a0of ann"}, "shadow: must be printable"),
    ({"time_limit": "soon"}, "time_limit and soft_time_limit: must be seconds from 0 to 1000000000, as numbers"),
    ({"soft_time_limit": -1}, "time_limit and soft_time_limit: must be seconds"),
    ({"time_limit": float("nan")}, "time_limit and soft_time_limit: must be seconds"),
    ({"time_limit": "3"}, "time_limit and soft_time_limit: must be seconds"),
    ({"eta": "tomorrow"}, "eta: must be a time"),
    ({"group_id": "a\nb"}, "group_id: must be printable"),
]


def ids(value: Any) -> str:
    return next(iter(value)) if isinstance(value, dict) else ""


@pytest.mark.parametrize(("options", "what"), UNFIT, ids=ids)
def test_what_a_worker_would_refuse_is_refused_where_it_is_enqueued(
    bank: Celery, engine: Engine, options: dict[str, Any], what: str
) -> None:
    with transactional(engine).begin() as caller, pytest.raises(InvalidArguments, match=f"^{what}"):
        b.deposit.enqueue(caller, "a", **options)


@pytest.mark.parametrize(("options", "what"), [*UNFIT, *UNFIT_SENT], ids=ids)
def test_what_a_worker_would_refuse_is_refused_where_it_is_sent(
    bank: Celery, options: dict[str, Any], what: str
) -> None:
    follows: Any = b.deposit.s().set(idempotency_key="follows", **options)
    with pytest.raises(InvalidArguments, match=f"^{what}"):
        b.deposit.apply_async(("a",), **options)
    with pytest.raises(InvalidArguments, match=f"^{what}"):
        b.deposit.apply_async(("a",), link=follows)


def test_a_task_that_makes_up_a_shadow_no_worker_would_take_is_told(
    bank: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(b.deposit, "shadow_name", lambda args, kwargs, options: f"refund\n{args[0]}")
    with pytest.raises(InvalidArguments, match="shadow: must be printable"):
        b.deposit.delay("a")


@pytest.mark.parametrize("name", DECIDING)
def test_what_decides_over_a_message_is_refused_where_it_is_given(bank: Celery, engine: Engine, name: str) -> None:
    given = {name: "ethereum"}
    follows: Any = b.deposit.s().set(headers=given, idempotency_key="follows")
    refused = pytest.raises(InvalidArguments, match=f"^headers: '{name}' {DECIDING[name]}$")
    with transactional(engine).begin() as caller, refused:
        b.deposit.enqueue(caller, "a", headers=given)
    for options in (
        {"headers": given},
        {"link": follows},
        {"link": follows.clone(immutable=True)},
        {"link_error": follows},
    ):
        with refused:
            b.deposit.apply_async(("a",), **options)


def test_no_stored_message_is_copied_to_other_queues(bank: Celery, engine: Engine, relays: Callable[[], Relay]) -> None:
    """An earlier version stored such a header."""
    queue = bank.amqp.queues[bank.conf.task_default_queue]
    name = f"of-another-application-{queue.name}"
    with bank.connection_for_write() as connection:
        channel = declare_queues(connection, [*dead_letter_queues([queue]), queue])
        channel.queue_declare(name, durable=True, auto_delete=False)
        channel.queue_bind(name, queue.exchange.name, name)
        with transactional(engine).begin() as caller:
            b.deposit.enqueue(caller, "a1", headers={"C": [name], "BC": [name]})
            caller.execute(
                text(
                    """UPDATE idempotency.outbox SET message = replace(replace(message, '"C":', '"CC":'), '"BC":', '"BCC":')"""
                )
            )
        assert relays().run_once().published == 1
        copy = channel.basic_get(name)
        channel.queue_delete(name)
    assert copy is None
    assert len(queues.drained(bank)) == 1


@pytest.mark.parametrize(("is_in_body", "reason"), [(True, None), (False, "unsigned")])
def test_a_plain_tasks_header_counts_only_where_its_body_lacks_the_name(
    bank: Celery, is_in_body: bool, reason: str | None
) -> None:
    @bank.task(name="plain", shared=False)
    def plain() -> None:
        pass

    bank.finalize()
    wire = bank.amqp.as_task_v2("1", "plain", (), {})
    args, kwargs, embed = wire.body
    headers: dict[str, Any] = {**wire.headers, "chain": "ethereum"}
    arrived = kombu.Message(
        body=json.dumps([args, kwargs, embed if is_in_body else {}]),
        headers=headers,
        content_type="application/json",
        content_encoding="utf-8",
        accept={"application/json"},
    )
    close_runtime(bank)
    bank.conf.idempotency_message_secrets = "a" * 32
    try:
        assert examine(bank, arrived).reason == reason
    finally:
        close_runtime(bank)
        bank.conf.idempotency_message_secrets = ""
        bank.tasks.pop("plain")


@pytest.mark.long
@pytest.mark.parametrize("way", ["delay", "enqueue"])
def test_a_header_of_a_callers_own_is_no_attribute_of_ours(
    bank: Celery, engine: Engine, relay: Relay, processes: Processes, entries: Callable[[str], int], way: str
) -> None:
    """Celery makes each header an attribute of its request, where ours are, too."""
    given = {"attempt": "2", "asked": "no", PREPARED: "yes", BUDGET: "much"}
    if way == "enqueue":
        with transactional(engine).begin() as caller:
            b.deposit.enqueue(caller, "mine", headers=given)
        relay.run_once()
    else:
        b.deposit.apply_async(("mine",), headers=given)
    worker = processes.worker("--concurrency", "1")
    eventually(lambda: entries("mine") == 1, what=worker.log)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT status FROM idempotency.records")).scalars().all() == ["completed"]


def test_no_caller_gives_a_header_that_celery_reads_as_its_own() -> None:
    """But for `headers`, in which tracing tools put a copy of theirs."""
    own = {name: 0 for name in vars(Context) if not name.startswith("__")}
    assert refused_headers(own) == sorted(own.keys() - {"headers"})
    methods = {name for name in own if callable(getattr(Context, name))}
    assert methods <= set(MISPLACED)
