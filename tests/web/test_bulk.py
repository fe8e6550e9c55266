"""Replays of many letters: what is confirmed, what is said of them, and when they go no further."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, text

from idempotency import IdempotentTask, OperationId, PermanentError
from idempotency.letters.consumer import DeadLetterConsumer
from idempotency.operate.archive import archive, restore
from idempotency.operate.change import Change
from idempotency.operate.people import Person
from idempotency.sagas import saga
from idempotency.store.outbox import _UNPUBLISHABLE
from idempotency.web import bulk
from idempotency.web.bulk import Bulk
from tests.sagas.conftest import Stage
from tests.support import operations as op
from tests.support.dead_messages import body_of, headers, publish
from tests.support.deliveries import Deliveries
from tests.support.processes import eventually
from tests.support.tasks import make_task
from tests.web.conftest import Browser, Open
from tests.web.test_changes import audited, confirm, deliver_all, flaky, letters, shown


def declining(bank: Celery) -> Any:
    """A task that ends by the reason that `declined` has for its number."""

    def body(self: Any, n: int) -> str:
        if n in reasons:
            raise PermanentError("no", reasons[n])
        return "ok"

    reasons: dict[int, str] = {}
    task = make_task(bank, body)
    task.declined = reasons
    return task


def decline(task: Any, deliveries: Deliveries, *numbers: int, tenant: str = "default") -> None:
    """End the operations `k00`, `k01` … so."""
    for n in numbers:
        task.declined[n] = "gone"
        deliveries.deliver(task, n=n, key=f"k{n:02}", tenant=tenant)


def begun(page: Browser, **fields: str) -> tuple[str, dict[str, str]]:
    """Begin a bulk with its warnings read. Returns its address, and the fields of its form."""
    first = page.post("/bulk/begin", {"only_reason": "gone", "reason": "again"} | fields)
    assert first.status_code == 200, first.text
    return form_of(page, confirm(page, first))


def form_of(page: Browser, answer: Any) -> tuple[str, dict[str, str]]:
    """Where an answer leads, and the fields of the form there."""
    assert answer.status_code == 303, answer.text
    address = answer.headers["location"]
    found = re.search(r'name="of" value="([^"]*)"', page.get(address).text)
    assert found is not None
    return address, {"of": found[1]}


def begun_without_warnings(page: Browser, **fields: str) -> tuple[str, dict[str, str]]:
    """Begin a bulk of what needs no confirmation."""
    return form_of(page, page.post("/bulk/begin", {"reason": "again"} | fields))


def said(page: Browser, address: str) -> str:
    """What the page of a bulk says."""
    return re.sub(r"\s+", " ", shown(page.get(address)))


@pytest.mark.long
def test_only_what_a_person_has_read_is_confirmed(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    """Not what matches once the form comes back."""
    task = declining(bank)
    decline(task, deliveries, 1)
    otto = browser("otto")
    first = otto.post("/bulk/begin", {"only_reason": "gone", "reason": "again"})
    assert "Of 1 letter that matches" in first.text
    decline(task, deliveries, 2)
    address = confirm(otto, first).headers["location"]
    assert "0 of 1 completed" in said(otto, address)
    task.declined.clear()
    of = re.findall(r'name="(of)" value="([^"]*)"', otto.get(address).text)
    for _ in range(2):
        otto.post("/bulk/next", dict(of))
        deliver_all(bank, deliveries, connection)
    assert [row.key for row in audited(connection, "replay")] == ["k01"]


@pytest.mark.long
def test_all_warnings_are_shown_before_they_are_confirmed(browser: Open, bank: Celery, deliveries: Deliveries) -> None:
    decline(declining(bank), deliveries, *range(30))
    first = browser("otto").post("/bulk/begin", {"only_reason": "gone", "reason": "again"})
    assert [n for n in range(30) if f"k{n:02}" not in first.text] == []


@pytest.mark.long
def test_what_was_chosen_is_of_the_person_who_was_shown_it(browser: Open, bank: Celery, deliveries: Deliveries) -> None:
    decline(declining(bank), deliveries, 1)
    first = browser("otto").post("/bulk/begin", {"only_reason": "gone", "reason": "again"})
    refused = confirm(browser("olga"), first)
    assert (refused.status_code, "choose again" in shown(refused)) == (409, True)


def test_the_address_of_the_largest_bulk_fits_into_a_buffer_of_a_proxy(browser: Open) -> None:
    desk = browser("otto").client.app.state.desk
    ids = list(range(10_345_000, 10_345_000 + 7 * bulk.MOST, 7))
    largest = Bulk("f" * 32, ids, "otto", "again " * 20, frozenset(), True, 99, 99, frozenset(ids))
    of = largest.signed(desk)
    assert len(of) < bulk.LONGEST
    assert Bulk.of(desk, of) == largest


@pytest.mark.long
def test_what_has_completed_has_not_failed_again(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    """Another message under its key was rejected, which is a letter of its own with a higher number."""
    task = declining(bank)
    decline(task, deliveries, 1)
    deliveries.deliver(task, n=2, key="k01")
    assert [(row.reason, row.status) for row in letters(connection)] == [
        ("gone", "open"),
        ("fingerprint_mismatch", "open"),
    ]
    task.declined.clear()
    otto = browser("otto")
    address, of = begun(otto)
    otto.post("/bulk/next", of)
    assert "0 of 1 completed · 1 running" in said(otto, address)
    deliver_all(bank, deliveries, connection)
    assert "1 of 1 completed" in said(otto, address)
    assert "failed again as" in said(otto, address), "the column"
    assert "Stopped" not in said(otto, address)


@pytest.mark.long
def test_a_bulk_ends_also_when_what_has_completed_is_purged(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    """A letter stays longer than its operation's record."""
    task = declining(bank)
    decline(task, deliveries, 0, 1)
    task.declined.clear()
    otto = browser("otto")
    address, of = begun(otto)
    otto.post("/bulk/next", of)
    deliver_all(bank, deliveries, connection)
    connection.execute(text("DELETE FROM idempotency.records WHERE key = 'k00'"))
    connection.execute(text("UPDATE idempotency.outbox SET settled_at = clock_timestamp() WHERE key = 'k00'"))
    assert "0 of 2 completed · 1 waiting · 1 purged" in said(otto, address)
    assert otto.post("/bulk/next", of).status_code == 303
    deliver_all(bank, deliveries, connection)
    connection.execute(text("DELETE FROM idempotency.dead_letters WHERE key = 'k00'"))
    told = said(otto, address)
    assert "Stopped" not in told, "nothing is left to send"
    assert ("1 of 2 completed · 1 gone" in told, "It is over" in told) == (True, True)


@pytest.mark.long
def test_a_bulk_is_shown_only_to_who_may_see_all_its_letters(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    task = declining(bank)
    decline(task, deliveries, 0, tenant="acme")
    decline(task, deliveries, 1, tenant="globex")
    task.declined.clear()
    otto, tina = browser("otto"), browser("tina")
    address, of = begun(otto, reason="globex is furious")
    for _ in range(2):
        answer = tina.get(address)
        assert (answer.status_code, "furious" in answer.text, "of 2" in answer.text) == (404, False, False)
        otto.post("/bulk/next", of)
        deliver_all(bank, deliveries, connection)
    connection.execute(text("DELETE FROM idempotency.dead_letters"))
    assert tina.get(address).status_code == 404
    assert "2 gone" in said(otto, address)


@pytest.mark.long
def test_a_bulk_goes_on_by_itself_only_where_its_last_stage_was_sent(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    """Not where somebody opens its link, in another session of the same person, and not after a refusal."""
    task = declining(bank)
    decline(task, deliveries, *range(13))
    task.declined.clear()
    otto = browser("otto")
    address, of = begun(otto, goes_on="1")
    assert "data-submit" not in otto.get(address).text, "a person sends the first one"
    after = otto.post("/bulk/next", of).headers["location"]
    deliver_all(bank, deliveries, connection)
    assert 'data-submit="1"' in otto.get(after).text
    for other, link in ((otto, address), (browser("otto"), after), (browser("otto"), address)):
        page = other.get(link).text
        assert ("Replay the next 10" in page, "data-submit" in page) == (True, False)
    connection.execute(
        text("UPDATE idempotency.dead_letters SET reason = 'beyond_limit', fingerprint = NULL WHERE key = 'k05'")
    )
    after = otto.post("/bulk/next", of).headers["location"]
    assert "was refused" in otto.get(after).text
    deliver_all(bank, deliveries, connection)
    again = otto.get(after)
    assert ("Replay the next 1<" in again.text, "data-submit" in again.text) == (True, False)


def test_two_who_send_a_stage_at_once_replay_each_letter_once(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    task = declining(bank)
    decline(task, deliveries, *range(12))
    task.declined.clear()
    one, two = browser("otto"), browser("otto")
    _, of = begun(one)
    one.post("/bulk/next", of)
    deliver_all(bank, deliveries, connection)
    sends = [
        threading.Thread(target=page.post, args=("/bulk/next", of), kwargs={"csrf": page.csrf()}) for page in (one, two)
    ]
    for each in sends:
        each.start()
    for each in sends:
        each.join()
    assert sorted(row.key for row in audited(connection, "replay")) == [f"k{n:02}" for n in range(11)]


@pytest.mark.long
def test_a_bulk_goes_no_further_once_nobody_knows_how_one_has_ended(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    """The letter of one that failed again, and its first one, are purged meanwhile."""
    task = declining(bank)
    decline(task, deliveries, 0, 1, 2)
    otto = browser("otto")
    address, of = begun(otto)
    otto.post("/bulk/next", of)
    deliver_all(bank, deliveries, connection)
    assert "Stopped: 1 failed again" in said(otto, address)
    connection.execute(text("DELETE FROM idempotency.dead_letters WHERE key = 'k00'"))
    assert "Stopped: 1 are gone" in said(otto, address)
    assert otto.post("/bulk/next", of).status_code == 409


@pytest.mark.long
def test_who_has_fewer_tenants_by_now_sends_nothing_more(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    task = declining(bank)
    decline(task, deliveries, 0, tenant="globex")
    decline(task, deliveries, 1, 2, tenant="acme")
    otto = browser("otto")
    _, of = begun(otto)
    otto.post("/bulk/next", of)
    deliver_all(bank, deliveries, connection)
    narrower = Person("otto", "operator", bank.conf["idempotency_oidc_issuer"], tenants=frozenset({"acme"}))
    session = otto.client.app.state.desk.sessions.begin(narrower)
    otto.client.cookies.clear()
    otto.client.cookies.set("__Host-idempotency", session, domain="ops.test")
    assert otto.post("/bulk/next", of).status_code == 404
    assert len(audited(connection, "replay")) == 1


def test_letters_of_a_task_that_no_worker_knew_are_followed_to_the_end(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    """Of a bad deploy: they name no operation, which only their replays do."""
    dead = f"{bank.conf.task_default_queue}-dead"
    death = {"x-death": [{"queue": bank.conf.task_default_queue, "reason": "rejected"}]}
    consumer = DeadLetterConsumer(bank)

    def stored() -> bool:
        consumer.run_once()
        return len(letters(connection)) == 2

    try:
        consumer.run_once()
        for account in ("u1", "u2"):
            publish(bank, body_of(account), queue=dead, headers=headers(task="web.soon") | death)
        eventually(stored, what="two letters")
    finally:
        consumer.close()

    @bank.task(base=IdempotentTask, bind=True, name="web.soon", key="{account}", shared=False)
    def soon(self: Any, account: str) -> str:
        return "ok"

    try:
        otto = browser("otto")
        address = otto.post("/bulk/begin", {"only_reason": "unknown_task", "reason": "deployed"}).headers["location"]
        of = dict(re.findall(r'name="(of)" value="([^"]*)"', otto.get(address).text))
        for completed in (1, 2):
            otto.post("/bulk/next", of)
            assert deliver_all(bank, deliveries, connection) == 1
            assert f"{completed} of 2 completed" in said(otto, address)
    finally:
        bank.tasks.pop("web.soon", None)


# ---------------------------------------------------------------- what is refused, and what is no part of it


def failing(bank: Celery, deliveries: Deliveries, *names: str) -> tuple[Any, set[str]]:
    """A task whose operations of these keys have failed, and those that would fail again."""
    fails = set(names)
    task = flaky(bank, fails)
    for name in sorted(fails):
        deliveries.deliver(task, name=name, key=name)
    return task, fails


@pytest.mark.long
def test_what_is_refused_is_passed_over_and_the_rest_is_sent(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    task, fails = failing(bank, deliveries, "n0", "n1", "n2", "n3")
    otto = browser("otto")
    _, of = begun_without_warnings(otto, only_task=task.name)
    fails.clear()
    first, second, third, _ = letters(connection)
    archive(bank, first.id, Change("olga", "not now"))
    archive(bank, third.id, Change("olga", "not now"))
    after = otto.post("/bulk/next", of).headers["location"]
    # one is tried before many, also if the first of them is refused
    assert deliver_all(bank, deliveries, connection) == 1
    assert [row.details["dead_letter"] for row in audited(connection, "replay")] == [second.id]
    told = said(otto, after)
    assert f"1 replayed. Letter {first.id} was refused: archived at" in told
    assert "1 of 4 completed · 2 waiting · 1 refused" in told
    (field,) = re.findall(r'name="of" value="([^"]*)"', otto.get(after).text)
    after = otto.post("/bulk/next", {"of": field}).headers["location"]
    assert deliver_all(bank, deliveries, connection) == 1
    told = said(otto, after)
    assert f"Letter {third.id} was refused: archived at" in told
    assert ("2 of 4 completed · 2 refused" in told, "It is over" in told, "Stopped" in told) == (True, True, False)


@pytest.mark.long
def test_an_address_of_before_a_refusal_sends_the_rest_as_well(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    """It knows of no refusal: who opens it sees the letter wait, and it is tried again."""
    task, fails = failing(bank, deliveries, "n0", "n1", "n2")
    otto = browser("otto")
    address, of = begun_without_warnings(otto, only_task=task.name)
    fails.clear()
    first, *_ = letters(connection)
    archive(bank, first.id, Change("olga", "not now"))
    for _ in range(2):
        assert otto.post("/bulk/next", of).status_code == 303
        assert deliver_all(bank, deliveries, connection) == 1
    assert "2 of 3 completed · 1 waiting" in said(otto, address)
    restore(bank, first.id, Change("olga", "now"))
    assert otto.post("/bulk/next", of).status_code == 303
    assert deliver_all(bank, deliveries, connection) == 1
    assert "3 of 3 completed" in said(otto, address)


@pytest.mark.long
def test_what_can_never_be_replayed_is_left_out_and_counted(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    task, fails = failing(bank, deliveries)
    deliveries.deliver(task, name="done", key="done")
    deliveries.deliver(task, name="other", key="done")
    assert [row.reason for row in letters(connection)] == ["fingerprint_mismatch"]
    otto = browser("otto")
    refused = otto.post("/bulk/begin", {"only_task": task.name, "reason": "again"})
    assert (refused.status_code, "1 letter that can never be replayed" in shown(refused)) == (409, True)
    fails.update({"n1", "n2"})
    for name in sorted(fails):
        deliveries.deliver(task, name=name, key=name)
    fails.clear()
    address, of = begun_without_warnings(otto, only_task=task.name)
    assert "Left out: 1 letter that can never be replayed, only discarded." in said(otto, address)
    for completed in (1, 2):
        otto.post("/bulk/next", of)
        deliver_all(bank, deliveries, connection)
        assert f"{completed} of 2 completed" in said(otto, address)


@pytest.mark.long
def test_an_error_of_the_application_that_has_the_name_of_ours_is_replayed_with_others(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    task = declining(bank)
    task.declined[1] = "fingerprint_mismatch"
    deliveries.deliver(task, n=1, key="k1")
    task.declined.clear()
    otto = browser("otto")
    address, of = begun_without_warnings(otto, only_reason="fingerprint_mismatch")
    otto.post("/bulk/next", of)
    deliver_all(bank, deliveries, connection)
    told = said(otto, address)
    assert ("1 of 1 completed" in told, "Left out" in told) == (True, False)


# ---------------------------------------------------------------- what has failed again


def give_up(connection: Connection) -> None:
    """As a relay does with a row that can never be published."""
    connection.exec_driver_sql(
        f"""WITH failed AS (
            UPDATE idempotency.outbox SET status = 'failed', last_error = 'too long', attempts = attempts + 1,
                settled_at = clock_timestamp() WHERE status = 'pending' AND origin = 'replay' RETURNING *
        ) {_UNPUBLISHABLE}""",
        {"service": "bank"},
    )


def die_on_its_way(connection: Connection, origin: str) -> None:
    """As a relay stores the message of a row of this origin that it finds in a dead-letter queue."""
    connection.execute(
        text(
            "INSERT INTO idempotency.dead_letters (source, outbox_id, tenant, task, key, fingerprint, reason, consumer_service, payload)"
            " SELECT 'broker', id, tenant, task, key, fingerprint, 'delivery_limit', 'bank', message FROM idempotency.outbox WHERE origin = :origin"
        ),
        {"origin": origin},
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("dies", "reason"),
    [
        pytest.param(give_up, "unpublishable", id="not published"),
        pytest.param(
            lambda connection: die_on_its_way(connection, "replay"),
            "delivery_limit",
            id="dead on its way",
        ),
    ],
)
def test_a_replay_whose_message_does_not_arrive_has_failed_again(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection, dies: Any, reason: str
) -> None:
    task, _ = failing(bank, deliveries, "n0", "n1")
    otto = browser("otto")
    address, of = begun_without_warnings(otto, only_task=task.name)
    otto.post("/bulk/next", of)
    dies(connection)
    newest = letters(connection)[-1]
    assert (newest.key, newest.reason, newest.status) == ("n0", reason, "open")
    told = said(otto, address)
    assert "Stopped: 1 failed again" in told
    assert f"letter {newest.id}" in told
    assert "failed again" in shown(otto.post("/bulk/next", of))


@pytest.mark.long
def test_another_request_under_the_key_and_a_late_copy_stop_no_replay_that_runs(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    task, fails = failing(bank, deliveries, "n0", "n1")
    otto = browser("otto")
    address, of = begun_without_warnings(otto, only_task=task.name)
    otto.post("/bulk/next", of)
    deliveries.deliver(task, name="other", key="n0")
    assert letters(connection)[-1].reason == "fingerprint_mismatch"
    # of the message before the replay, which a broker has kept
    connection.execute(
        text(
            "INSERT INTO idempotency.outbox (message_id, tenant, task, key, fingerprint, message, queue, origin, status, published_at)"
            " SELECT 'm', tenant, task, key, fingerprint, payload, '', 'enqueue', 'published', now()"
            " FROM idempotency.dead_letters ORDER BY id LIMIT 1"
        )
    )
    die_on_its_way(connection, "enqueue")
    assert op.record(connection, OperationId("default", task.name, "n0")).status == "released"
    told = said(otto, address)
    assert ("1 running" in told, "Stopped" in told) == (True, False)
    fails.clear()
    assert deliver_all(bank, deliveries, connection) == 1
    assert "1 of 2 completed · 1 waiting" in said(otto, address)


@pytest.mark.long
def test_a_saga_that_could_not_be_undone_and_has_been_by_now_has_not_failed_again(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection, engine: Engine
) -> None:
    stage, is_broken = Stage(bank, engine, deliveries), [True]

    def undo(self: Any, id: str) -> None:
        if is_broken[0]:
            raise ValueError("the warehouse is away")

    undoing = make_task(bank, undo, key="{id}", max_attempts=1)

    @saga("web.undone", key="{id}", app=bank)
    def undone(saga: Any, id: str) -> None:
        saga.step("make", lambda session, id: 1, id, undo=undoing)
        raise PermanentError("no", "sold_out")

    for id in ("r1", "r2", "r3"):
        stage.enqueue(undone, id)
    stage.run()
    otto = browser("otto")
    address, of = begun_without_warnings(otto, only_reason="compensation_failed")
    is_broken[0] = False
    otto.post("/bulk/next", of)
    assert "1 running" in said(otto, address)
    stage.run()
    assert stage.saga("r1").status == "FAILED"
    assert "0 of 3 completed · 1 undone · 2 waiting" in said(otto, address)
    # and one that could not be undone once more has
    is_broken[0] = True
    otto.post("/bulk/next", of)
    stage.run()
    assert "Stopped: 2 failed again" in said(otto, address)
