"""Attacks: what an attacker who may publish, but knows no secret, can send. They are faults of the plan like the others.

Whatever is made up bears a mark, in a key, a tenant, an account or an amount, by which the checker knows it everywhere.
The rest is overheard: for a second, a queue is bound beside that of the workers.
"""

from __future__ import annotations

import contextlib
import json
import random
import secrets
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import stripe
from amqp.exceptions import AMQPError
from kombu import Connection, Exchange, Producer, Queue
from kombu.exceptions import OperationalError

from idempotency.wire.headers import (
    FINGERPRINT_HEADER,
    GENERATION_HEADER,
    KEY_HEADER,
    MARKER_HEADER,
    ORIGIN_HEADER,
    OUTBOX_HEADER,
    REVOKED_HEADER,
    SIGNATURE_HEADER,
    TENANT_HEADER,
)
from tests.chaos.evidence import AMOUNT, MARK
from tests.chaos.scene import Missed, Scene

# Messages of one attack.
EACH = 4
# Seconds for which it listens, and for which it tries to reach a server that is down.
LISTEN, PATIENCE = 5.0, 10.0
# Keys that the traffic has not come to yet.
AHEAD = 200


@dataclass(frozen=True, slots=True)
class Sent:
    """A message as it is in the broker."""

    headers: Mapping[str, Any]
    body: bytes
    properties: Mapping[str, Any] = field(default_factory=dict)


def forge_message(scene: Scene, target: int) -> str:
    """Unsigned calls of tasks that write and pay."""
    return _publish(scene, [_made_up(scene, f"{MARK}-{secrets.token_hex(6)}", number) for number in range(EACH)])


def squat_keys(scene: Scene, target: int) -> str:
    """Unsigned calls under the keys that the application is about to use."""
    last = max(int(each.headers[KEY_HEADER]) for each in _overheard(scene, _has_number))
    keys = random.Random(target).sample(range(last + 1, last + AHEAD), EACH)
    return _publish(scene, [_made_up(scene, str(key), number) for number, key in enumerate(keys)])


def alter_message(scene: Scene, target: int) -> str:
    """A signed message, for another account and amount."""

    def altered(sent: Sent) -> Sent:
        args, arguments, rest = json.loads(sent.body)
        body = json.dumps([args, arguments | {"account": f"{MARK}-altered", "amount": AMOUNT}, rest])
        return replace(sent, body=body.encode())

    return _publish(scene, [altered(each) for each in _overheard(scene)])


def rekey_message(scene: Scene, target: int) -> str:
    """A signed message, under another key."""
    return _publish(scene, [_with(each, {KEY_HEADER: f"{MARK}-{secrets.token_hex(6)}"}) for each in _overheard(scene)])


def retenant_message(scene: Scene, target: int) -> str:
    """A signed message, for another tenant."""
    return _publish(scene, [_with(each, {TENANT_HEADER: f"{MARK}-tenant"}) for each in _overheard(scene)])


def copy_message(scene: Scene, target: int) -> str:
    """Old messages, byte for byte."""
    _overheard(scene)
    return _publish(scene, scene.overheard[:EACH])


def forge_revoke(scene: Scene, target: int) -> str:
    """A signed message with the mark of one that was revoked, and the same without its signature."""
    revoked = [_with(each, {REVOKED_HEADER: True}) for each in _overheard(scene)]
    return _publish(scene, revoked + [_with(each, {SIGNATURE_HEADER: None}) for each in revoked])


def forge_headers(scene: Scene, target: int) -> str:
    """A message with headers that say that the relay has sent it: a replay, a later generation, another outbox row."""
    claims = {
        ORIGIN_HEADER: "replay",
        GENERATION_HEADER: 2,
        OUTBOX_HEADER: str(uuid.uuid4()),
        FINGERPRINT_HEADER: "v1:0",
    }
    forged = [_with(each, claims) for each in _overheard(scene)]
    unsigned = [_with(each, {SIGNATURE_HEADER: "v1 0 0"}) for each in forged]
    return _publish(scene, [*forged, *unsigned, Sent({MARKER_HEADER: f"{MARK}-marker"}, b"[[], {}, {}]")])


def forge_letter(scene: Scene, target: int) -> str:
    """Messages of real operations in the dead-letter queue, as if the broker had given them up."""
    death = {"queue": scene.queue, "reason": "delivery_limit", "count": 1, "exchange": scene.queue}
    dead = {"x-death": [death | {"routing-keys": [scene.queue]}], "x-first-death-reason": "delivery_limit"}
    heard = _overheard(scene)
    forged = [_with(each, dead | {SIGNATURE_HEADER: None}) for each in heard]
    forged += [_with(each, dead | {GENERATION_HEADER: 7}) for each in heard]
    return _publish(scene, forged, f"{scene.queue}-dead")


def forge_charge(scene: Scene, target: int) -> str:
    """Unsigned calls of the shop's tasks, for its real payments: charges, refunds and deliveries of webhooks."""
    found = [row[0] for row in scene.ask("SELECT id FROM payments ORDER BY random() LIMIT 2", engine=scene.shop_engine)]
    paid = [*found, f"{MARK}-payment"]
    calls = [("payments.capture_payment", "payments", {"payment_id": id, "owner": "default"}) for id in paid]
    calls += [("refunds.refund_payment", "refunds", {"refund_id": f"{MARK}-{id}"}) for id in paid]
    calls += [("webhooks.deliver", "webhooks", {"delivery_id": f"{MARK}-delivery", "redelivery": 0})]
    for task, queue, arguments in calls:
        _publish(scene, [_message(task, arguments)], queue)
    return f"{len(calls)} messages to the shop"


def forge_webhook(scene: Scene, target: int) -> str:
    """Reports that the provider has not signed, of charges that the shop is waiting for. Each has to be refused."""
    id, amount, currency = next(
        iter(
            scene.ask("SELECT id, amount, currency FROM payments ORDER BY random() LIMIT 1", engine=scene.shop_engine)
        ),
        (f"{MARK}-payment", 1, "EUR"),
    )
    charge: dict[str, Any] = {
        "id": f"pi_{MARK}_{secrets.token_hex(6)}",
        "object": "payment_intent",
        "status": "succeeded",
    }
    charge |= {"amount": amount, "currency": currency.lower(), "metadata": {"purchase_id": id}}
    event = {"id": f"evt_{MARK}_{secrets.token_hex(6)}", "object": "event", "type": "payment_intent.succeeded"}
    body = json.dumps(event | {"created": int(time.time()), "data": {"object": charge}})
    generate = stripe.WebhookSignature.generate_signature_header
    late = generate(body, MARK, timestamp=int(time.time()) - 3600)
    signatures = ["", "t=1,v1=", generate(body, MARK), generate(body, ""), late]
    for number, signature in enumerate(signatures):
        answer = _post(scene.webhooks_url, body, signature)
        if answer.status_code != httpx.codes.UNAUTHORIZED:
            scene.believed.append(f"a forged webhook ({number}) was answered with {answer.status_code}")
    return f"{len(signatures)} webhooks"


ATTACKS: dict[str, Callable[[Scene, int], str]] = {
    each.__name__: each
    for each in (
        forge_message,
        squat_keys,
        alter_message,
        rekey_message,
        retenant_message,
        copy_message,
        forge_revoke,
        forge_headers,
        forge_letter,
        forge_charge,
        forge_webhook,
    )
}


# ---------------------------------------------------------------- how


def _made_up(scene: Scene, key: str, number: int) -> Sent:
    arguments: dict[str, Any] = {"number": key, "account": f"{MARK}-{key}", "amount": AMOUNT + number}
    if number % 2:
        return _message("chaos.charge", arguments | {"url": scene.provider_url, "asks": False})
    return _message("chaos.deposit", arguments)


def _message(task: str, arguments: Mapping[str, Any]) -> Sent:
    """As Celery sends it."""
    id = str(uuid.uuid4())
    headers = {"lang": "py", "task": task, "id": id, "root_id": id, "parent_id": None, "group": None, "retries": 0}
    return Sent(headers, json.dumps([[], arguments, {}]).encode(), {"correlation_id": id})


def _with(sent: Sent, headers: Mapping[str, Any]) -> Sent:
    """With these headers in place of its own; None: without."""
    changed = {**sent.headers, **headers}
    return replace(sent, headers={name: value for name, value in changed.items() if value is not None})


def _has_number(sent: Sent) -> bool:
    return str(sent.headers.get(KEY_HEADER)).isdecimal()


def _overheard(scene: Scene, fits: Callable[[Sent], bool] = lambda _: True) -> list[Sent]:
    """Some signed messages that are published now; Missed if there are none."""
    heard: list[Sent] = []
    tap = Queue(f"tap-{secrets.token_hex(4)}", Exchange(scene.queue, "topic", passive=True), "#", auto_delete=True)
    with _connected(scene) as connection, connection.channel() as channel:
        queue = tap(channel)
        queue.declare()
        try:
            deadline = time.monotonic() + LISTEN
            while len(heard) < EACH and time.monotonic() < deadline:
                if (message := queue.get(no_ack=True)) is None:
                    time.sleep(0.05)
                    continue
                own = {name: message.properties[name] for name in ("correlation_id",) if name in message.properties}
                sent = Sent(message.headers, message.body, own)
                # what beat sends is no work; and what is not signed here is another attack
                if (
                    str(message.headers.get("task")).startswith("chaos.")
                    and SIGNATURE_HEADER in message.headers
                    and fits(sent)
                ):
                    heard.append(sent)
        finally:
            queue.delete()
    scene.overheard += heard
    # while nothing is published, what it has heard before
    if found := heard or [each for each in scene.overheard if fits(each)][-EACH:]:
        return found
    raise Missed("nothing has been published yet")


def _publish(scene: Scene, messages: list[Sent], queue: str | None = None) -> str:
    with _connected(scene) as connection, connection.channel() as channel:
        producer = Producer(channel)
        for sent in messages:
            producer.publish(
                sent.body,
                exchange="",
                routing_key=queue or scene.queue,
                headers=dict(sent.headers),
                content_type="application/json",
                content_encoding="utf-8",
                delivery_mode=2,
                **sent.properties,
            )
    return f"{len(messages)} messages"


@contextlib.contextmanager
def _connected(scene: Scene) -> Iterator[Connection]:
    try:
        with Connection(scene.broker_url, connect_timeout=5) as connection:
            yield connection
    except (AMQPError, OperationalError, OSError) as error:
        raise Missed(f"the broker was away: {type(error).__name__}") from error


def _post(url: str, body: str, signature: str) -> httpx.Response:
    """Its server may be starting again."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return httpx.post(url, content=body, headers={"Stripe-Signature": signature}, timeout=10)
        except httpx.HTTPError:
            if time.monotonic() > deadline:
                raise Missed("the web server was away") from None
            time.sleep(0.2)
