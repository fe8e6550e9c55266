"""What people see and change on the page: each change as the command line makes it, with its audit row."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from celery import Celery
from pydantic import BaseModel
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

from idempotency import Happened, PermanentError, StillUnknown, reasons
from idempotency.application import runtime_of
from idempotency.sagas import saga
from idempotency.text import masked
from idempotency.web import runbooks
from idempotency.web.shown import age, count, short
from tests.support import bank as b
from tests.support import operations as op
from tests.support.deliveries import Deliveries, deliver_row
from tests.support.operations import Record, make_due
from tests.support.tasks import Provider, lost, make_task
from tests.web.conftest import Browser, Open, tick

SECRET = "the-customers-own-words"
AMOUNT = 471_108_150_471  # so long that no random token has it in it
HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)>\'"&'


class Charge(BaseModel):
    charge: str
    cents: int


def letters(connection: Connection) -> list[Any]:
    return list(op.dead_letters(connection))


def audited(connection: Connection, action: str) -> list[Any]:
    rows = connection.execute(
        text("SELECT * FROM idempotency.audit WHERE action = :action ORDER BY id"), {"action": action}
    )
    return list(rows)


def shown(answer: Any) -> str:
    """What a page says, without its markup."""
    return html.unescape(re.sub(r"<[^>]+>", " ", answer.text))


def deliver_all(app: Celery, deliveries: Deliveries, connection: Connection) -> int:
    """Deliver what was replayed, as a relay and a worker would. Returns how many."""
    rows = connection.execute(
        text("SELECT * FROM idempotency.outbox WHERE status = 'pending' AND origin = 'replay' ORDER BY id")
    ).all()
    for row in rows:
        connection.execute(
            text("UPDATE idempotency.outbox SET status = 'published', published_at = clock_timestamp() WHERE id = :id"),
            {"id": row.id},
        )
        deliver_row(deliveries, app.tasks[row.task], row)
    return len(rows)


@pytest.fixture
def in_doubt(bank: Celery, deliveries: Deliveries, engine: Engine) -> Any:
    """A task whose operation `k` has ended over a call whose outcome nobody knows."""
    provider = Provider(lost(), lost(), lost(), lost())
    task = make_task(
        bank,
        lambda self, cents=1250: self.effect("charge", provider),
        max_attempts=2,
        effect_types={"charge": Charge},
        moves_money=True,
        amount="cents",
    )
    for _ in range(2):
        deliveries.deliver(task, cents=1250, key="k")
        make_due(engine, "k")
    deliveries.deliver(task, cents=1250, key="k")
    return task


# ---------------------------------------------------------------- flow and failures


def test_the_flow_shows_where_work_is_and_what_is_not_alive(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    b.enqueue_deposit()
    deliveries.deliver(b.deposit, "a2")
    deliveries.deliver(b.failing, "a3", "permanent")
    op.started(connection)
    connection.execute(
        text(
            "INSERT INTO idempotency.processes (kind, name, host, pid, service, version, queues, started_at, seen_at, code_version)"
            " VALUES ('worker', 'w@h', 'h', 7, 'bank', '1.2.3', '{q}', now() - interval '2 hours', now() - interval '10 minutes', 'abc123')"
        )
    )
    said = shown(browser("otto").get("/"))
    assert "No relay is running" in said
    for part in ("w@h", "10 min silent", "abc123", "schema of the database 0021"):
        assert part in re.sub(r"\s+", " ", said), part
    queue = bank.conf.task_default_queue
    row = re.search(rf"{re.escape(queue)}((?:\s+[\d–?+]+(?: s| min)?)+)", said)
    assert row is not None


@pytest.mark.long
def test_failures_are_grouped_with_their_trend_money_and_runbook(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection, configure: Callable[..., None]
) -> None:
    def body(self: Any, cents: int) -> None:
        raise PermanentError("no", "card_declined")

    task = make_task(bank, body, amount="{cents} EUR")
    configure(code_version="v41")
    for number in range(3):
        deliveries.deliver(task, cents=1000 + number, key=f"k{number}")
    configure(code_version="v42")
    deliveries.deliver(task, cents=5, key="k3")
    connection.execute(
        text("UPDATE idempotency.dead_letters SET failed_at = now() - interval '90 minutes' WHERE key IN ('k0', 'k1')")
    )
    page = browser("rita").get("/failures")
    said = re.sub(r"\s+", " ", shown(page))
    assert f"card_declined {task.name} v41 3 ▼ 1 2" in said
    assert "3003 EUR" in said
    assert f"card_declined {task.name} v42 1 ▲ 1 0" in said
    assert "Replay." in said, "the runbook"
    assert '<a href="/runbooks/' in page.text
    only = shown(browser("rita").get("/letters?code_version=v42"))
    assert "k3" in only
    assert "k1" not in only


# ---------------------------------------------------------------- hostile content


@pytest.mark.long
def test_what_others_have_written_is_text_and_nothing_else(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    def body(self: Any, **_: Any) -> None:
        raise PermanentError(HOSTILE, HOSTILE)

    task = make_task(bank, body)
    arguments: dict[str, Any] = {"name": HOSTILE, HOSTILE: 1}
    deliveries.deliver(task, key=HOSTILE, tenant=HOSTILE, **arguments)
    (letter,) = letters(connection)
    page = browser("otto")
    csrf = page.csrf()
    assert page.post(f"/letters/{letter.id}/discard", {"reason": HOSTILE}, csrf=csrf).status_code == 303
    named = {"tenant": HOSTILE, "task": task.name, "key": HOSTILE}
    answers = [
        page.get(path)
        for path in ("/", "/failures", "/letters", f"/letters/{letter.id}", "/approvals", "/operations", "/tenants")
    ]
    answers += [
        page.get("/operation", params=named),
        page.get("/letters", params={"reason": HOSTILE, "within": HOSTILE}),
    ]
    answers += [
        page.get("/operations", params={"key": HOSTILE + "x"}),
        page.get("/operations", params={"stage": HOSTILE}),
    ]
    answers += [
        page.post("/operation/reveal", named | {"reason": "x"}, csrf=csrf),
        page.get("/sagas", params={"type": HOSTILE}),
    ]
    answers += [page.post(f"/letters/{letter.id}/reveal", {"reason": "x"}, csrf=csrf)]
    for answer in answers:
        assert "alert(&" in answer.text or HOSTILE[:20] not in html.unescape(answer.text)
        assert "<script>" not in answer.text
        assert "<img" not in answer.text
    assert sum("alert(" in answer.text for answer in answers) > 8


def test_a_runbook_is_shown_without_html_or_links_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "declined.md").write_text(
        f"# x\n\n{HOSTILE} [a](javascript:alert(1)) [b](declined.md) [c](../../x.md)\n"
    )
    monkeypatch.setattr(runbooks, "_folder", lambda: tmp_path)
    monkeypatch.setattr(runbooks, "names", lambda: ("declined",))
    made = str(runbooks.html.__wrapped__("declined"))
    assert "<script" not in made
    assert "<img" not in made
    assert "/runbooks/declined" in made
    assert not [to for to in re.findall(r'href="([^"]*)"', made) if not to.startswith("/runbooks/")]
    assert runbooks.html("../settings") is None


def test_without_runbooks_the_page_has_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(runbooks, "_folder", lambda: tmp_path / "nothing")
    assert runbooks.names.__wrapped__() == ()
    monkeypatch.setattr(runbooks, "names", lambda: ())
    assert runbooks.html.__wrapped__(runbooks.about("card_declined", ())) is None


def test_every_reason_has_its_runbook_in_the_package() -> None:
    for reason in (*reasons.OF_LETTERS, *reasons.ALARMS, *reasons.ALERTS):
        assert runbooks.html(runbooks.about(reason, ())) is not None, reason


# ---------------------------------------------------------------- payloads


def test_arguments_are_masked_until_a_person_reveals_them_which_is_audited(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    def body(self: Any, name: str, cents: int) -> None:
        raise PermanentError("no", "declined")

    task = make_task(bank, body)
    deliveries.deliver(task, name=SECRET, cents=AMOUNT, key="k")
    (letter,) = letters(connection)
    named = {"tenant": "default", "task": task.name, "key": "k"}
    caplog.clear()
    reader, page = browser("rita"), browser("otto")
    for answer in (page.get("/operation", params=named), page.get(f"/letters/{letter.id}"), page.get("/letters")):
        assert answer.status_code == 200
        assert SECRET not in answer.text
        assert str(AMOUNT) not in answer.text
    assert "••• text" in page.get("/operation", params=named).text
    for path, fields in (("/operation/reveal", named), (f"/letters/{letter.id}/reveal", {})):
        assert reader.post(path, fields | {"reason": "x"}).status_code == 403
        assert page.post(path, fields | {"reason": " "}).status_code == 409, "why is asked for"
    assert audited(connection, "reveal") == []
    for path, fields in (("/operation/reveal", named), (f"/letters/{letter.id}/reveal", {})):
        revealed = page.post(path, fields | {"reason": "ticket 7"})
        assert (revealed.status_code, SECRET in revealed.text) == (200, True)
    rows = audited(connection, "reveal")
    assert [(row.actor, row.key, row.reason) for row in rows] == [("otto", "k", "ticket 7")] * 2
    assert SECRET not in json.dumps([row.details for row in rows])
    assert SECRET not in caplog.text
    assert "otto: reveal" in shown(page.get("/operation", params=named))


# ---------------------------------------------------------------- money in doubt


@pytest.mark.long
def test_money_in_doubt_is_listed_resolved_by_its_type_corrected_and_replayed(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection, record: Record, in_doubt: Any,
    configure: Callable[..., None],
) -> None:  # fmt: skip
    page = browser("otto")
    page.client.app.state.desk.settings = runtime_of(bank).settings.model_copy(
        update={"web_effect_link": "https://provider.example/search?q={key}"}
    )
    (letter,) = letters(connection)
    key = record("k").effects["charge"]["key"]
    listed = page.get("/doubts")
    assert f'href="https://provider.example/search?q={key}"' in listed.text
    assert "1250" in shown(listed)
    named = {"tenant": "default", "task": in_doubt.name, "key": "k", "effect": "charge"}
    form = page.get("/doubts/resolve", params=named)
    assert "cents" in form.text, "the type of the result"
    hidden = dict(re.findall(r'name="(status|fence)" value="([^"]*)"', form.text))
    given = named | hidden | {"outcome": "happened", "reason": "found in their list"}
    assert browser("rita").post("/doubts/resolve", given | {"result": "{}"}).status_code == 403
    for result, why in (
        ('{"charge": 7}', "result of 'charge': "),
        ("{", "must be JSON"),
        ("", "must be JSON"),
        ('{"charge": "ch_9", "cents": "1250"}', "cents: Input should be a valid integer"),
    ):
        refused = page.post("/doubts/resolve", given | {"result": result})
        assert (refused.status_code, why in shown(refused)) == (422, True)
        assert 'value="found in their list"' in refused.text, "nothing has to be typed again"
    assert page.post("/doubts/resolve", named | hidden | {"reason": "x"}).status_code == 422
    assert audited(connection, "resolve") == []
    done = page.post("/doubts/resolve", given | {"result": '{"charge": "ch_9", "cents": 1250}'})
    assert done.status_code == 303
    again = page.post("/doubts/resolve", given | {"result": '{"charge": "ch_8", "cents": 1250}'})
    assert (again.status_code, "look again" in shown(again)) == (409, True), "the fence has moved"
    form = page.get("/doubts/resolve", params=named)
    hidden = dict(re.findall(r'name="(status|fence)" value="([^"]*)"', form.text))
    corrected = page.post(
        "/doubts/resolve", given | hidden | {"result": '{"charge": "ch_10", "cents": 1250}', "reason": "it was another"}
    )
    assert corrected.status_code == 303
    assert [(row.actor, row.reason) for row in audited(connection, "resolve")] == [
        ("otto", "found in their list"),
        ("otto", "it was another"),
    ]
    assert "has happened: its result is used, nothing is called" in shown(page.get(f"/letters/{letter.id}"))
    assert page.post("/doubts/ask", {"letter": letter.id, "reason": "go on"}).status_code == 303
    assert deliver_all(bank, deliveries, connection) == 1
    assert json.loads(record("k").result) == {"charge": "ch_10", "cents": 1250}
    assert "no call is in doubt" in shown(page.get("/doubts"))


@pytest.mark.long
def test_the_provider_is_asked_now(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection, engine: Engine, record: Record
) -> None:
    answers: list[Any] = [StillUnknown()]
    provider = Provider(lost(), lost(), lost())
    task = make_task(
        bank, lambda self: self.effect("call", provider, reconcile=lambda doubt: answers[-1]), max_attempts=1
    )
    deliveries.deliver(task, key="k")
    make_due(engine, "k")
    deliveries.deliver(task, key="k")
    (letter,) = letters(connection)
    page = browser("otto")
    preview = shown(page.get(f"/letters/{letter.id}"))
    assert "in doubt: the provider is asked if the call has `reconcile`" in preview
    assert record("k").effects["call"]["key"] in preview
    answers.append(Happened({"charge": "found"}))
    calls = len(provider.keys)
    assert page.post("/doubts/ask", {"letter": letter.id, "reason": "ask"}).status_code == 303
    deliver_all(bank, deliveries, connection)
    assert (record("k").status, len(provider.keys)) == ("completed", calls)


# ---------------------------------------------------------------- replays


@pytest.mark.long
def test_a_replay_of_what_was_declined_needs_to_be_read_and_is_made_once(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    deliveries.deliver(b.failing, "a1", "permanent")
    (letter,) = letters(connection)
    page = browser("otto")
    said = shown(page.get(f"/letters/{letter.id}"))
    assert "Its body runs again, as generation 2" in said
    assert "was refused for good as no_account" in said
    asked = {"reason": "ticket 1", "request_id": "once"}
    refused = page.post(f"/letters/{letter.id}/replay", asked)
    assert (refused.status_code, "say that you have read this" in shown(refused)) == (409, True)
    unread = page.post(f"/letters/{letter.id}/replay", asked | {"confirmed": "1"})
    assert unread.status_code == 409, "a tick says which warnings were read"
    confirmed = {"confirmed": tick(refused)}
    for _ in range(2):
        assert page.post(f"/letters/{letter.id}/replay", asked | confirmed).status_code == 303
    (row,) = audited(connection, "replay")
    assert (row.actor, row.reason) == ("otto", "ticket 1")


def confirm(page: Browser, answer: Any) -> Any:
    """Send the form in which a person has read the warnings of a bulk."""
    form = re.findall(r'name="([^"]+)" value="([^"]*)"', answer.text.split('action="/bulk/begin"')[1])
    return page.post(
        "/bulk/begin", {html.unescape(name): html.unescape(value) for name, value in form if name != "csrf"}
    )


def flaky(bank: Celery, fails: set[str]) -> Any:
    """A task that fails for those keys."""

    def body(self: Any, name: str) -> str:
        if name in fails:
            raise ValueError("not yet")
        return name

    return make_task(bank, body, max_attempts=1)


def begin(page: Browser, task: Any, **fields: str) -> Any:
    return page.post("/bulk/begin", {"only_task": task.name, "reason": "after the repair", **fields})


def test_a_bulk_replay_goes_in_stages_and_is_followed_to_its_end(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    fails = {f"k{n}" for n in range(14)}
    task = flaky(bank, fails)
    for name in sorted(fails):
        deliveries.deliver(task, name=name, key=name)
    fails.clear()
    page = browser("otto")
    begun = begin(page, task)
    assert begun.status_code == 303
    address = begun.headers["location"]
    of = dict(re.findall(r'name="(of)" value="([^"]*)"', page.get(address).text))
    for size, completed in ((1, 1), (10, 11), (3, 14)):
        assert f"Replay the next {size}" in page.get(address).text
        assert page.post("/bulk/next", of).status_code == 303
        early = page.post("/bulk/next", of)
        assert (early.status_code, "not ended yet" in shown(early)) == (409, True)
        assert deliver_all(bank, deliveries, connection) == size
        assert f"{completed} of 14 completed" in shown(page.get(address))
    assert "It is over" in shown(page.get(address))
    assert page.post("/bulk/next", of).status_code == 409
    assert {row.actor for row in audited(connection, "replay")} == {"otto"}
    assert len(audited(connection, "replay")) == 14
    assert page.get(address + "x").status_code == 409, "a list that this page has not signed"


@pytest.mark.long
def test_a_bulk_replay_stops_when_one_fails_again(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    fails = {f"k{n}" for n in range(13)}
    task = flaky(bank, fails)
    for name in sorted(fails):
        deliveries.deliver(task, name=name, key=name)
    fails.intersection_update({"k5"})
    page = browser("otto")
    address = begin(page, task).headers["location"]
    of = dict(re.findall(r'name="(of)" value="([^"]*)"', page.get(address).text))
    other = browser("olga").post("/bulk/next", of)
    assert (other.status_code, "'otto' has begun this" in shown(other)) == (409, True)
    for _ in range(2):
        assert page.post("/bulk/next", of).status_code == 303
        deliver_all(bank, deliveries, connection)
    said = shown(page.get(address))
    assert "10 of 13 completed" in said
    assert "1 failed" in said
    assert "Stopped: 1 failed again" in said
    refused = page.post("/bulk/next", of)
    assert (refused.status_code, "goes no further" in shown(refused)) == (409, True)
    assert sum(letter.status == "open" for letter in letters(connection)) == 3


def test_a_bulk_replay_of_what_was_declined_is_read_first(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    for name in ("a1", "a2"):
        deliveries.deliver(b.failing, name, "permanent")
    page = browser("otto")
    asked = begin(page, b.failing)
    assert (asked.status_code, "2 were declined or cancelled" in shown(asked)) == (200, True)
    assert begin(page, b.failing, confirmed="1").status_code == 200, "nobody has read them"
    begun = confirm(page, asked)
    of = dict(re.findall(r'name="(of)" value="([^"]*)"', page.get(begun.headers["location"]).text))
    assert page.post("/bulk/next", of).status_code == 303
    assert len(audited(connection, "replay")) == 1
    unread = page.post("/bulk/begin", {"reason": "x"})
    assert (unread.status_code, "not all open letters at once" in shown(unread)) == (409, True)


# ---------------------------------------------------------------- two people


@pytest.mark.long
def test_a_discard_takes_two_people_by_the_company(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    deliveries.deliver(b.failing, "a1", "permanent")
    (letter,) = letters(connection)
    asks = {"reason": "a test order"}
    approver = browser("anna", by_company=True)
    assert approver.post(f"/letters/{letter.id}/discard", asks).status_code == 303
    assert "asked by you" in approver.get("/approvals").text
    own = approver.post("/approvals/approve", {"letter": letter.id})
    assert (own.status_code, "has to approve" in shown(own)) == (409, True)
    assert browser("otto", by_company=True).post("/approvals/approve", {"letter": letter.id}).status_code == 403
    assert browser("tom", by_company=True).post("/approvals/approve", {"letter": letter.id}).status_code == 404, (
        "another tenant's"
    )
    assert [each.status for each in letters(connection)] == ["open"]
    assert browser("adam", by_company=True).post("/approvals/approve", {"letter": letter.id}).status_code == 303
    assert [each.status for each in letters(connection)] == ["discarded"]
    assert [(row.actor, row.action) for row in audited(connection, "discard_approved")] == [
        ("adam", "discard_approved")
    ]


# ---------------------------------------------------------------- operations and sagas


@pytest.mark.long
def test_an_operation_is_found_by_its_key_released_and_cancelled(
    browser: Open, bank: Celery, connection: Connection, record: Record
) -> None:
    held = op.started(connection, op.new_id(task=b.deposit.name))
    page = browser("otto")
    found = page.get("/operations", params={"key": held.id.key})
    assert found.status_code == 303
    shows = page.get(found.headers["location"])
    named = {"tenant": "default", "task": held.id.task, "key": held.id.key, "reason": "hangs"}
    assert "attempt 1 holds it" in shown(shows)
    assert page.post("/operation/release", named | {"status": "started", "fence": held.fence + 1}).status_code == 409
    assert page.post("/operation/release", named | {"status": "started", "fence": held.fence}).status_code == 303
    assert record(held.id.key).status == "released"
    row = record(held.id.key)
    assert page.post("/operation/cancel", named | {"status": "released", "fence": row.fence}).status_code == 303
    assert record(held.id.key).status == "failed"
    assert {row.action for row in connection.execute(text("SELECT action FROM idempotency.audit"))} == {
        "release",
        "cancel",
    }


@pytest.mark.long
def test_lists_go_on_where_the_page_before_has_ended(browser: Open, connection: Connection) -> None:
    """Also of times that are equal."""
    for number in range(120):
        op.completed(connection, op.new_id(task=f"t{number % 3}"))
    connection.execute(text("UPDATE idempotency.records SET completed_at = date_trunc('minute', now())"))
    page, path, keys = browser("rita"), "/operations?stage=ended", []
    for _ in range(4):
        text_of = page.get(path).text
        keys += re.findall(r'title="([0-9a-f]{32})"', text_of)
        more = re.search(r'rel="next" href="([^"]+)"', text_of)
        if more is None:
            break
        path = html.unescape(more[1])
    assert len(keys) == len(set(keys)) == 120


@pytest.mark.long
def test_a_saga_is_shown_step_by_step_and_cancelled(
    browser: Open, bank: Celery, deliveries: Deliveries, connection: Connection
) -> None:
    @saga("web.trip", key="{name}", entity="name", events={"picked": "{name}"}, app=bank)
    def trip(saga: Any, name: str) -> None:
        saga.step("book", lambda session: "seat 4")
        saga.wait_for("picked", match=name, timeout=3600.0)

    deliveries.deliver(trip, "k1")
    page = browser("otto")
    assert "web.trip" in shown(page.get("/sagas"))
    named = {"tenant": "default", "task": "web.trip", "key": "k1"}
    said = re.sub(r"\s+", " ", shown(page.get("/saga", params=named)))
    assert "step book done" in said
    assert "wait picked waiting" in said
    assert "seat 4" not in said
    assert page.post("/saga/cancel", named | {"reason": "the customer has called"}).status_code == 303
    assert "COMPENSATING" in shown(page.get("/saga", params=named))
    assert [row.actor for row in audited(connection, "saga_cancel")] == ["otto"]


def test_the_page_only_reads_but_for_what_people_change(browser: Open, bank: Celery, connection: Connection) -> None:
    desk = browser("otto").client.app.state.desk
    with desk.reading() as own, pytest.raises(DBAPIError, match="read-only"):
        own.execute(text("DELETE FROM idempotency.processes"))


def test_an_age_is_short_and_an_amount_is_whole() -> None:
    assert [age(each) for each in (None, 0, 59, 240, 3600, 7500, 90_000, -5)] == [
        "–", "0 s", "59 s", "4 min", "1 h", "2 h 5 min", "1 d 1 h", "0 s",
    ]  # fmt: skip
    assert count(1234567) == "1\u202f234\u202f567"
    assert len(short("x" * 100)) < 30
    assert all(str(value) not in masked(value) for value in ("abc", 4711, True, Decimal("1.5")))
