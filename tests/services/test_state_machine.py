"""Random programs of record, outbox and dead letters against real Postgres, beside a model that is a few dictionaries.

Each rule is a transition as the pipeline makes it; the model says what must come of it, before the database is asked.
Holders, batches of a relay and what a person was shown are kept after their time, so that stale ones act too. Time
passes by ageing rows. After each step everything stored is compared with the model.

`STATE_MACHINE_EXAMPLES=10000 make test ARGS='-k state_machine'` runs more programs than the 500 of a usual run. What
fails is printed as a program and kept in `tests/seeds`, where the next run finds it: commit it until it is fixed.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import hypothesis.strategies as st
import pytest
from celery import Celery
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from kombu import Message as BrokerMessage
from kombu.serialization import prepare_accept_content
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DataError

from idempotency import dead_letter_queue, dead_letters, discards, keys, maintenance, operators, outbox, records
from idempotency import relay as relaying
from idempotency.dead_letters import ReplayRefused
from idempotency.delivery import Delivery
from idempotency.discards import DiscardRefused, Person
from idempotency.effects import Happened
from idempotency.errors import OperationNotFound
from idempotency.keys import OperationId
from idempotency.message import KEY_HEADER, TENANT_HEADER, Message
from idempotency.operators import Change, ChangeRefused, Shown
from idempotency.publisher import Published, Refusal
from idempotency.reconcile import reconcile
from idempotency.records import Busy, Claimed, Completed, Failed, Mismatch, Renewal
from idempotency.relay import Relay
from idempotency.runtime import Runtime, process_identity
from idempotency.sweeps import BATCH
from tests.bank import INSERT
from tests.operations import age, claim

EXAMPLES = int(os.environ.get("STATE_MACHINE_EXAMPLES", "500"))
SEEDS = Path(__file__).parents[1] / "seeds"
# Long enough that nothing happens by itself while a program runs: time passes when a rule says so.
LEASE = 600.0
LATER = 600.0
RETENTION = 1e6
ELSEWHERE = "another-host|boot|namespace|1|1"

# Two tenants share a key, and one of them has another one. The first is met more often: depth needs repetition.
TASK = "tests.bank.deposit"
ACME, OTHER_TENANT, OTHER_KEY = (
    OperationId("acme", TASK, "k1"),
    OperationId("umbrella", TASK, "k1"),
    OperationId("acme", TASK, "k2"),
)
IDS = (ACME, OTHER_TENANT, OTHER_KEY)
some_id = st.sampled_from([ACME, ACME, ACME, OTHER_TENANT, OTHER_KEY])
# What is asked for: the fingerprint of each amount is another one.
some_amount = st.sampled_from([1, 1, 1, 2])
# What the broker says to a batch, over and over.
some_answers = st.lists(
    st.sampled_from(["confirmed", "confirmed", "confirmed", "unroutable", "own fault", "none"]), min_size=1, max_size=3
)
some_statement = st.sampled_from(["complete", "fail", "release", "begin", "happened", "step"])
some_name = st.sampled_from(["charge", "reserve"])
# Which of those there are, the newest first.
which = st.sampled_from([0, 0, 0, 1, 1, 2, 3])

T = TypeVar("T")


# ---------------------------------------------------------------- the model


@dataclass
class Record:
    status: str
    fingerprint: str
    fence: int | None = None  # None: moved, and we were not told where to
    token: str | None = None
    generation: int = 1
    attempts: int = 1
    duplicates: int = 0
    effects: dict[str, str] = field(default_factory=dict)
    steps: set[str] = field(default_factory=set)  # those of them that are no effects
    resolved: set[str] = field(default_factory=set)
    revoked: int | None = None
    result: str | None = None
    code: str | None = None
    lease_over: bool = False
    holder_dead: bool = False
    due: bool = False
    expired: bool = False

    def end(self, status: str, *, result: str | None = None, code: str | None = None) -> None:
        self.status, self.result, self.code = status, result, code or self.code
        self.lease_over = self.holder_dead = self.due = self.expired = False

    def release(self, *, due: bool, code: str | None = None) -> None:
        self.status, self.token, self.due, self.code = "released", None, due, code or self.code
        self.lease_over = self.holder_dead = False

    def outside(self, state: str) -> bool:
        """Whether an effect is in this state."""
        return any(found == state for name, found in self.effects.items() if name not in self.steps)

    def concluded(self, code: str) -> str:
        """The code that an end has, as `conclusions` says and the table demands."""
        if self.outside("begun"):
            return "effect_unknown"
        return "unfinished" if self.outside("done") and code != "effect_unknown" else code

    @property
    def is_busy(self) -> bool:
        return (self.status == "started" and not self.lease_over) or (self.status == "released" and not self.due)

    @property
    def has_ended(self) -> bool:
        return self.status in ("completed", "failed")

    def shown(self) -> tuple[Any, ...]:
        return (
            self.status,
            self.fingerprint,
            self.token,
            self.generation,
            self.attempts,
            self.duplicates,
            self.effects,
            self.revoked,
            self.result,
            self.code,
            self.lease_over,
            self.due,
            self.expired,
        )


@dataclass
class Row:
    """An outbox row."""

    id: OperationId
    fingerprint: str
    origin: str
    status: str = "pending"
    available: bool = True
    leased: bool = False
    overdue: bool = False
    recent: bool = False  # published within the redelivery horizon
    settled: bool = False
    attempts: int = 0
    resends: int = 0
    old: bool = False  # settled long ago
    generation: int = 1

    def shown(self) -> tuple[Any, ...]:
        pending = self.status == "pending"
        return (
            self.id,
            self.fingerprint,
            self.origin,
            self.status,
            pending and self.available,
            pending and self.leased,
            self.status == "published" and self.overdue,
            self.settled,
            self.attempts,
            self.resends,
            self.generation,
        )


@dataclass
class Letter:
    id: OperationId | None
    fingerprint: str | None
    reason: str
    source: str
    generation: int | None
    row: int | None = None  # the outbox row it names
    digest: tuple[Any, ...] | None = None
    status: str = "open"
    old: bool = False
    asked_by: str | None = None

    def shown(self) -> tuple[Any, ...]:
        return (self.id, self.fingerprint, self.reason, self.source, self.generation, self.status, self.old)

    def is_same_as(self, other: Letter) -> bool:
        """Whether one open letter stands for both."""
        kind = (self.id, self.generation, self.reason, self.fingerprint)
        return (
            (None not in kind and kind == (other.id, other.generation, other.reason, other.fingerprint))
            or (self.row is not None and self.row == other.row)
            or (self.digest is not None and self.digest == other.digest)
        )


@dataclass(frozen=True)
class Holder:
    """Who was told that the operation is theirs; perhaps long ago."""

    claim: Claimed
    amount: int


STORED = text("""
SELECT (SELECT coalesce(json_agg(json_build_array(
            tenant, operation, key, status, fingerprint, token, generation, attempts, duplicates, effects,
            revoked_generation, result, error::jsonb ->> 'code', coalesce(locked_until < clock_timestamp(), false),
            coalesce(available_at <= clock_timestamp(), false), coalesce(expires_at < clock_timestamp(), false),
            fence)), '[]') FROM idempotency.records),
       (SELECT coalesce(json_agg(json_build_array(
            id, tenant, operation, key, fingerprint, origin, status,
            status = 'pending' AND available_at <= clock_timestamp(),
            status = 'pending' AND coalesce(relayed_until > clock_timestamp(), false),
            status = 'published' AND published_at < clock_timestamp() - interval '1 hour',
            settled_at IS NOT NULL, attempts, resends, generation, event_id) ORDER BY id), '[]') FROM idempotency.outbox),
       (SELECT coalesce(json_agg(json_build_array(
            id, tenant, operation, key, fingerprint, reason, source, generation, status,
            coalesce(settled_at < clock_timestamp() - interval '90 days', false), outbox_id)
            ORDER BY id), '[]') FROM idempotency.dead_letters),
       (SELECT coalesce(json_agg(account), '[]') FROM entries),
       (SELECT coalesce(json_agg(account), '[]') FROM failures)
""")

CLEAN = """
WITH a AS (DELETE FROM idempotency.records), b AS (DELETE FROM idempotency.outbox),
     c AS (DELETE FROM idempotency.discards), d AS (DELETE FROM entries), e AS (DELETE FROM failures)
DELETE FROM idempotency.dead_letters
"""


class Machine(RuleBasedStateMachine):
    """The library and the model, side by side."""

    def __init__(self, app: Celery, connection: Connection) -> None:
        super().__init__()
        self.app, self.connection, self.runtime = app, connection, Runtime.of(app)
        connection.exec_driver_sql(CLEAN)
        self.relay = Relay(app)
        self.tokens = 0
        self.records: dict[OperationId, Record] = {}
        self.rows: dict[int, Row] = {}  # by outbox id
        self.letters: dict[int, Letter] = {}
        self.new_rows: list[Row] = []  # the database has not told us their ids yet
        self.new_letters: list[Letter] = []
        self.entries: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.highest: dict[OperationId, int] = {}  # fence, also of records that were purged
        self.events: dict[int, str] = {}
        self.accepted: set[tuple[OperationId, str]] = set()
        self.discarded: set[tuple[Any, ...]] = set()  # what people gave up, also where the letter was purged
        # who may act, and may have been overtaken
        self.holders: list[Holder] = []
        self.batches: list[Sequence[Any]] = []
        self.seen: list[Shown] = []

    # ------------------------------------------------------------ acceptance and claims

    @rule(id=some_id, amount=some_amount, later=st.sampled_from([False, False, True]), sent=st.booleans())
    def enqueue(self, id: OperationId, amount: int, later: bool, sent: bool) -> None:
        with self.transaction() as connection:
            outbox.insert(
                connection,
                id,
                fingerprint(id, amount),
                self.message(id, amount),
                queue=self.queue,
                countdown=LATER if later else 0.0,
            )
        self.new_rows.append(Row(id, fingerprint(id, amount), "enqueue", available=not later))
        self.accepted.add((id, fingerprint(id, amount)))
        if sent:
            self.check()
            self.relay_leases(["confirmed"])

    @rule(id=some_id, amount=some_amount, dies=st.sampled_from([False, False, False, True]))
    def claim(self, id: OperationId, amount: int, dies: bool) -> None:
        """A delivery."""
        self.tokens += 1
        self._claim(id, amount, f"token-{self.tokens}", dies=dies)

    @precondition(lambda self: self.holders)
    @rule(
        n=which,
        statement=some_statement,
        arrives=st.sampled_from(["before the next claim", "after it", "never"]),
    )
    def lose_the_answer(self, n: int, statement: str, arrives: str) -> None:
        """The holder cannot tell whether its last statement has been carried out, and claims with the same token."""
        holder = nth(self.holders, n)
        if statement == "happened":
            self._begin_effect(holder.claim, "charge")
        if arrives == "before the next claim":
            self._send(holder, statement)
        self._claim(holder.claim.id, holder.amount, holder.claim.token)
        if arrives == "after it":
            self._send(holder, statement)

    @precondition(lambda self: self.holders)
    @rule(n=which, statement=some_statement)
    def be_overtaken(self, n: int, statement: str) -> None:
        """The lease ends in the middle of an attempt, another one takes over, and the first one goes on."""
        holder = nth(self.holders, n)
        if statement == "happened":
            self._begin_effect(holder.claim, "charge")
        self._age(holder.claim.id)
        self.claim(holder.claim.id, holder.amount, dies=False)
        self._send(holder, statement)

    def _send(self, holder: Holder, statement: str) -> None:
        match statement:
            case "complete":
                self._complete(holder, '{"late": true}')
            case "fail":
                self._fail(holder, "no_account")
            case "release":
                self._release(holder, due=True, give_back=False)
            case "step":
                self._step(holder.claim, "reserve")
            case "begin":
                self._begin_effect(holder.claim, "charge")
            case "happened":
                self._change_effect(holder.claim, "charge", {"state": "done", "result": "1"})

    @rule(id=some_id, amounts=st.lists(some_amount, min_size=1, max_size=2), sent=st.booleans(), purged=st.booleans())
    def live(self, id: OperationId, amounts: list[int], sent: bool, purged: bool) -> None:
        """The usual life, as far as it gets: accepted, published, claimed, completed, and perhaps forgotten."""
        for amount in amounts:
            self.enqueue(id, amount, later=False, sent=sent)
        self.claim(id, amounts[0], dies=False)
        if self.holders:
            self._complete(self.holders[-1], "1")
        if purged:
            self.check()
            self.purge(late=True)

    def _claim(self, id: OperationId, amount: int, token: str, *, dies: bool = False) -> None:
        record, mine = self.records.get(id), fingerprint(id, amount)
        self.accepted.add((id, mine))
        answer = claim(
            self.connection,
            id,
            token=token,
            fingerprint=mine,
            message=self.message(id, amount).to_text(),
            holder=provably_dead() if dies else ELSEWHERE,
            lease=LEASE,
        )
        if record is not None and record.fingerprint != mine:
            assert answer == Mismatch(record.generation)
            self._refuse(id, amount, record.generation)
            return
        match record:
            case Record(status="completed"):
                assert answer == Completed(record.result)
                return
            case Record(status="failed"):
                assert isinstance(answer, Failed)
                assert answer.code == record.code
                return
            case Record() if record.is_busy and record.token != token:
                assert answer == Busy()
                return
            case None:
                record = self.records[id] = Record("started", mine, token=token)
            case Record():
                record.attempts += record.token != token
        record.status, record.token, record.due = "started", token, False
        record.lease_over, record.holder_dead = False, dies
        assert isinstance(answer, Claimed)
        assert answer.fence > self.highest.get(id, 0)
        self.highest[id] = record.fence = answer.fence
        assert (answer.attempts, answer.generation) == (record.attempts, record.generation)
        assert {name: effect["state"] for name, effect in answer.effects.items()} == record.effects
        assert answer.revoked == (record.revoked == record.generation)
        self.holders.append(Holder(answer, amount))

    def _refuse(self, id: OperationId, amount: int, generation: int) -> None:
        dead_letters.store_refusal(
            self.connection,
            id,
            self.delivery(id, amount),
            generation=generation,
            reason="fingerprint_mismatch",
            error=records.error_text("fingerprint_mismatch", "other arguments"),
        )
        self._store(Letter(id, fingerprint(id, amount), "fingerprint_mismatch", "operation", generation))

    @rule(id=some_id, amount=some_amount)
    def count_duplicate(self, id: OperationId, amount: int) -> None:
        record = self.records.get(id)
        counts = record is not None and record.fingerprint == fingerprint(id, amount) and record.is_busy
        counted, token = records.count_duplicate(self.connection, id, fingerprint(id, amount))
        assert counted == counts
        if record is not None and counts:
            record.duplicates += 1
            assert token == record.token

    # ------------------------------------------------------------ holders, also former ones

    @precondition(lambda self: self.holders)
    @rule(chosen=st.lists(which, min_size=1, max_size=3))
    def renew(self, chosen: list[int]) -> None:
        claims = {holder.claim.token: holder.claim for holder in (nth(self.holders, n) for n in chosen)}
        verdicts = records.renew(self.connection, list(claims.values()), LEASE)
        for token, held in claims.items():
            record = self._held(held)
            assert verdicts[token] == (Renewal.LOST if record is None else Renewal.HELD)
            if record is not None:
                record.lease_over = False

    @precondition(lambda self: self.holders)
    @rule(n=which, what=st.sampled_from(["begin", "happened", "did not happen", "step"]), name=some_name)
    def work(self, n: int, what: str, name: str) -> None:
        held = nth(self.holders, n).claim
        match what:
            case "begin":
                self._begin_effect(held, name)
            case "happened":
                self._change_effect(held, name, {"state": "done", "result": "1"})
            case "did not happen":
                self._change_effect(held, name, {"state": "not_happened"})
            case "step":
                self._step(held, name)

    def _begin_effect(self, held: Claimed, name: str) -> None:
        record = self._held(held)
        entry = {
            "kind": "effect",
            "state": "begun",
            "key": "k",
            "number": 1,
            "args": "v1:a",
            "position": 1,
            "ended_at": None,
        }
        begun_at = records.begin_effect(self.connection, held, name, entry)
        if record is not None and record.effects.get(name) in (None, "not_happened"):
            assert begun_at is not None
            record.effects[name] = "begun"
        else:
            assert begun_at is None

    def _change_effect(self, held: Claimed, name: str, change: dict[str, str]) -> None:
        record = self._held(held)
        open_ = record is not None and record.effects.get(name) == "begun"
        assert records.change_effect(self.connection, held, name, change) == open_
        if record is not None and open_:
            record.effects[name] = change["state"]
            # what is recorded stays
            assert not records.change_effect(self.connection, held, name, {"state": "done", "result": "2"})

    def _step(self, held: Claimed, name: str) -> None:
        record = self._held(held)
        entry = {"kind": "step", "state": "done", "args": "v1:a", "position": 1, "undo": None, "result": "1"}
        matches = record is not None and name not in record.effects
        with self.finishing(matches) as connection:
            connection.execute(INSERT, {"account": account(held.id), "amount": 1})
            records.record_step(connection, held, name, entry, lease=LEASE)
        if record is not None and matches:
            record.effects[name] = "done"
            record.steps.add(name)
            self.entries[account(held.id)] += 1

    @precondition(lambda self: self.holders)
    @rule(n=which, result=st.sampled_from(["null", "0", '""', "[]", '{"b": 1, "a": 1e16}']))
    def complete(self, n: int, result: str) -> None:
        self._complete(nth(self.holders, n), result)

    def _complete(self, holder: Holder, result: str) -> None:
        held, record = holder.claim, self._held(holder.claim)
        with self.finishing(record is not None) as connection:
            connection.execute(INSERT, {"account": account(held.id), "amount": 1})
            records.complete(connection, held, result, retention=RETENTION, lease=LEASE)
        if record is not None:
            record.end("completed", result=result)
            self.entries[account(held.id)] += 1

    @precondition(lambda self: self.holders)
    @rule(n=which, code=st.sampled_from(["no_account", "effect_unknown"]))
    def fail(self, n: int, code: str) -> None:
        self._fail(nth(self.holders, n), code)

    def _fail(self, holder: Holder, code: str) -> None:
        held, record = holder.claim, self._held(holder.claim)
        code = code if record is None else record.concluded(code)
        error = records.error_text(code, "no")
        with self.finishing(record is not None) as connection:
            connection.execute(FAILURE, {"account": held.id.key, "code": code})
            delivery = self.delivery(held.id, holder.amount)
            dead_letters.store_failure(connection, held.id, delivery, held, reason=code, last_error=error)
            records.fail(connection, held, records.FailedEnd(code, error), retention=RETENTION, lease=LEASE)
        if record is not None:
            record.end("failed", code=code)
            self.failures[held.id.key] += 1
            self._store(Letter(held.id, record.fingerprint, code, "operation", record.generation), ends=True)

    @precondition(lambda self: self.holders)
    @rule(n=which, due=st.booleans(), give_back=st.booleans())
    def release(self, n: int, due: bool, give_back: bool) -> None:
        self._release(nth(self.holders, n), due=due, give_back=give_back)

    def _release(self, holder: Holder, *, due: bool, give_back: bool) -> None:
        held, record = holder.claim, self._held(holder.claim)
        error = None if give_back else records.error_text("flaky", "no")
        delay = 0.0 if due else LATER
        released = records.release(self.connection, held, delay=delay, error=error, give_back=give_back)
        assert released == (record is not None)
        if record is not None:
            record.release(due=due, code=None if give_back else "flaky")
            record.attempts -= give_back
            self._supersede(held.id, record.fingerprint)
            self.new_rows.append(Row(held.id, record.fingerprint, "retry", available=due, generation=record.generation))

    def _supersede(self, id: OperationId, fingerprint: str) -> None:
        """A release takes the place of the deliveries that earlier releases have sent."""
        for number, row in list(self.rows.items()):
            if (row.id, row.fingerprint, row.status) == (id, fingerprint, "published") and row.origin in (
                "retry",
                "recover",
            ):
                del self.rows[number]

    # ------------------------------------------------------------ what nobody holds

    @rule()
    def recover(self) -> None:
        orphans = {
            id: record
            for id, record in self.records.items()
            if record.status == "started" and (record.lease_over or record.holder_dead)
        }
        assert maintenance.recover(self.app) == len(orphans)
        for id, record in orphans.items():
            record.release(due=True)
            self.new_rows.append(Row(id, record.fingerprint, "recover", generation=record.generation))

    @rule(id=some_id, amount=some_amount, n=st.none() | which, unknown=st.sampled_from([False, False, True]))
    def give_up(self, id: OperationId, amount: int, n: int | None, unknown: bool) -> None:
        """A message from the dead-letter queue: of an outbox row, or published without one."""
        rows = [number for number, row in self.rows.items() if row.id == id]
        number = None if n is None or not rows else nth(rows, n)
        origin = "enqueue"
        if number is not None:
            amount = 1 if self.rows[number].fingerprint == fingerprint(id, 1) else 2
            origin = self.rows[number].origin
        message, generation = self.message(id, amount), None
        if number is not None:
            generation = self.rows[number].generation
            message = message.marked(origin=origin, outbox_id=self.events[number], generation=generation)
        headers = message.headers | ({"task": "tests.bank.gone"} if unknown else {})
        if number is not None or not unknown:
            self.accepted.add((id, fingerprint(id, amount)))
        stored = dead_letter_queue.store(self.app, self.from_broker(message, headers))
        letter = Letter(
            id,
            fingerprint(id, amount),
            "unknown_task" if unknown else "rejected",
            "broker",
            None,
            row=number,
            digest=(id, amount, number, origin, unknown),
        )
        record = self.records.get(id)
        if unknown:
            if number is None:
                letter = replace(letter, id=None, fingerprint=None)
            assert self._store(letter) == (stored is not None)
            return
        if record is not None and record.fingerprint != letter.fingerprint:
            letter = replace(letter, reason="fingerprint_mismatch", generation=record.generation)
            assert self._store(letter) == (stored is not None)
            return
        if record is not None and record.has_ended:
            assert stored is None
            return
        goes_on = record is not None and (
            record.status == "started" or (generation is not None and generation != record.generation)
        )
        if goes_on or self._is_delivered_by_another(id, letter.fingerprint, number):
            assert stored is None
            if record is not None:
                record.duplicates += 1
            self._settle_what_hides_a_later_generation(number)
            return
        if record is None:
            record = self.records[id] = Record("started", fingerprint(id, amount), attempts=0)
        record.end("failed", code=record.concluded("rejected"))
        record.token = record.fence = None
        self.failures[id.key] += 1
        letter = replace(letter, generation=record.generation, reason=record.code or "")
        assert stored is not None
        # one that was stored before the task was known
        unnamed = [
            each
            for each, other in self.letters.items()
            if other.status == "open"
            and other.generation is None
            and (other.digest == letter.digest or (number is not None and other.row == number))
        ]
        if not unnamed:
            self._store(letter, ends=True)
            return
        assert stored == min(unnamed)
        self.letters[stored] = replace(
            self.letters[stored],
            id=id,
            fingerprint=letter.fingerprint,
            reason=letter.reason,
            generation=letter.generation,
        )

    def _deliveries(self, id: OperationId, fingerprint: str | None) -> dict[int, Row]:
        """The rows that may still be sent: of the latest generation last, and the newest last."""
        rows = {
            number: row
            for number, row in self.rows.items()
            if (row.id, row.fingerprint) == (id, fingerprint) and not row.settled and row.status != "failed"
        }
        return dict(sorted(rows.items(), key=lambda each: (each[1].generation, each[0])))

    def _is_delivered_by_another(self, id: OperationId, fingerprint: str | None, number: int | None) -> bool:
        rows = self._deliveries(id, fingerprint)
        if not rows:
            return False
        last, row = list(rows.items())[-1]
        is_pending = any(other.status == "pending" for each, other in rows.items() if each != number)
        return last != number or is_pending or (row.status == "pending" and not row.leased)

    def _settle_what_hides_a_later_generation(self, number: int | None) -> None:
        if number is None or (row := self.rows[number]).status != "published":
            return
        others = self._deliveries(row.id, row.fingerprint).values()
        row.settled = row.settled or any(other.generation > row.generation for other in others)

    @rule(late=st.booleans())
    def purge(self, late: bool) -> None:
        """Whatever has ended by now; or long after."""
        if late:
            self._retention_passes()
        # what an earlier purge has found a reason to keep is looked at again
        self.connection.exec_driver_sql("UPDATE idempotency.records SET kept_until = NULL")
        self.connection.exec_driver_sql("UPDATE idempotency.outbox SET kept_at = NULL")
        for number in [number for number, letter in self.letters.items() if letter.status != "open" and letter.old]:
            del self.letters[number]
        gone = [id for id, record in self.records.items() if self._may_be_purged(id, record)]
        alone = [number for number, row in self.rows.items() if row.id not in gone and self._is_left_over(number, row)]
        purged = maintenance.purge_once(self.app, limit=BATCH)
        assert (purged.operations, purged.rows) == (len(gone), len(alone))
        for number in alone:
            del self.rows[number]
        for id in gone:
            del self.records[id]
            self.rows = {number: row for number, row in self.rows.items() if row.id != id}
            self.accepted = {each for each in self.accepted if each[0] != id}
            self.discarded = {each for each in self.discarded if each[0] != id}

    def _is_left_over(self, number: int, row: Row) -> bool:
        """Settled long ago, of what has ended or has no record, and without a dead letter that is open."""
        record = self.records.get(row.id)
        return (
            row.old
            and (record is None or (record.has_ended and not row.recent))
            and not any(
                letter.status == "open" and (letter.id == row.id or letter.row == number)
                for letter in self.letters.values()
            )
        )

    def _may_be_purged(self, id: OperationId, record: Record) -> bool:
        return (
            record.has_ended
            and record.expired
            and not any(letter.id == id and letter.status == "open" for letter in self.letters.values())
            and not any(
                row.recent or (not row.settled and (row.status != "published" or row.fingerprint != record.fingerprint))
                for row in self.rows.values()
                if row.id == id
            )
        )

    # ------------------------------------------------------------ people

    @rule(id=some_id)
    def look(self, id: OperationId) -> None:
        try:
            shown = operators.read(self.connection, id)
        except OperationNotFound:
            assert id not in self.records
            assert not any(row.id == id for row in self.rows.values())
        else:
            record = self.records.get(id)
            assert shown.status == ("accepted" if record is None else record.status)
            self.seen.append(shown)

    @precondition(lambda self: self.seen)
    @rule(n=which, what=st.sampled_from(["cancel", "cancel", "release", "resolve"]))
    def change(self, n: int, what: str) -> None:
        """What a person was shown; perhaps it is another thing by now."""
        shown = nth(self.seen, n)
        match what:
            case "cancel":
                self._cancel(shown)
            case "release":
                self._take_from_its_holder(shown)
            case "resolve":
                self._resolve_effect(shown)

    def _cancel(self, shown: Shown) -> None:
        record = self.records.get(shown.id)
        rows = [row for row in self.rows.values() if row.id == shown.id]
        if shown.status == "accepted":
            may = record is None and any(not row.settled and row.status != "failed" for row in rows)
        else:
            may = record is not None and (record.status, record.fence) == (shown.status, shown.fence)
            may = may and shown.status == "released"
            may = may and record is not None and not (record.outside("begun") or record.outside("done"))
        with refused(not may, ChangeRefused):
            operators.cancel(self.app, shown, Change("ana", "no longer wanted"))
        if may:
            if record is None:
                record = self.records[shown.id] = Record("released", rows[0].fingerprint, attempts=0)
            record.end("failed", code="cancelled")
            record.fence = None
            self.failures[shown.id.key] += 1
            self._store(Letter(shown.id, record.fingerprint, "cancelled", "operation", record.generation), ends=True)

    def _take_from_its_holder(self, shown: Shown) -> None:
        record = self.records.get(shown.id)
        may = record is not None and (record.status, record.fence) == (shown.status, shown.fence)
        may = may and shown.status == "started"
        with refused(not may, ChangeRefused):
            operators.release(self.app, shown, Change("ana", "hangs"))
        if record is not None and may:
            record.release(due=True)
            self._supersede(shown.id, record.fingerprint)
            self.new_rows.append(Row(shown.id, record.fingerprint, "retry", generation=record.generation))

    def _resolve_effect(self, shown: Shown) -> None:
        record = self.records.get(shown.id)
        may = (
            record is not None
            and (shown.status, record.status, record.fence) == ("failed", "failed", shown.fence)
            and "charge" not in record.steps
            and (record.effects.get("charge") == "begun" or "charge" in record.resolved)
        )
        with refused(not may, ChangeRefused):
            operators.resolve_effect(self.app, shown, "charge", Happened(1), Change("ana", "looked"))
        if record is not None and may:
            record.effects["charge"] = "done"
            record.resolved.add("charge")
            record.fence = None

    @rule(id=some_id, amount=some_amount, remembered=st.booleans())
    def revoke(self, id: OperationId, amount: int, remembered: bool) -> None:
        record = self.records.get(id)
        may = (
            record is not None
            and record.fingerprint == fingerprint(id, amount)
            and not record.has_ended
            and (record.revoked is None or not remembered)
        )
        assert records.revoke(self.connection, id, fingerprint(id, amount), remembered=remembered) == may
        if record is not None and may:
            record.revoked = record.generation

    @precondition(lambda self: self.letters)
    @rule(n=which, twice=st.booleans())
    def replay(self, n: int, twice: bool) -> None:
        number = nth(list(self.letters), n)
        for _ in range(1 + twice):
            self._replay(number)

    def _replay(self, number: int) -> None:
        letter = self.letters[number]
        record = None if letter.id is None else self.records.get(letter.id)
        reopens = (
            record is not None
            and (record.status, record.generation) == ("failed", letter.generation)
            and record.fingerprint == letter.fingerprint
        )
        may = letter.status == "open" and letter.fingerprint is not None and (reopens or record is None)
        with refused(not may, ReplayRefused), self.transaction() as connection:
            dead_letters.replay(connection, number, app=self.app)
        if not may:
            return
        if record is not None:
            record.release(due=True)
            if record.revoked is None:  # what a worker remembers was revoked before
                record.revoked = record.generation
            record.generation += 1
            record.attempts, record.code = 0, None
            record.expired = False
        letter.status = "replayed"
        assert letter.id is not None
        assert letter.fingerprint is not None
        generation = 1 if record is None else record.generation
        row = None if letter.row is None else self.rows.get(letter.row)
        if row is not None and row.status == "failed":  # goes again itself, in its place
            row.status, row.origin, row.attempts, row.generation = "pending", "replay", 0, generation
            row.available, row.settled, row.leased, row.resends = True, False, False, 0
        else:
            self.new_rows.append(Row(letter.id, letter.fingerprint, "replay", generation=generation))

    @precondition(lambda self: self.letters)
    @rule(n=which, asks=st.booleans(), approves=st.sampled_from(["ana", "bo", "bo", None]))
    def discard(self, n: int, asks: bool, approves: str | None) -> None:
        number = nth(list(self.letters), n)
        if asks:
            self._ask_to_discard(number, "ana")
        if approves is not None:
            self._discard(number, approves)

    def _ask_to_discard(self, number: int, person: str) -> None:
        letter = self.letters[number]
        may = letter.status == "open" and letter.asked_by is None
        with refused(not may, DiscardRefused), self.transaction() as connection:
            discards.request(connection, Person(person, "operator"), number, "not worth it")
        if may:
            letter.asked_by = person

    def _discard(self, number: int, person: str) -> None:
        letter = self.letters[number]
        may = letter.status == "open" and letter.asked_by not in (None, person) and not self._is_the_last_way_on(letter)
        with refused(not may, DiscardRefused), self.transaction() as connection:
            discards.approve(connection, Person(person, "admin"), number)
        if not may:
            return
        letter.status = "discarded"
        self.discarded |= {(letter.id, letter.fingerprint), (letter.id, letter.fingerprint, letter.generation)}
        for row_number, row in self.rows.items():
            record = self.records.get(row.id)
            without_row = letter.row is None and (row.id, row.fingerprint) == (letter.id, letter.fingerprint)
            named = row_number == letter.row or without_row
            if named and row.status == "published" and (record is None or record.fingerprint != row.fingerprint):
                row.settled = True

    def _is_the_last_way_on(self, letter: Letter) -> bool:
        """Whether its request has an effect of unknown outcome, is running, or has no row that will deliver it."""
        record = None if letter.id is None else self.records.get(letter.id)
        if record is None or letter.fingerprint not in (None, record.fingerprint):
            return False
        if record.outside("begun"):
            return True
        if record.has_ended:
            return False
        request = (letter.id, record.fingerprint)
        waiting = [row for row in self.rows.values() if not row.settled and row.status != "failed"]
        return record.status == "started" or request not in [(row.id, row.fingerprint) for row in waiting]

    # ------------------------------------------------------------ the outbox

    @rule(answers=st.none() | some_answers)
    def relay_leases(self, answers: list[str] | None) -> None:
        """A relay takes what is due, and may stop before the broker's answers."""
        due = {
            number for number, row in self.rows.items() if row.status == "pending" and row.available and not row.leased
        }
        options = {"batch": relaying.BATCH, "lease": relaying.RELAY_LEASE}
        leased = self.connection.exec_driver_sql(relaying._LEASE_ROWS, options).all()
        assert {row.id for row in leased} == due
        for number in due:
            self.rows[number].leased = True
        # in an order that is the same in every run of a program
        leased = sorted(leased, key=lambda row: (str(self.rows[row.id].id), row.id))
        if answers is not None:
            self._mark(leased, answers)
        elif leased:
            self.batches.append(leased)

    @precondition(lambda self: self.batches)
    @rule(n=which, answers=some_answers)
    def relay_marks(self, n: int, answers: list[str]) -> None:
        """The answers come late: another relay may have sent the same rows meanwhile."""
        batch = nth(self.batches, n)
        self.batches.remove(batch)
        self._mark(batch, answers)

    @precondition(lambda self: any(row.status == "pending" for row in self.rows.values()))
    @rule(answers=some_answers, failed_before=st.booleans())
    def relay_is_overtaken(self, answers: list[str], failed_before: bool) -> None:
        """A relay stops after it was answered; another one sends its rows, and then the first one goes on."""
        self.the_outbox_ages(failed_before)
        kept = len(self.batches)
        self.relay_leases(None)
        self.the_outbox_ages(failed_before)
        self.relay_leases(["confirmed"])
        for batch in self.batches[kept:]:
            self.batches.remove(batch)
            self._mark(batch, answers)

    def _mark(self, batch: Sequence[Any], answers: list[str]) -> None:
        result = Published()
        for index, leased in enumerate(batch):
            answer = answers[index % len(answers)]
            row = self.rows.get(leased.id)
            own = answer == "own fault"
            if answer == "confirmed":
                result.confirmed.append(leased.event_id)
            elif answer != "none":
                result.refused[leased.event_id] = Refusal(answer, own)
            if row is None or row.status != "pending":
                continue
            if (row.generation, row.resends) != (leased.generation, leased.resends):
                continue  # about an earlier publication
            row.leased = False
            if answer == "confirmed":
                row.status, row.overdue, row.recent = "published", False, True
            elif own and leased.attempts + 1 >= relaying.OWN_ERRORS:
                row.status, row.settled, row.attempts = "failed", True, row.attempts + 1
                self._store(Letter(row.id, row.fingerprint, "unpublishable", "relay", None, row=leased.id))
            elif answer != "none":
                row.attempts, row.available = row.attempts + 1, False
        self.relay._mark(self.runtime, list(batch), result)
        # its back-off is a second, which may or may not have passed by the next step
        self.connection.exec_driver_sql(
            "UPDATE idempotency.outbox SET available_at = clock_timestamp() + interval '10 min' "
            "WHERE status = 'pending' AND event_id = ANY(%(ids)s)",
            {"ids": list(result.refused)},
        )

    @rule(empty=st.sampled_from([True, True, False]), late=st.booleans())
    def reconcile(self, empty: bool, late: bool) -> None:
        """With queues that are empty, or that hold everything; at once, or long after the publish."""
        if late:
            self.the_outbox_ages(failed_before=False)
        settled = [row for row in self.rows.values() if self._is_over(row)]
        for row in settled:
            row.settled = True
        for number, row in self.rows.items():
            record = self.records.get(row.id)
            if record is None or record.fingerprint == row.fingerprint:
                continue
            if row.status == "published" and not row.settled and row.overdue:
                row.settled = True
                reason = "fingerprint_mismatch"
                self._store(Letter(row.id, row.fingerprint, reason, "relay", record.generation, row=number))
        lacking = [row for number, row in self._newest() if self._waits(number, row) and row.overdue] if empty else []
        done = reconcile(self.app, lambda queue: 0 if empty else 1000)
        assert (done.settled, done.resent) == (len(settled), len(lacking))
        for row in lacking:
            row.status, row.origin, row.available, row.leased = "pending", "reconcile", True, False
            row.resends += 1

    def _is_over(self, row: Row) -> bool:
        record = self.records.get(row.id)
        return (
            row.status == "published"
            and not row.settled
            and record is not None
            and record.has_ended
            and record.fingerprint == row.fingerprint
        )

    def _newest(self) -> Iterable[tuple[int, Row]]:
        open_ = [(number, row) for number, row in self.rows.items() if not row.settled and row.status != "failed"]
        open_.sort(key=lambda each: each[1].generation)  # and by number, in which they are
        return {(row.id, row.fingerprint): (number, row) for number, row in open_}.values()

    def _waits(self, number: int, row: Row) -> bool:
        record = self.records.get(row.id)
        return (
            row.status == "published"
            and (record is None or (record.status == "released" and record.due))
            and not any((letter.status, letter.row) == ("open", number) for letter in self.letters.values())
        )

    # ------------------------------------------------------------ time

    @precondition(lambda self: any(record.status in ("started", "released") for record in self.records.values()))
    @rule(id=some_id, amount=some_amount, then=st.sampled_from(["claim", "duplicate", None]))
    def its_time_comes(self, id: OperationId, amount: int, then: str | None) -> None:
        """A lease is over, a delay is over; and perhaps somebody comes."""
        self._age(id)
        if then == "claim":
            self.claim(id, amount, dies=False)
        elif then == "duplicate":
            self.count_duplicate(id, amount)

    def _age(self, id: OperationId) -> None:
        record = self.records.get(id)
        if record is None or record.has_ended:
            return
        if record.status == "started":
            age(self.connection, id, locked_until=-3600)
            record.lease_over = True
        else:
            age(self.connection, id, available_at=-3600)
            record.due = True

    def _retention_passes(self) -> None:
        for id, record in self.records.items():
            if record.has_ended:
                age(self.connection, id, expires_at=-3600)
                record.expired = True
        self.connection.exec_driver_sql(
            "UPDATE idempotency.outbox SET settled_at = settled_at - interval '90 days', "
            "published_at = published_at - interval '2 days'"
        )
        for row in self.rows.values():
            row.old = row.settled and row.status != "pending"
            row.recent, row.overdue = False, row.overdue or row.status == "published"

    @precondition(lambda self: self.rows)
    @rule(failed_before=st.sampled_from([False, False, True]))
    def the_outbox_ages(self, failed_before: bool) -> None:
        """Delays and relays' leases are over, what was published was so long ago; or most tries are used up."""
        self.connection.exec_driver_sql(
            "UPDATE idempotency.outbox SET available_at = clock_timestamp() - interval '2 hours', "
            "relayed_until = NULL, published_at = published_at - interval '2 hours'"
        )
        for row in self.rows.values():
            row.available, row.leased, row.overdue = True, False, True
        if failed_before:
            self.connection.exec_driver_sql("UPDATE idempotency.outbox SET attempts = 4 WHERE status = 'pending'")
            for row in self.rows.values():
                row.attempts = 4 if row.status == "pending" else row.attempts

    @precondition(lambda self: any(letter.status != "open" for letter in self.letters.values()))
    @rule()
    def settled_letters_age(self) -> None:
        self.connection.exec_driver_sql(
            "UPDATE idempotency.dead_letters SET settled_at = settled_at - interval '100 days' WHERE status <> 'open'"
        )
        for letter in self.letters.values():
            letter.old = letter.status != "open"

    # ------------------------------------------------------------ after every step

    @invariant()
    def check(self) -> None:
        self.what_is_stored_is_the_model()
        self.nothing_accepted_is_forgotten()
        self.a_failure_has_its_letter()

    def what_is_stored_is_the_model(self) -> None:
        stored = self.connection.execute(STORED).one()
        seen: dict[OperationId, int] = {}
        for tenant, operation, key, *columns, fence in stored[0]:
            id = OperationId(tenant, operation, key)
            columns[6] = {name: effect["state"] for name, effect in columns[6].items()}
            assert id in self.records, f"unexpected record {id} {columns}"
            assert tuple(columns) == self.records[id].shown(), str(id)
            seen[id] = fence
        assert seen.keys() == self.records.keys()
        for id, fence in seen.items():
            record = self.records[id]
            if record.fence is None:
                assert fence > self.highest.get(id, 0)
                self.highest[id] = record.fence = fence
            assert fence == record.fence

        rows = {number: (id_of(*id), *columns) for number, *id, columns in split(stored[1], 3)}
        self.events = {number: columns[-1] for number, columns in rows.items()}
        adopt(self.rows, self.new_rows, {number: columns[:-1] for number, columns in rows.items()})
        letters = {number: (id_of(*id), *columns) for number, *id, columns in split(stored[2], 3)}
        adopt(self.letters, self.new_letters, {number: columns[:-1] for number, columns in letters.items()})
        for number, columns in letters.items():
            self.letters[number].row = columns[-1]
        assert Counter(stored[3]) == self.entries
        assert Counter(stored[4]) == self.failures

    def nothing_accepted_is_forgotten(self) -> None:
        """What was accepted has a record, is on its way, or is known to people; whatever the transitions were."""
        for id, mine in self.accepted - self.discarded:
            record = self.records.get(id)
            has_record = record is not None and record.fingerprint == mine
            is_on_its_way = any(
                (row.id, row.fingerprint, row.settled) == (id, mine, False) for row in self.rows.values()
            )
            is_told = any(
                (letter.id, letter.fingerprint, letter.status) == (id, mine, "open") for letter in self.letters.values()
            )
            assert has_record or is_on_its_way or is_told, f"lost: {id} {mine}"

    def a_failure_has_its_letter(self) -> None:
        """One for each generation, open until a person has settled it."""
        letters = Counter(
            (letter.id, letter.fingerprint, letter.generation, letter.reason)
            for letter in self.letters.values()
            if letter.status == "open" and letter.generation is not None
        )
        assert not [kind for kind, number in letters.items() if number > 1]
        told = {kind[:3] for kind in letters}
        for id, record in self.records.items():
            if record.status == "failed":
                assert (id, record.fingerprint, record.generation) in told | self.discarded, f"no letter: {id}"

    # ------------------------------------------------------------ how

    @property
    def queue(self) -> str:
        return str(self.app.conf.task_default_queue)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Connection]:
        with self.runtime.engine.begin() as connection:
            yield connection

    @contextlib.contextmanager
    def finishing(self, matches: bool) -> Iterator[Connection]:
        """A transaction of effects and record; nothing of it stays unless the finishing statement has matched."""
        if matches:
            with self.transaction() as connection:
                yield connection
        else:
            with pytest.raises(DataError, match="division by zero"), self.transaction() as connection:
                yield connection

    def message(self, id: OperationId, amount: int) -> Message:
        return Message.composed(
            self.app,
            id.operation,
            (),
            {"account": id.key, "amount": amount},
            task_id=f"{id.tenant}-{id.key}-{amount}",
            headers={KEY_HEADER: id.key, TENANT_HEADER: id.tenant},
        )

    def delivery(self, id: OperationId, amount: int) -> Delivery:
        message = self.message(id, amount)
        return Delivery(id, fingerprint(id, amount), {}, "task-id", message.to_text(), message.headers, self.queue)

    def from_broker(self, message: Message, headers: dict[str, Any]) -> BrokerMessage:
        return BrokerMessage(
            body=message.body.encode(),
            headers=headers,
            content_type="application/json",
            content_encoding="utf-8",
            delivery_info={"exchange": "", "routing_key": self.queue},
            accept=prepare_accept_content(["json"]),
            channel=None,
        )

    def _held(self, held: Claimed) -> Record | None:
        """The record, if this claim is still the one that counts."""
        record = self.records.get(held.id)
        if record is None or (record.status, record.fence, record.token) != ("started", held.fence, held.token):
            return None
        return record

    def _store(self, letter: Letter, *, ends: bool = False) -> bool:
        """Expect a letter, unless one that is open stands for it; one that ends an operation has to be there."""
        known = [*self.letters.values(), *self.new_letters]
        if not ends and any(other.status == "open" and other.is_same_as(letter) for other in known):
            return False
        self.new_letters.append(letter)
        return True


FAILURE = text("INSERT INTO failures (account, code) VALUES (:account, :code)")


def fingerprint(id: OperationId, amount: int) -> str:
    return keys.fingerprint({"account": id.key, "amount": amount})


def account(id: OperationId) -> str:
    return f"{id.tenant}/{id.key}"


def nth(those: list[T], n: int) -> T:
    """The newest for 0."""
    return those[-1 - n % len(those)]


def id_of(tenant: str | None, operation: str | None, key: str | None) -> OperationId | None:
    return None if tenant is None or operation is None or key is None else OperationId(tenant, operation, key)


def split(rows: Iterable[list[Any]], ids: int) -> Iterator[tuple[Any, ...]]:
    for number, *columns in rows:
        yield number, *columns[:ids], columns[ids:]


def adopt(known: dict[int, Any], new: list[Any], stored: dict[int, tuple[Any, ...]]) -> None:
    """Give what the model expects to be new its id, and compare everything."""
    # ids that one statement gives out to several operations may be in any order, and a program has to be repeatable
    for number in sorted(stored.keys() - known.keys(), key=lambda number: (str(stored[number][0]), number)):
        found = next((each for each in new if each.shown() == stored[number]), None)
        assert found is not None, f"unexpected: {stored[number]}; expected as new: {[each.shown() for each in new]}"
        new.remove(found)
        known[number] = found
    assert not new, f"missing: {[each.shown() for each in new]}"
    assert {number: each.shown() for number, each in known.items()} == stored


@contextlib.contextmanager
def refused(is_refused: bool, error: type[Exception]) -> Iterator[None]:
    if is_refused:
        with pytest.raises(error):
            yield
    else:
        yield


def provably_dead() -> str:
    """This host, boot and namespace, and a process that has ended."""
    *where, _, _ = process_identity().split("|")
    return "|".join([*where, "4194999", "1"])


@pytest.fixture
def machine(bank: Celery, engine: Engine) -> Iterator[Machine]:
    with engine.connect() as connection:
        yield Machine(bank, connection)


def run(machine: Machine, *steps: Callable[[], None]) -> None:
    for step in steps:
        step()
        machine.check()


# ---------------------------------------------------------------- programs that have failed


def test_a_letter_that_was_replayed_does_not_swallow_the_next_failure_of_its_outbox_row(machine: Machine) -> None:
    run(
        machine,
        lambda: machine.enqueue(ACME, 1, later=False, sent=True),
        lambda: machine.give_up(ACME, 1, 0, unknown=False),
        lambda: machine.replay(0, twice=True),
        # a late copy of the first message, while the replay waits; and then the replay's own
        lambda: machine.give_up(ACME, 1, 1, unknown=False),
        lambda: machine.relay_leases(["confirmed"]),
        lambda: machine.give_up(ACME, 1, 0, unknown=False),
        lambda: machine.replay(0, twice=True),
    )


@pytest.mark.parametrize("later", [True, False])
def test_a_second_call_after_a_replay_hides_none_of_its_deliveries(machine: Machine, later: bool) -> None:
    run(
        machine,
        lambda: machine.give_up(ACME, 1, None, unknown=False),
        lambda: machine.replay(0, twice=False),
        lambda: machine.enqueue(ACME, 1, later=later, sent=True),
        lambda: machine.reconcile(empty=True, late=True),
        lambda: machine.give_up(ACME, 1, 1, unknown=False),
    )


def test_the_letter_of_a_message_whose_task_was_unknown_becomes_that_of_its_operation(machine: Machine) -> None:
    """An old worker did not know the task; a new one knew it, and died of it."""
    run(
        machine,
        lambda: machine.enqueue(ACME, 1, later=False, sent=True),
        lambda: machine.give_up(ACME, 1, 0, unknown=True),
        lambda: machine.give_up(ACME, 1, 0, unknown=False),
        lambda: machine.replay(0, twice=True),
    )


def test_what_was_accepted_when_shown_and_replayed_since_is_not_cancelled(machine: Machine) -> None:
    run(
        machine,
        lambda: machine.enqueue(ACME, 1, later=False, sent=True),
        lambda: machine.look(ACME),
        lambda: machine.give_up(ACME, 1, 0, unknown=False),
        lambda: machine.replay(0, twice=True),
        lambda: machine.change(0, "cancel"),
    )


# ---------------------------------------------------------------- all the others


@pytest.mark.timeout(max(600, 2 * EXAMPLES))
def test_record_outbox_and_dead_letters_stay_what_the_model_says(bank: Celery, engine: Engine) -> None:
    with engine.connect() as connection:
        run_state_machine_as_test(
            lambda: Machine(bank, connection),
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=40,
                deadline=None,
                database=DirectoryBasedExampleDatabase(SEEDS),
                suppress_health_check=list(HealthCheck),
                print_blob=True,
            ),
        )
