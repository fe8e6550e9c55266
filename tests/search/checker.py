"""The books, recomputed once everything is at rest: the provider's ledger, ours, and the business rows must agree."""

from __future__ import annotations

import json
from typing import Any

from tests.search import application
from tests.search.application import OPEN_CODES
from tests.search.world import CAPTURED, PAYMENT, REFUND, Violation, World

# Causes for which no body need have run: an attempt that was not to run it, a person, the dead-letter queue.
WITHOUT_BODY = ("attempts_exhausted", "revoked", "cancelled", "rejected", "delivery_limit")

_LETTERS = "SELECT status, reason, generation, source FROM idempotency.dead_letters ORDER BY id"
# After a person's word on an effect the end may be another one.
_WORDS = "SELECT count(*) FROM idempotency.audit WHERE action = 'resolve'"
_REPLAYS = "SELECT count(*) FROM idempotency.audit WHERE action = 'replay'"
_FAILURES = "SELECT code, generation FROM failures WHERE refund_id = %s ORDER BY id"


def check(world: World) -> list[Violation]:
    """Everything that is wrong, with the invariant it breaks."""
    found: list[Violation] = []

    def wrong(rule: str, what: str) -> None:
        found.append(Violation(rule, what))

    record = world.record()
    charges = application.provider.charges
    payment = world.admin.execute("SELECT * FROM payments WHERE id = %s", [PAYMENT]).fetchone()
    refund = world.admin.execute("SELECT * FROM refunds WHERE id = %s", [REFUND]).fetchone()
    letters = world.admin.execute(_LETTERS).fetchall()
    failures = [(row.code, row.generation) for row in world.admin.execute(_FAILURES, [REFUND])]
    assert payment is not None
    assert refund is not None

    if len(charges) > 1:
        wrong("I12", f"paid {len(charges)} times: {', '.join(charge.id for charge in charges)}")
    if record is None:
        if world.is_accepted and not any(letter.status == "discarded" for letter in letters):
            wrong("I2", "an accepted operation has no record, and nothing will deliver it")
        return found
    (replays,) = world.admin.execute(_REPLAYS).fetchone() or (0,)
    if record.generation > 1 + replays:
        wrong("I14", f"generation {record.generation} after {replays} replays")
    if record.status not in ("completed", "failed"):
        delivered_by = _who_delivers(world)
        if world.is_accepted or delivered_by:
            wrong("I2", f"never ends: {record.status}, {delivered_by or 'and nothing will deliver it'}")
        return found

    code: str | None = record.error_code
    error = {} if code is None else json.loads(record.error)
    cause: str | None = error.get("cause", error).get("code")
    effect: dict[str, Any] = record.effects.get("refund", {"state": "none"})
    state, open_code = effect["state"], code in OPEN_CODES

    # our ledger and the provider's, line by line
    known = application.provider.find(effect["key"]) if "key" in effect else None
    if state == "done" and known is None:
        wrong("I27", "our ledger says that it happened, and the provider knows nothing of it")
    if state == "not_happened" and known is not None:
        wrong("I27", f"our ledger says that it did not happen, and the provider has {known.id}")
    if state == "none" and charges:
        wrong("I27", f"our ledger knows of no call, and the provider has {charges[0].id}")
    # ends
    if code is not None and error["code"] != code:
        wrong("I3", f"failed as {code}, and the error that is shown is {error['code']}")
    if record.status == "completed" and (state != "done" or json.loads(record.result)["charge"] != charges[-1].id):
        wrong("I3", f"completed, and the effect is {state}")
    if code is not None and not open_code and state == "begun":
        wrong("I27", f"failed as {code} over an effect that is begun and open{_and_the_provider(charges)}")
    if code is not None and not open_code and (state == "done" or (charges and state != "begun")):
        wrong("I27", f"failed as {code}, and the effect happened: {[charge.id for charge in charges]}")
    if open_code and state not in ("begun", "done", "not_happened") and "undo" not in application.broken:
        wrong("I27", f"failed as {code} without any effect")
    # business rows
    expected = {"completed": "refunded"}.get(record.status, "unknown" if open_code else "refused")
    told = "on_failed" not in application.broken  # it is mended before a person replays
    if told and (refund.status != expected or (code is not None and refund.failure != code)):
        wrong("I3", f"the record is {record.status} ({code}), the business row {refund.status} ({refund.failure})")
    reserved = CAPTURED if open_code else 0
    refunded = CAPTURED if record.status == "completed" else 0
    if payment.reserved != reserved:
        wrong("I31", f"reserved are {payment.reserved}, and should be {reserved}")
    if payment.refunded != refunded:
        wrong("I3", f"refunded are {payment.refunded}, and should be {refunded}")
    # who was told
    if code is not None and told and failures[-1:] != [(code, record.generation)]:
        heard = ", ".join(f"{each} of generation {of}" for each, of in failures)
        wrong("I3", f"failed as {code} in generation {record.generation}, and on_failed was told {heard or 'nothing'}")
    ends = record.generation + (world.admin.execute(_WORDS).fetchone() or (0,))[0]
    if len(failures) > ends:
        wrong("I28", f"on_failed was told {len(failures)} times of {ends} ends")
    if code is not None and not any(letter.generation == record.generation for letter in letters):
        wrong("I13", f"failed as {code} without a dead letter of its generation")
    ran = (REFUND, record.generation, record.attempts) in application.bodies
    if code is not None and not ran and cause not in WITHOUT_BODY:
        wrong("I28", f"ended as {cause} by attempt {record.attempts}, which never ran its body")
    return found


def _and_the_provider(charges: list[Any]) -> str:
    return f"; the provider has {charges[0].id}" if charges else ""


def _who_delivers(world: World) -> str:
    rows = world.admin.execute("SELECT origin, last_error FROM idempotency.outbox WHERE status = 'pending'").fetchall()
    if not rows:
        return ""
    return f"delivered by an outbox row ({rows[0].origin}) that is {rows[0].last_error or 'not published'}"
