"""`idempotent_task` and `using`: what a type checker can follow, at run time. The types themselves: tests/typing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import pytest
from celery import Celery
from sqlalchemy import Connection, text

from idempotency import IdempotentTask, InvalidArguments, MissingKey, idempotent_task
from tests.support.operations import Entries, Record
from tests.support.tasks import make_task, transactional


class OwnTask(IdempotentTask):
    """A base of the application's own."""

    bonus = 2


@pytest.fixture
def credit(bank: Celery) -> Iterator[Any]:
    """A task with a base of its own, whose argument has the name of an option."""

    @idempotent_task(bank, base=OwnTask, name="tests.credit", key="{account}", shared=False)
    def credit(self: OwnTask, account: str, priority: int = 1) -> dict[str, int]:
        row = {"account": account, "amount": priority + self.bonus}
        self.session.execute(text("INSERT INTO entries (account, amount) VALUES (:account, :amount)"), row)
        return {"credited": priority + self.bonus}

    yield credit
    bank.tasks.pop("tests.credit")


SHARED = """
from celery import Celery
from idempotency import IdempotentTask, idempotent_task

@idempotent_task(name="shared.pay", key="{payment}")
def pay(self, payment): ...

for name in ("one", "two"):
    task = Celery(name, set_as_current=False).tasks["shared.pay"]
    assert isinstance(task, IdempotentTask) and task.app.main == name, task
"""


@pytest.mark.long
def test_without_an_application_it_is_a_task_of_every_one() -> None:
    done = subprocess.run([sys.executable, "-c", SHARED], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def outbox(connection: Connection) -> Any:
    query = "SELECT *, available_at > clock_timestamp() AS waits FROM idempotency.outbox"
    return connection.execute(text(query)).one()


def test_a_typed_task_is_the_one_that_the_decorator_of_celery_makes(
    bank: Celery, credit: Any, entries: Entries, record: Record
) -> None:
    assert credit("a", priority=5) == {"credited": 7}
    assert credit("a", priority=5) == {"credited": 7}
    assert isinstance(bank.tasks["tests.credit"], OwnTask)
    assert (entries("a"), record("a").status) == (1, "completed")


def test_the_options_of_one_call_do_not_mix_with_its_arguments(credit: Any, connection: Connection) -> None:
    call = credit.using(priority=9, countdown=60, idempotency_key="k", tenant="t", task_id="id")
    with transactional(connection.engine).begin() as own:
        handle = call.enqueue(own, "a", priority=3)

    row = outbox(connection)
    message = json.loads(row.message)
    assert (row.tenant, row.key, row.waits, handle.task_id) == ("t", "k", True, "id")
    assert message["properties"]["priority"] == 9
    assert json.loads(message["body"])[:2] == [["a"], {"priority": 3}]


def test_the_options_of_a_call_that_is_sent_at_once(credit: Any, configured: Celery) -> None:
    configured.conf.task_always_eager = True
    assert credit.using(idempotency_key="k").delay("a", priority=3).get() == {"credited": 5}
    assert credit.using(idempotency_key="k").delay("a", priority=3).get() == {"credited": 5}
    with pytest.raises(InvalidArguments, match="ordering_key: only messages that are enqueued have an order"):
        credit.using(ordering_key="k").delay("a")


def test_an_option_that_does_not_exist_is_refused_and_the_others_are_named(credit: Any) -> None:
    with pytest.raises(
        InvalidArguments, match=r"using: no option 'countdwn'; there are countdown, eta, priority, queue"
    ):
        credit.using(countdwn=60)


@pytest.mark.parametrize(
    ("args", "kwargs", "got"),
    [
        ((), {"account": "a"}, ""),
        (("a",), {}, "; got str"),
        ((None, "a"), {}, "; got NoneType"),
        ((UUID(int=1),), {}, "; got UUID"),
    ],
)
def test_enqueue_without_a_session_says_what_is_missing(
    credit: Any, args: tuple[Any, ...], kwargs: dict[str, Any], got: str
) -> None:
    with pytest.raises(InvalidArguments) as raised:
        credit.enqueue(*args, **kwargs)
    assert str(raised.value) == (
        "tests.credit.enqueue: the first argument is the session whose commit sends the message, as in "
        f"enqueue(session, ...){got}"
    )


def test_a_key_function_that_asks_for_a_default_names_task_and_argument(bank: Celery, connection: Connection) -> None:
    def pay(self: IdempotentTask, payment: str, currency: str = "eur") -> None: ...

    task = make_task(bank, pay, key=lambda arguments: f"{arguments['payment']}:{arguments['currency']}")
    calls: dict[str, Callable[[], Any]] = {
        "enqueue": lambda: task.enqueue(connection, "p1"),
        "delay": lambda: task.delay("p1"),
        "a direct call": lambda: task("p1"),
    }
    for call in calls.values():
        with pytest.raises(MissingKey, match=rf"{task.name}: its key function asks for the argument 'currency'"):
            call()
