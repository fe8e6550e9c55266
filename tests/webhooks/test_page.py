"""The examples of the page, run as they are printed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from celery import Celery

from idempotency import events
from idempotency.application import runtime_of
from idempotency.operate import webhooks as operate
from idempotency.operate.change import Change
from idempotency.testing import Outbox
from idempotency.webhooks.signing import Scheme
from tests.support.documents import python_blocks
from tests.support.receiver import Answer, Receiver, Request, accept


def test_the_examples_of_the_page_run_as_they_are(
    shop: Celery, receiver: Receiver, outbox: Outbox, happen: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    send, register, receive, check = python_blocks("docs/webhooks.md")
    module: Any = ModuleType("shop")
    module.app = shop
    monkeypatch.setitem(sys.modules, "shop", module)
    events._subscriptions.pop(shop)  # the page's own call makes the tasks
    for name in ("webhooks.fan_out", "webhooks.deliver"):
        shop.tasks.pop(name)
    exec(send, {})
    names: dict[str, Any] = {}
    exec(register, names)
    exec(receive, names)
    exec(check, names)
    _, secret = names["register"]("acme", receiver.url, "ann")
    names["SECRET"] = secret
    seen: list[Answer] = []

    def by_the_page(request: Request) -> Answer:
        status, content = names["receive"](request.headers, request.body.encode())
        seen.append((status, {}, content.encode()))
        return seen[-1]

    receiver.answer = by_the_page
    happen("order.paid", order_id="o1")
    outbox.run()
    assert seen == [(204, {}, b"")]
    (request,) = receiver.webhooks
    assert names["handled"] == {request.id}
    assert names["receive"](request.headers, request.body.encode() + b" ")[0] == 401
    receiver.answer = accept
    runtime, change = runtime_of(shop), Change("ann", "test")
    made = operate.add_endpoint(runtime, change, "b", url=receiver.url, events=["*"], scheme=Scheme.ED25519)
    operate.enable_endpoint(runtime, change, made.id)
    happen(tenant="b")
    outbox.run()
    request = receiver.webhooks[-1]
    names["check"](made.verifier, request.headers, request.body.encode())
