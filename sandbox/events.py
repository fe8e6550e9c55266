"""Webhooks like Stripe's: signed, late, more than once and in any order, until they are answered with 2xx."""

import asyncio
import json
import random
import secrets
import sqlite3
import time
from dataclasses import dataclass
from typing import Any

import httpx
import stripe

# Seconds between two looks at what is due.
PAUSE = 0.05
# Seconds until an event is sent again that was not answered with 2xx; twice as long each time.
RETRY_FIRST, RETRY_LONGEST = 0.5, 10.0
ATTEMPTS = 30
AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Webhooks:
    """Where events are sent, and how badly. `delay_ms`: at most, drawn for each; `twice`, `late`: the share that is.

    Late is ten times `delay_ms`. What is sent twice has the same id, every other time; else it is another event about the same.
    """

    url: str
    secret: str
    seed: int = 0
    delay_ms: float = 300.0
    twice: float = 0.3
    late: float = 0.1


class Outgoing:
    """The events of the sandbox, kept in its ledger until they are answered."""

    def __init__(self, db: sqlite3.Connection, webhooks: Webhooks) -> None:
        self._db = db
        self._to = webhooks
        self._chance = random.Random(webhooks.seed)

    def add(self, event_type: str, thing: dict[str, Any], now: float) -> None:
        """Add an event in the caller's transaction."""
        self._insert(event_type, thing, now)
        if self._chance.random() < self._to.twice:
            self._insert(event_type, thing, now)

    def _insert(self, event_type: str, thing: dict[str, Any], now: float) -> None:
        id = f"evt_{secrets.token_hex(12)}"
        event = {"id": id, "object": "event", "type": event_type, "created": int(now), "data": {"object": thing}}
        longest = self._to.delay_ms / 1000 * (10 if self._chance.random() < self._to.late else 1)
        self._db.execute(
            "INSERT INTO events (id, body, due, attempts) VALUES (?, ?, ?, 0)",
            (id, json.dumps(event, indent=2), now + self._chance.uniform(0, longest)),
        )

    async def send(self) -> None:
        """Send what is due, until cancelled."""
        async with httpx.AsyncClient(timeout=10) as client:
            while True:
                due = self._db.execute(
                    "SELECT seq, body, attempts FROM events WHERE due <= ? ORDER BY due LIMIT ?", (time.time(), AT_ONCE)
                ).fetchall()
                await asyncio.gather(*(self._deliver(client, *event) for event in due))
                await asyncio.sleep(0 if due else PAUSE)

    async def _deliver(self, client: httpx.AsyncClient, seq: int, body: str, attempts: int) -> None:
        header = stripe.WebhookSignature.generate_signature_header(body, self._to.secret)
        headers = {"Stripe-Signature": header, "Content-Type": "application/json"}
        is_again = attempts == 0 and self._chance.random() < self._to.twice / 2
        try:
            answer = await client.post(self._to.url, content=body, headers=headers)
            is_done = answer.is_success
        except httpx.HTTPError:
            is_done = False
        if (is_done and not is_again) or attempts >= ATTEMPTS:
            self._db.execute("DELETE FROM events WHERE seq = ?", (seq,))
            return
        pause = min(RETRY_FIRST * 2**attempts, RETRY_LONGEST)
        self._db.execute("UPDATE events SET attempts = attempts + 1, due = ? WHERE seq = ?", (time.time() + pause, seq))
