"""What was found by reading: each test passes while the fault is there."""

from __future__ import annotations

import json
import re
from typing import Any

from celery import Celery
from sqlalchemy import Connection, Engine, text

from idempotency import OperationId
from idempotency.operate.archive import archive
from idempotency.operate.change import Change
from idempotency.operate.edit import edit
from idempotency.operate.people import Person
from tests.support import operations as op
from tests.support.deliveries import Deliveries
from tests.support.operations import make_due
from tests.support.tasks import make_task
from tests.web.conftest import Browser, Open
from tests.web.test_changes import audited, deliver_all, flaky, letters, shown


def begin(page: Browser, **fields: str) -> tuple[str, dict[str, str]]:
    """Begin a bulk without warnings. Returns its address, and the fields of its form."""
    answer = page.post("/bulk/begin", {"reason": "again"} | fields)
    assert answer.status_code == 303, answer.text
    address = answer.headers["location"]
    found = re.search(r'name="of" value="([^"]*)"', page.get(address).text)
    assert found is not None
    return address, {"of": found[1]}


def said(page: Browser, address: str) -> str:
    return re.sub(r"\s+", " ", shown(page.get(address)))


def give_up(connection: Connection) -> None:
    """As a relay does with a row that can never be published (`outbox._GIVE_UP`)."""
    from idempotency.store.outbox import _UNPUBLISHABLE

    connection.exec_driver_sql(
        f"""WITH failed AS (
            UPDATE idempotency.outbox SET status = 'failed', last_error = 'too long', attempts = attempts + 1,
                settled_at = clock_timestamp() WHERE status = 'pending' AND origin = 'replay' RETURNING *
        ) {_UNPUBLISHABLE}""",
        {"service": "bank"},
    )


def test_a_bulk_says_for_ever_that_what_could_not_be_published_is_running(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    task = flaky(bank, {"n0", "n1"})
    for name in ("n0", "n1"):
        deliveries.deliver(task, name=name, key=name)
    otto = browser("otto")
    address, of = begin(otto, only_task=task.name)
    otto.post("/bulk/next", of)
    give_up(connection)
    assert [(row.key, row.reason, row.status) for row in letters(connection)][-1] == ("n0", "unpublishable", "open")
    told = said(otto, address)
    # the replay has made another letter: it has failed again, and the page says that it runs, and will for ever
    assert "1 running" in told, told
    assert "has not ended yet" in told
    assert "Stopped" not in told
    assert "failed again" not in told.partition("failed again as")[2]
    refused = otto.post("/bulk/next", of)
    assert "those before have not ended yet" in shown(refused)


def test_one_letter_that_is_refused_keeps_the_rest_of_a_bulk_from_ever_being_sent(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    fails = {"n0", "n1", "n2", "n3"}
    task = flaky(bank, fails)
    for name in sorted(fails):
        deliveries.deliver(task, name=name, key=name)
    otto = browser("otto")
    address, of = begin(otto, only_task=task.name)
    fails.clear()
    otto.post("/bulk/next", of)
    deliver_all(bank, deliveries, connection)
    assert "1 of 4 completed" in said(otto, address)
    second = letters(connection)[1].id
    archive(bank, second, Change("olga", "not now"))
    for _ in range(3):  # "one that is refused ends its stage, and only a person sends the rest"
        answer = otto.post("/bulk/next", of)
        assert answer.status_code == 303
        assert deliver_all(bank, deliveries, connection) == 0
    told = said(otto, address)
    assert "1 of 4 completed · 3 waiting" in told, told
    assert "Replay the next 3" in told


def test_a_bulk_sends_the_wrong_message_of_a_letter_whose_correction_waits_for_its_approval(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    ran: list[int] = []
    is_broken = [True]

    def refund(self: Any, order_id: str, cents: int) -> int:
        if is_broken[0]:
            raise ValueError("the provider is away")
        ran.append(cents)
        return cents

    task = make_task(bank, refund, key="{order_id}", max_attempts=1, moves_money=True)
    deliveries.deliver(task, order_id="o1", cents=50_000)
    (letter,) = letters(connection)
    issuer = bank.conf["idempotency_oidc_issuer"]
    right = json.dumps({"kwargs": {"order_id": "o1", "cents": 500}})
    assert not edit(
        bank, letter.id, right, Change("adam", "a hundred times too much", is_verified=True),
        person=Person("adam", "operator", issuer),
    )  # fmt: skip
    is_broken[0] = False
    otto = browser("otto")
    address, of = begin(otto, only_task=task.name)  # no warning to read
    assert "edit" not in said(otto, address).lower()
    otto.post("/bulk/next", of)
    assert deliver_all(bank, deliveries, connection) == 1
    assert ran == [50_000]
    assert "1 of 1 completed" in said(otto, address)
    assert [row.action for row in connection.execute(text("SELECT action FROM idempotency.audit ORDER BY id"))][-1] == "replay"


def test_an_archived_letter_is_still_on_the_list_of_money_in_doubt(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection, engine: Engine
) -> None:
    from idempotency.attempt.effects import Happened
    from idempotency.operate.change import read
    from idempotency.operate.resolve import resolve_effect
    from tests.support.tasks import Provider, lost

    task = make_task(bank, lambda self, n=1: self.effect("charge", Provider(lost(), lost(), lost())), max_attempts=1)
    for _ in range(2):
        deliveries.deliver(task, key="k")
        make_due(engine, "k")
    (letter,) = letters(connection)
    id = OperationId("default", task.name, "k")
    resolve_effect(bank, read(connection, id, "bank"), "charge", Happened(1), Change("ann", "it is there", is_verified=True))
    archive(bank, letter.id, Change("ann", "later", is_verified=True))
    assert f'href="/letters/{letter.id}"' in browser("otto").get("/doubts").text


def test_a_bulk_stops_for_a_refused_request_of_another_while_its_own_operation_runs(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    task = flaky(bank, {"n0", "n1"})
    for name in ("n0", "n1"):
        deliveries.deliver(task, name=name, key=name)
    otto = browser("otto")
    address, of = begin(otto, only_task=task.name)
    otto.post("/bulk/next", of)
    assert "1 running" in said(otto, address)
    # before its delivery comes, somebody asks for other work under the same key, and is refused
    deliveries.deliver(task, name="other", key="n0")
    assert [(row.source, row.reason) for row in letters(connection)][-1] == ("operation", "fingerprint_mismatch")
    assert op.record(connection, OperationId("default", task.name, "n0")).status == "released"
    told = said(otto, address)
    assert "Stopped: 1 failed again. Nothing more is sent" in told, told


def test_a_bulk_by_task_sends_nothing_at_all_if_its_oldest_letter_can_never_be_replayed(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    fails: set[str] = set()
    task = flaky(bank, fails)
    deliveries.deliver(task, name="done", key="done")
    deliveries.deliver(task, name="other", key="done")  # refused: a letter that only a discard by two people ends
    fails.update({"n1", "n2"})
    for name in sorted(fails):
        deliveries.deliver(task, name=name, key=name)
    assert [row.reason for row in letters(connection)][0] == "fingerprint_mismatch"
    fails.clear()
    otto = browser("otto")
    address, of = begin(otto, only_task=task.name)
    for _ in range(3):
        assert otto.post("/bulk/next", of).status_code == 303
        assert deliver_all(bank, deliveries, connection) == 0
    assert "0 of 3 completed · 3 waiting" in said(otto, address)


def test_a_bulk_of_sagas_that_could_not_be_undone_says_that_each_one_which_is_undone_has_failed_again(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection, engine: Engine
) -> None:
    from idempotency import PermanentError
    from idempotency.sagas import saga
    from tests.sagas.conftest import Stage

    stage, is_broken = Stage(bank, engine, deliveries), [True]

    def undo(self: Any, id: str) -> None:
        if is_broken[0]:
            raise ValueError("the warehouse is away")

    undoing = make_task(bank, undo, key="{id}", max_attempts=1)

    @saga("web.undone", key="{id}", app=bank)
    def undone(saga: Any, id: str) -> None:
        saga.step("make", lambda session, id: 1, id, undo=undoing)
        raise PermanentError("no", "sold_out")

    for id in ("r1", "r2"):
        stage.enqueue(undone, id)
    stage.run()
    found = [(row.task, row.key, row.reason, row.status) for row in letters(connection)]
    assert [each for each in found if each[2] == "compensation_failed"] == [
        ("web.undone", "r1", "compensation_failed", "open"),
        ("web.undone", "r2", "compensation_failed", "open"),
    ]
    otto = browser("otto")
    address, of = begin(otto, only_reason="compensation_failed")
    is_broken[0] = False
    otto.post("/bulk/next", of)
    stage.run()
    assert stage.saga("r1").status == "FAILED", "it is undone, which is what the replay was for"
    assert "Stopped: 1 failed again. Nothing more is sent" in said(otto, address)
