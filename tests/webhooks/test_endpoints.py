"""Endpoints: registered, challenged, rotated and disabled by people, each change with its audit row."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, text
from standardwebhooks import Webhook

from idempotency.attempt.runtime import Runtime
from idempotency.errors import AddressRefused, ChangeRefused, OperationNotFound
from idempotency.operate import webhooks as operate
from idempotency.operate.change import Change
from idempotency.testing import Outbox
from tests.support.commands import Run
from tests.support.receiver import Answer, Receiver, Request, accept, answering

ANN = Change("ann", "test")
Rows = Callable[[str], Any]


def echo(request: Request) -> Answer:
    return 200, {}, request.document["data"]["challenge"].encode() + b"\n"


def late(request: Request) -> Answer:
    time.sleep(0.5)
    return accept(request)


def quoted(request: Request) -> Answer:
    return 200, {}, json.dumps(request.document["data"]["challenge"]).encode()


def repeated(request: Request) -> Answer:
    """All that came, as a server that reflects everything would."""
    return 200, {}, request.body.encode()


@pytest.mark.parametrize("answer", [accept, echo, quoted])
def test_an_endpoint_that_answers_its_challenge_is_enabled(
    runtime: Runtime, receiver: Receiver, rows: Rows, answer: Any
) -> None:
    receiver.answer = answer
    made = operate.add_endpoint(runtime, ANN, "acme", url=f"{receiver.url}/h", events=["*"])
    assert (rows("endpoints")[0].status, receiver.requests) == ("unverified", [])
    operate.enable_endpoint(runtime, ANN, made.id)
    assert rows("endpoints")[0].status == "enabled"
    (request,) = receiver.requests
    Webhook(made.verifier).verify(request.body, request.headers)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda request: (403, {}, request.document["data"]["challenge"].encode()), "status 403"),
        (lambda request: (302, {"Location": "/"}, b""), "status 302"),
        (lambda request: (200, {}, b""), "something else"),
        (lambda request: (200, {}, b'{"challenge": "guessed"}'), "something else"),
        (lambda request: (200, {}, b'{"challenge": null}'), "something else"),
        (lambda request: (200, {}, b"\xff\xfe"), "something else"),
        (lambda request: None, r"no answer \(connection_failed\)"),
        (repeated, "something else"),
        (late, r"no answer \(timeout\)"),
    ],
    ids=["refused", "redirected", "empty", "wrong", "null", "no text", "closed", "reflected", "late"],
)  # fmt: skip
def test_without_the_right_answer_in_time_it_gets_nothing(
    runtime: Runtime, receiver: Receiver, rows: Rows, outbox: Outbox, happen: Callable[..., str], answer: Any, said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    receiver.answer = answer
    made = operate.add_endpoint(runtime, ANN, "acme", url=receiver.url, events=["*"])
    if answer is late:
        monkeypatch.setattr(runtime, "settings", runtime.settings.model_copy(update={"webhook_timeout": 0.2}))
    with pytest.raises(ChangeRefused, match=said):
        operate.enable_endpoint(runtime, ANN, made.id)
    assert rows("endpoints")[0].status == "unverified"
    happen()
    outbox.run()
    assert (len(receiver.webhooks), rows("deliveries")) == (0, [])


@pytest.mark.parametrize("was", ["enabled", "disabled"])
def test_an_endpoint_that_is_disabled_during_its_challenge_stays_disabled(
    runtime: Runtime, receiver: Receiver, register: Callable[..., Any], rows: Rows, was: str
) -> None:
    """By a person, who does not know that another one enables it."""
    endpoint = register()
    if was == "disabled":
        operate.disable_endpoint(runtime, ANN, endpoint.id)

    def disabling(request: Request) -> Answer:
        operate.disable_endpoint(runtime, ANN, endpoint.id)
        return accept(request)

    receiver.answer = disabling
    with pytest.raises(ChangeRefused, match="was disabled while it was challenged; look again"):
        operate.enable_endpoint(runtime, ANN, endpoint.id)
    assert (rows("endpoints")[0].status, rows("endpoints")[0].disabled_because) == ("disabled", "person")


def test_an_address_that_is_not_public_is_refused_before_anything_is_stored(runtime: Runtime, rows: Rows) -> None:
    for url in ("http://example.com/", "https://10.0.0.1/", "https://localhost/", "https://user@example.com/"):
        with pytest.raises(AddressRefused):
            operate.add_endpoint(runtime, ANN, "acme", url=url, events=["*"])
    for events in ([], [""], ["a b"], ["x"] * 101 + [str(number) for number in range(101)]):
        with pytest.raises(ChangeRefused, match="--event"):
            operate.add_endpoint(runtime, ANN, "acme", url="https://example.com/", events=events)
    assert rows("endpoints") == []


def test_what_there_is_not_is_said(runtime: Runtime) -> None:
    for change in (operate.enable_endpoint, operate.disable_endpoint, operate.rotate_secret):
        with pytest.raises(OperationNotFound, match="none with this id"):
            change(runtime, ANN, "ep_unknown")


@pytest.mark.long
def test_the_commands_add_list_show_rotate_disable_and_enable(
    run: Run, receiver: Receiver, happen: Callable[..., str], outbox: Outbox, engine: Engine
) -> None:
    added = run("webhooks", "add", "acme", f"{receiver.url}/h", "--event", "order.*", "--as", "ann", "--json")
    assert added.status == 0, added.error
    made = added.document
    assert (made["enabled"], made["secret"][:6]) == (True, "whsec_")
    happen()
    outbox.run()
    (listed,) = run("webhooks", "list", "--json").document
    assert (listed["id"], listed["events"], listed["status"]) == (made["id"], ["order.*"], "enabled")
    assert run("webhooks", "list", "--tenant", "other", "--json").document == []
    shown = run("webhooks", "show", made["id"], "--json").document
    (delivery,), (attempt,) = shown["deliveries"], shown["attempts"]
    assert (delivery["status"], attempt["status"], attempt["delivery_id"]) == ("delivered", 204, delivery["id"])
    assert delivery["id"] in run("webhooks", "show", made["id"]).out
    assert run("webhooks", "redeliver", delivery["id"], "--reason", "lost", "--json").document == {
        "redelivered": delivery["id"]
    }
    outbox.run()
    again = run("webhooks", "show", delivery["id"], "--json").document
    assert [each["redelivery"] for each in again["attempts"]] == [1, 0]
    rotated = run("webhooks", "rotate", made["id"], "--reason", "leaked", "--keep", "0", "--ed25519")
    assert rotated.out.startswith("whpk_")
    assert run("webhooks", "disable", made["id"], "--reason", "asked").out == f"{made['id']} disabled\n"
    receiver.answer = answering(500)
    assert run("webhooks", "enable", made["id"], "--reason", "asked").status == 0
    receiver.answer = lambda request: (404, {}, b"")
    refused = run("webhooks", "enable", made["id"], "--reason", "asked")
    assert (refused.status, "challenge: status 404" in refused.error) == (1, True)
    assert run("webhooks", "show", "msg_unknown").status == 1
    with engine.connect() as connection:
        actions = connection.execute(text("SELECT action FROM idempotency.audit ORDER BY id")).scalars().all()
        kept = connection.execute(text("SELECT string_agg(a::text, ' ') FROM idempotency.audit a")).scalar_one()
    names = ["added", "enabled", "redelivered", "rotated", "disabled", "enabled"]
    assert actions == [f"webhook_{name}" for name in names]
    everything = kept + run("webhooks", "list").out + run("webhooks", "show", made["id"]).out
    assert made["secret"][6:] not in everything
    assert "/h" not in kept


@pytest.mark.long
def test_an_endpoint_that_is_not_there_yet_is_added_and_enabled_later(run: Run, receiver: Receiver) -> None:
    receiver.answer = lambda request: (503, {}, b"")
    added = run("webhooks", "add", "acme", receiver.url, "--event", "*")
    assert (added.status, added.out.startswith("whsec_"), "status 503" in added.error) == (1, True, True)
    receiver.answer = accept
    (listed,) = run("webhooks", "list", "--json").document
    assert listed["status"] == "unverified"
    assert f"idempotency webhooks enable {listed['id']} --reason WHY\n" in added.error  # as one types it
    again = run("webhooks", "add", "acme", receiver.url, "--event", "*")
    assert (again.status, f"acme has {listed['id']} with this URL, which is unverified" in again.error) == (1, True)
    assert len(run("webhooks", "list", "--json").document) == 1
    assert run("webhooks", "enable", listed["id"], "--reason", "is there now").status == 0
    assert run("webhooks", "disable", listed["id"], "--reason", "moves").status == 0
    assert run("webhooks", "add", "acme", receiver.url, "--event", "*").status == 0
