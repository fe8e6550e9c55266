"""The ledgers of one test, read together: what the records say, what the tables show, what the provider did.

Checked of every key: at most one committed effect (invariant I1), rows exactly when the record is completed (I3), and
that nothing has disappeared: accepted = completed + failed + dead letters + still queued (I15).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import text
from sqlalchemy.engine import Engine

from idempotency.attempt import effects
from idempotency.wire.keys import OperationId


@dataclass(frozen=True)
class Account:
    """One key and where it is to be found."""

    key: str
    # the record, or None when the key was never claimed
    record: Mapping[str, Any] | None
    rows: int
    step_rows: int
    failure_rows: int
    letters: int
    in_outbox: int
    in_queues: int
    # per effect: how often the provider acted, over all keys the effect has had
    acts: Mapping[str, int]

    def violations(self) -> list[str]:
        status = None if self.record is None else self.record["status"]
        steps = 0 if self.record is None else _steps(self.record)
        found = []
        if self.rows > 1 or self.step_rows > 1 or self.failure_rows > 1:
            found.append(f"I1: {self.rows} rows, {self.step_rows} of its step, {self.failure_rows} of its failure")
        if self.rows != (status == "completed"):
            found.append(f"I3: {self.rows} rows, and the record is {status}")
        if self.step_rows != steps:
            found.append(f"I3: {self.step_rows} rows of the step, and {steps} recorded")
        if self.failure_rows and not self.letters:
            found.append(f"I3: a row of on_failed without a dead letter, and the record is {status}")
        if any(count > 1 for count in self.acts.values()):
            found.append(f"I12: the provider acted more than once: {dict(self.acts)}")
        if status not in ("completed", "failed") and not (self.letters or self.in_outbox or self.in_queues):
            found.append(f"I15: accepted, and neither ended (record: {status}) nor a dead letter nor queued")
        if status == "failed" and not self.letters:
            found.append("I13: failed without a dead letter")
        return [f"{self.key}: {each}" for each in found]


@dataclass(frozen=True)
class Books:
    """All keys of a test."""

    keys: Mapping[str, Account]
    # keys under which the provider has acted and that no record holds
    stray_acts: Collection[str] = ()

    def violations(self) -> list[str]:
        """What the invariants do not allow; empty when all is well."""
        found = [each for account in self.keys.values() for each in account.violations()]
        return found + [f"I12: the provider acted under {key}, a key of no operation" for key in self.stray_acts]


def _steps(record: Mapping[str, Any]) -> int:
    """How many steps are recorded: a step has no key of a provider."""
    return sum(1 for effect in record["effects"].values() if effect["state"] == "done" and effect["kind"] == "step")


def _provider_keys(record: Mapping[str, Any]) -> dict[str, set[str]]:
    """Per effect: the keys it has been called under, as they are recorded and as they are derived."""
    id = OperationId(record["tenant"], record["task"], record["key"])
    return {
        name: {effect["key"], *(effects.provider_key(id, name, number) for number in range(1, effect["number"] + 1))}
        for name, effect in record["effects"].items()
        if effect["kind"] == "effect"
    }


def read(engine: Engine, accepted: Collection[str], queued: Sequence[str], acts: Mapping[str, int]) -> Books:
    """Read every ledger once.

    `accepted` are keys sent past the outbox, `queued` those of the messages in the broker; `acts` counts what the
    provider did, by its idempotency key.
    """
    with engine.connect() as connection:

        def counted(query: str) -> Counter[str]:
            return Counter(str(key) for (key,) in connection.execute(text(query)))

        records = {
            str(row["key"]): dict(row)
            for row in connection.execute(text("SELECT * FROM idempotency.records")).mappings()
        }
        rows = counted("SELECT account FROM entries")
        failures = counted("SELECT account FROM failures")
        letters = counted("SELECT key FROM idempotency.dead_letters WHERE key IS NOT NULL")
        enqueued = counted("SELECT key FROM idempotency.outbox")
        outbox = counted("SELECT key FROM idempotency.outbox WHERE settled_at IS NULL AND status <> 'failed'")
    messages = Counter(queued)
    called = {key: _provider_keys(record) for key, record in records.items()}
    known = {each for by_effect in called.values() for keys in by_effect.values() for each in keys}
    named = {*records, *letters, *messages, *failures, *(key.removesuffix("/step") for key in rows)}
    return Books(
        {
            key: Account(
                key,
                records.get(key),
                rows[key],
                rows[f"{key}/step"],
                failures[key],
                letters[key],
                outbox[key],
                messages[key],
                {name: sum(acts.get(each, 0) for each in keys) for name, keys in called.get(key, {}).items()},
            )
            for key in sorted({*named, *enqueued, *accepted})
        },
        [each for each in acts if each not in known],
    )
