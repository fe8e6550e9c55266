"""The checker: recomputes every invariant from the ledgers of a run, and from nothing that the library says.

    findings = check(Evidence(engine, accepted, acts=provider.acts, queues={"bank": 0}))
    assert not findings.violations

Each invariant is one small function over the books; `CHECKS` is the list of them. What it needs: the ledgers
(`ledgers.py`), what was accepted and what should come of it, what the provider outside wrote down, and what the broker
still holds.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import Engine, text

from tests.chaos import ledgers
from tests.chaos.ledgers import Change

TERMINAL = ("completed", "failed")
# How an operation may end without success although its caller expected none: faults used up its attempts, or the
# broker's delivery limit.
FAULTS = frozenset({"attempts_exhausted", "delivery_limit"})
# What a killed process had sent may still be carried out; a line of it that is later than this is a sign of life.
LATE = timedelta(seconds=5)


class Id(NamedTuple):
    """What a key names: the operation."""

    tenant: str
    operation: str
    key: str


@dataclass(frozen=True, slots=True)
class Accepted:
    """One accepted operation, and what should come of it.

    rows        what it writes into `entries` when it completes, steps included: (account, amount), each once;
                None: not known, only that no row is there twice
    result      the stored result as text; None: not known
    failure     the code it is to fail with; None: it is to complete
    failure_row whether its `on_failed` leaves a row in `failures`
    acts        how many effects outside it has when it completes
    is_event    whether it is a consumer's handling of an event
    max_attempts of its task; None: as the evidence says of every task
    """

    tenant: str
    operation: str
    key: str
    rows: tuple[tuple[str, int], ...] | None = None
    result: str | None = None
    failure: str | None = None
    failure_row: bool = True
    acts: int | None = None
    is_event: bool = False
    max_attempts: int | None = None

    @property
    def id(self) -> Id:
        return Id(self.tenant, self.operation, self.key)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the checker is given besides the ledgers.

    accepted       every operation that was accepted; enqueued ones are found in the ledger too
    acts           the provider's own ledger: how often it acted under each gateway key
    queues         messages left in each queue of the broker
    tenants        who may have rows; None: not checked
    rolled_back    operations enqueued only by transactions that rolled back
    drained        faults are over and everything had time to end; else what is under way is no violation
    max_attempts   of every task
    spare_attempts claims beyond them: one that ends the operation, and one for each time that claim was killed
    fenced         writes refused to former holders: they roll back, so only the logs have seen them
    """

    engine: Engine
    accepted: Sequence[Accepted]
    acts: Mapping[str, int] = field(default_factory=dict)
    queues: Mapping[str, int] = field(default_factory=dict)
    tenants: frozenset[str] | None = None
    rolled_back: Sequence[Id] = ()
    drained: bool = True
    max_attempts: int = 5
    spare_attempts: int = 1
    fenced: int = 0


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that was not kept: which, of what, and what is seen instead."""

    invariant: str
    key: str
    what: str

    def __str__(self) -> str:
        return f"{self.invariant} {self.key}: {self.what}"


@dataclass(slots=True)
class Counts:
    """Accepted = completed + failed + dead + queued + lost. `failed` as declared, `dead` without having been."""

    accepted: int = 0
    completed: int = 0
    failed: int = 0
    dead: int = 0
    queued: int = 0
    lost: int = 0
    doubled: int = 0
    duplicated: int = 0
    takeovers: int = 0
    fenced: int = 0


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything that is wrong, and how much of what there was."""

    violations: tuple[Violation, ...]
    counts: Counts
    changes: Sequence[Change]

    def history(self, violation: Violation) -> list[str]:
        """The ledger's lines about the operation that a violation names."""
        parts = violation.key.split("/", 2)
        return ledgers.history(self.changes, *parts) if len(parts) == 3 else []

    def as_dict(self) -> dict[str, Any]:
        """Counts and violations as JSON knows them."""
        return {**asdict(self.counts), "violations": [asdict(violation) for violation in self.violations]}


def check(evidence: Evidence) -> Findings:
    """Recompute every invariant. Everything that is wrong is in the findings, by key; nothing is raised."""
    books = Books(evidence)
    violations = tuple(violation for each in CHECKS for violation in each(books))
    return Findings(violations, count(books), books.changes)


# ---------------------------------------------------------------- the books


@dataclass(slots=True)
class Event:
    """One change of a record, named by its verb, under the claim that was the last one then."""

    verb: str
    change: Change
    claim: Change | None

    @property
    def old(self) -> dict[str, Any]:
        return self.change.old or {}

    @property
    def new(self) -> dict[str, Any]:
        return self.change.new or {}


class Books:
    """The ledgers of a run, sorted by what the checks ask for."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.changes = ledgers.read(evidence.engine)
        self.by_transaction: dict[int, list[Change]] = defaultdict(list)
        for change in self.changes:
            self.by_transaction[change.txid].append(change)
        self.records = self._of("records")
        self.letters: dict[int, list[Change]] = defaultdict(list)
        self.outbox: dict[int, list[Change]] = defaultdict(list)
        for change in self.changes:
            if change.book == "dead_letters":
                self.letters[change.row["id"]].append(change)
            elif change.book == "outbox":
                self.outbox[change.row["id"]].append(change)
        self._letters_by_id = self._of("dead_letters")
        self._letters_by_row: dict[int, list[Change]] = defaultdict(list)
        for lines in self.letters.values():
            if lines[0].row["outbox_id"] is not None:
                self._letters_by_row[lines[0].row["outbox_id"]] += lines
        self.business = [c for c in self.changes if c.book not in ledgers.HASHED]
        self.events: dict[Id, list[Event]] = {id: list(self._events(changes)) for id, changes in self.records.items()}
        self._ends_by_transaction: dict[int, list[Event]] = defaultdict(list)
        for events in self.events.values():
            for event in events:
                if event.verb in ("complete", "fail", "give_up", "cancel", "effect"):
                    self._ends_by_transaction[event.change.txid].append(event)
        self._rows_by_operation: dict[Id, list[Change]] = defaultdict(list)
        for change in self.business:
            if change.verb == "INSERT" and (end := self.event_of(change)) is not None:
                self._rows_by_operation[_id(end.change.row)].append(change)
        self.now = self._database_time()
        self.accepted = {each.id: each for each in evidence.accepted}
        # what committed an enqueue was accepted, whether or not anybody kept a list
        for change in self.changes:
            if change.book == "outbox" and change.verb == "INSERT" and change.row["origin"] == "enqueue":
                id = _id(change.row)
                if change.row["settled_at"] is None:
                    self.accepted.setdefault(id, Accepted(*id))

    def status(self, id: Id) -> str | None:
        """The status of a record at the end; None where there is none (any more)."""
        changes = self.records.get(id)
        return None if not changes or changes[-1].new is None else changes[-1].new["status"]

    def ended(self, id: Id) -> str | None:
        """How an operation has ended, also when its record has been purged since."""
        for change in reversed(self.records.get(id, [])):
            status = (change.new or change.old or {})["status"]
            return status if status in TERMINAL else None
        return None

    def code(self, id: Id) -> str | None:
        """The code of an operation's failure."""
        record = self.records[id][-1].row
        return json.loads(record["error"])["code"] if record["error"] else None

    def open_letters(self, before: Change | None = None) -> set[Id]:
        """The operations with an open dead letter, at the end or before a change's transaction."""
        found = set()
        for lines in self.letters.values():
            seen = [c for c in lines if before is None or (c.seq < before.seq and c.txid != before.txid)]
            if seen and seen[-1].new is not None and seen[-1].new["status"] == "open":
                found.add(_id(seen[-1].new))
        return found

    def letters_about(self, id: Id, outbox_id: int) -> list[Change]:
        """The lines of the dead letters that name an operation, or an outbox row."""
        return self._letters_by_id.get(id, []) + self._letters_by_row.get(outbox_id, [])

    def rows_left(self) -> list[dict[str, Any]]:
        """The outbox at the end."""
        return [lines[-1].new for lines in self.outbox.values() if lines[-1].new is not None]

    def written_by(self, id: Id) -> list[Change]:
        """The business rows that an operation's own transactions have inserted."""
        return self._rows_by_operation.get(id, [])

    def event_of(self, change: Change) -> Event | None:
        """What a business row was committed with: the completion, the step or the failure in its transaction."""
        return next(iter(self._ends_by_transaction.get(change.txid, [])), None)

    def _of(self, book: str) -> dict[Id, list[Change]]:
        found: dict[Id, list[Change]] = defaultdict(list)
        for change in self.changes:
            if change.book == book:
                found[_id(change.row)].append(change)
        return found

    def _events(self, changes: Sequence[Change]) -> Iterator[Event]:
        claim: Change | None = None
        for change in changes:
            verb = self._verb(change)
            yield Event(verb, change, claim)
            if verb in ("claim", "takeover", "doubt"):
                claim = change

    def _verb(self, change: Change) -> str:
        """What a change of a record was, told from its row before and after and from what shares its transaction."""
        old, new = change.old, change.new
        if new is None:
            return "purge"
        if old is None:
            return {"started": "claim", "failed": "give_up"}.get(new["status"], "unknown")
        if new["status"] == "started" and old["status"] != "started":
            return "claim"
        if new["status"] == "started" and (new["fence"], new["token"]) != (old["fence"], old["token"]):
            return "doubt" if new["token"] == old["token"] else "takeover"
        moved = new["fence"] != old["fence"]
        match old["status"], new["status"]:
            # by whatever it was before: that it was no longer started is for the checks to say
            case _, "completed" if new["completed_at"] != old["completed_at"]:
                return "complete"
            case (("started" | "completed" | "failed"), "failed") if new["completed_at"] != old["completed_at"]:
                return "give_up" if moved else "fail"
            case "released", "failed":
                return "cancel"
            case "started", "released" if any(c.book == "audit" for c in self.by_transaction[change.txid]):
                return "operator_release"
            case "started", "released":
                return {"retry": "release", "recover": "recover"}.get(self._delivered_by(change), "unknown_release")
            case "failed", "released":
                return "replay"
            case before, after if before != after:
                return "unknown"
        if new["effects"] != old["effects"]:
            return "effect" if new["status"] == "started" else "resolve"
        for column, verb in (("duplicates", "count"), ("revoked_generation", "revoke"), ("locked_until", "renew")):
            if new[column] != old[column]:
                return verb
        return "touch"

    def _delivered_by(self, change: Change) -> str:
        origins = [d.row["origin"] for d in deliveries_in(self, change)]
        return origins[0] if origins else ""

    def _database_time(self) -> datetime:
        with self.evidence.engine.connect() as connection:
            now: datetime = connection.execute(text("SELECT clock_timestamp()")).scalar_one()
            return now


def deliveries_in(books: Books, change: Change) -> list[Change]:
    """The next deliveries of a record that its change's transaction wrote into the outbox."""
    return [
        c
        for c in books.by_transaction[change.txid]
        if c.book == "outbox" and c.verb == "INSERT" and _id(c.row) == _id(change.row)
    ]


def letters_in(books: Books, change: Change, verb: str) -> list[Change]:
    """The dead letters of a record that its change's transaction inserted, or updated."""
    return [
        c
        for c in books.by_transaction[change.txid]
        if c.book == "dead_letters" and c.verb == verb and _id(c.row) == _id(change.row)
    ]


def _id(row: Mapping[str, Any]) -> Id:
    return Id(row["tenant"], row["operation"], row["key"])


def _name(id: Id) -> str:
    return "/".join(f"{part}" for part in id)


def _time(value: str | None) -> datetime:
    return datetime.min.replace(tzinfo=UTC) if value is None else datetime.fromisoformat(value)


# ---------------------------------------------------------------- the checks


def one_result_per_generation(books: Books) -> Iterator[Violation]:
    """I1: for every key at most one committed result per generation, and no business row twice."""
    for id, events in books.events.items():
        results: Counter[int] = Counter()
        for event in events:
            if event.verb == "purge":
                results.clear()
            elif event.verb == "complete":
                results[event.new["generation"]] += 1
        for generation, number in results.items():
            if number > 1:
                yield Violation("I1", _name(id), f"{number} committed results in generation {generation}")
        generation = 0
        for event in events:
            if event.verb == "purge":
                generation = 0
                continue
            now = event.new["generation"]
            if now != generation and now != (1 if generation == 0 else generation + 1):
                yield Violation("I1", _name(id), f"generation {now} after {generation}")
            if now > max(generation, 1) and event.verb != "replay":
                yield Violation("I1", _name(id), f"generation {now} was opened by {event.verb}, not by a replay")
            generation = now
    for id, each, found in _surplus_rows(books):
        yield Violation("I1", _name(id), f"the row {each} is there {found} times")


def _surplus_rows(books: Books) -> Iterator[tuple[Id, tuple[str, int], int]]:
    for id in books.accepted:
        rows = Counter((c.row["account"], c.row["amount"]) for c in books.written_by(id) if c.book == "entries")
        wanted = books.accepted[id].rows
        for each, found in rows.items():
            allowed = 1 if wanted is None else max(Counter(wanted)[each], 1)
            if found > allowed:
                yield id, each, found


def everything_ends(books: Books) -> Iterator[Violation]:
    """I2: once faults have stopped every accepted operation ends, and until then its outbox row is kept."""
    if books.evidence.drained:
        letters = books.open_letters()
        for id in books.accepted:
            status = books.status(id)
            if status in ("started", "released"):
                yield Violation("I2", _name(id), f"still {status}")
            elif books.ended(id) is None and id not in letters and status is None and _owed(books, id):
                yield Violation("I2", _name(id), "accepted and in the outbox, but never begun")
    for lines in books.outbox.values():
        for change in lines:
            if change.old is None or change.new is None or change.old["settled_at"] == change.new["settled_at"]:
                continue
            id = _id(change.new)
            ends = [
                c
                for c in books.records.get(id, [])
                if c.seq < change.seq
                and c.row["status"] in TERMINAL
                and c.row["fingerprint"] == change.new["fingerprint"]
            ]
            given_up = [
                c for c in books.letters_about(id, change.new["id"]) if c.seq < change.seq or c.txid == change.txid
            ]
            if not ends and not given_up:
                yield Violation(
                    "I2", _name(id), f"outbox row {change.new['id']} was settled before its operation ended"
                )


def _owed(books: Books, id: Id) -> bool:
    return any(_id(row) == id and row["settled_at"] is None for row in books.rows_left())


def rows_exactly_with_their_end(books: Books) -> Iterator[Violation]:
    """I3: business rows are visible exactly when their record is completed, their step recorded, or it has failed."""
    for change in books.business:
        key = str(change.row.get("account", ""))
        if change.verb != "INSERT":
            yield Violation("I3", key, f"a row of {change.book} was changed ({change.verb.lower()})")
            continue
        event = books.event_of(change)
        if event is None:
            yield Violation("I3", key, f"a row of {change.book} was committed without its record (tx {change.txid})")
            continue
        failing = event.verb in ("fail", "give_up", "cancel")
        if (change.book == "failures") != failing:
            yield Violation("I3", _name(_id(event.change.row)), f"a row of {change.book} committed with {event.verb}")
    for id, accepted in books.accepted.items():
        written = books.written_by(id)
        rows = Counter((c.row["account"], c.row["amount"]) for c in written if c.book == "entries")
        failures = sum(c.book == "failures" for c in written)
        ended = books.ended(id)
        if ended == "completed" and accepted.rows is not None:
            missing = Counter(accepted.rows) - rows
            strange = [each for each in rows if each not in accepted.rows]
            if missing:
                yield Violation("I3", _name(id), f"completed, but not there: {sorted(missing)}")
            if strange:
                yield Violation("I3", _name(id), f"completed, with rows nobody asked for: {sorted(strange)}")
        fails = [e for e in books.events.get(id, []) if e.verb in ("fail", "give_up", "cancel")]
        broken = any(c.row["reason"] == "on_failed_error" for e in fails for c in letters_in(books, e.change, "INSERT"))
        if accepted.failure is not None and accepted.failure_row and failures != len(fails) and not broken:
            yield Violation("I3", _name(id), f"failed {len(fails)} times, with {failures} rows of its failure")


def the_fence_only_grows(books: Books) -> Iterator[Violation]:
    """I4: the fence of a key only grows, and no write of a former holder is ever visible."""
    for id, events in books.events.items():
        fence = 0
        for event in events:
            change = event.change
            if event.verb == "purge":
                continue
            now = event.new["fence"]
            if event.verb in ("claim", "takeover", "doubt", "give_up") and now <= fence:
                yield Violation("I4", _name(id), f"the fence went from {fence} to {now} ({event.verb})")
            elif now < fence:
                yield Violation("I4", _name(id), f"the fence went back from {fence} to {now} ({event.verb})")
            fence = max(fence, now)
            if event.verb in ("complete", "fail", "release", "effect", "renew"):
                yield from _written_by_its_holder(id, event, change)


def _written_by_its_holder(id: Id, event: Event, change: Change) -> Iterator[Violation]:
    claim = event.claim
    if event.old.get("status") == "released":
        yield Violation("I4", _name(id), f"{event.verb} under an old fence: nobody holds the record")
    if claim is None or event.old.get("status") != "started":
        return
    fence = event.old["fence"]
    if change.began < claim.at and change.txid != claim.txid:
        yield Violation(
            "I4", _name(id), f"{event.verb} under an old fence: its transaction is older than the claim of {fence}"
        )
    holder = _process(event.old.get("locked_by"))
    if change.writer.startswith("pid ") and holder is not None and change.writer != holder:
        yield Violation(
            "I4", _name(id), f"{event.verb} under an old fence: by {change.writer}, but {fence} is of {holder}"
        )


def _process(locked_by: str | None) -> str | None:
    """How the process of a holder (host, boot, namespace, pid, start) signs its lines."""
    parts = (locked_by or "").split("|")
    return f"pid {parts[3]}" if len(parts) == 5 else None


def ended_is_ended(books: Books) -> Iterator[Violation]:
    """I5: an ended record changes only by a recorded replay, a person's word on an effect, or the purge."""
    for id, events in books.events.items():
        for event in events:
            if event.old.get("status") not in TERMINAL or event.verb == "purge":
                continue
            if event.verb == "replay" and letters_in(books, event.change, "UPDATE"):
                continue
            audited = any(c.book == "audit" for c in books.by_transaction[event.change.txid])
            if event.verb in ("resolve", "replay") and audited:
                continue
            yield Violation(
                "I5", _name(id), f"{event.old['status']} and changed again: {event.verb} to {event.new['status']}"
            )


def stored_results_are_the_expected(books: Books) -> Iterator[Violation]:
    """I6: the stored result is the expected one, byte for byte; one key has one fingerprint until it is purged."""
    for id, events in books.events.items():
        fingerprint = None
        for event in events:
            if event.verb == "purge":
                fingerprint = None
            elif fingerprint is None:
                fingerprint = event.new["fingerprint"]
            elif event.new["fingerprint"] != fingerprint:
                yield Violation("I6", _name(id), f"{event.verb} changed the fingerprint")
                fingerprint = event.new["fingerprint"]
    for id, accepted in books.accepted.items():
        ended = books.ended(id)
        if ended is None:
            continue
        record = books.records[id][-1].row
        if ended == "completed":
            if accepted.failure is not None:
                yield Violation("I6", _name(id), f"completed, but {accepted.failure} was to come")
            elif accepted.result is not None and record["result"] != sha256(accepted.result):
                yield Violation("I6", _name(id), "another result is stored than was expected")
        elif (code := books.code(id)) != accepted.failure and code not in FAULTS:
            yield Violation("I6", _name(id), f"failed as {code}, expected {accepted.failure or 'a result'}")


def sha256(value: str) -> str:
    """How the ledger keeps a long text."""
    return hashlib.sha256(value.encode()).hexdigest()


def acknowledged_is_held_elsewhere(books: Books) -> Iterator[Violation]:
    """I7: a message may go only if its record is ended, or holds the message, and its next delivery is on its way."""
    sent = {_id(row) for row in books.rows_left() if row["settled_at"] is None}
    for id, changes in books.records.items():
        record = changes[-1].new
        if record is None:
            continue
        if record["status"] in ("started", "released") and record["message"] in (None, "", sha256("")):
            yield Violation("I7", _name(id), f"{record['status']}, and its message is not kept")
        if record["status"] == "released" and id not in sent:
            yield Violation("I7", _name(id), "released, and no outbox row will deliver it again")
    for id, events in books.events.items():
        for event in events:
            counted = event.verb == "count"
            if counted and event.old["status"] not in ("started", "released"):
                yield Violation("I7", _name(id), f"a duplicate in flight was counted on a record that is {event.old['status']}")  # fmt: skip


def every_row_is_published(books: Books) -> Iterator[Violation]:
    """I8: every committed outbox row was published, and what is marked so did reach the broker."""
    lettered = {lines[-1].row["outbox_id"] for lines in books.letters.values()}
    letters = {_id(lines[-1].row) for lines in books.letters.values()}
    unseen = []
    for row in books.rows_left():
        id = _id(row)
        if row["status"] == "pending" and books.evidence.drained and _time(row["available_at"]) <= books.now:
            yield Violation("I8", _name(id), f"outbox row {row['id']} was never published")
        elif row["status"] == "failed" and row["id"] not in lettered:
            yield Violation("I8", _name(id), f"outbox row {row['id']} was given up without a dead letter")
        elif row["status"] == "published":
            if not any(c.old is not None and _becomes(c, "published") for c in books.outbox[row["id"]]):
                yield Violation("I8", _name(id), f"outbox row {row['id']} is published, and nobody has marked it")
            if row["settled_at"] is None and id not in books.records and id not in letters:
                unseen.append(row)
    held = Counter(books.evidence.queues)
    for row in unseen:
        if held[row["queue"]] > 0:
            held[row["queue"]] -= 1
            continue
        yield Violation(
            "I8", _name(_id(row)), f"outbox row {row['id']} is marked as published, and the broker does not hold it"
        )


def _becomes(change: Change, status: str) -> bool:
    before = change.old["status"] if change.old is not None else None
    return change.new is not None and change.new["status"] == status and before != status


def nothing_rolled_back_is_sent(books: Books) -> Iterator[Violation]:
    """I9: of a transaction that rolled back nothing is ever published; every record was accepted by somebody."""
    rolled_back = set(books.evidence.rolled_back)
    for id in books.records:
        if id in rolled_back:
            yield Violation("I9", _name(id), "rolled back, and has a record")
        elif id not in books.accepted:
            yield Violation("I9", _name(id), "has a record, and nobody accepted it")
    for id in {_id(c.row) for lines in books.outbox.values() for c in lines} & rolled_back:
        yield Violation("I9", _name(id), "rolled back, and has an outbox row")


def ordered_by_commit(books: Books) -> Iterator[Violation]:
    """I10: rows of one operation and ordering key are first published in the order in which they were committed."""
    published: dict[tuple[str, str], list[tuple[int, int, dict[str, Any]]]] = defaultdict(list)
    for row_id, lines in books.outbox.items():
        first = next((c for c in lines if _becomes(c, "published")), None)
        if first is not None and first.row["ordering_key"] is not None:
            name = (first.row["operation"], first.row["ordering_key"])
            published[name].append((first.seq, row_id, first.row))
    for (_, ordering_key), found in published.items():
        latest = (0, 0)
        for _, row_id, row in sorted(found, key=lambda each: each[0]):
            place = (row["place"] or 0, row_id)  # given at the commit
            if place < latest:
                yield Violation(
                    "I10", _name(_id(row)), f"row {row_id} of {ordering_key!r} was published after row {latest[1]}"
                )
            latest = max(latest, place)


def events_apply_once(books: Books) -> Iterator[Violation]:
    """I11: a published event is applied at most once per consumer."""
    for id, accepted in books.accepted.items():
        if accepted.is_event:
            applied = sum(e.verb == "complete" for e in books.events.get(id, []))
            if applied > 1:
                yield Violation("I11", _name(id), f"the event was applied {applied} times")


def one_act_outside(books: Books) -> Iterator[Violation]:
    """I12: per key and effect at most one act of the provider, under a key of nobody else, and begun before."""
    owners: dict[str, set[tuple[Id, str]]] = defaultdict(set)
    acted: Counter[tuple[Id, str]] = Counter()
    for id, changes in books.records.items():
        for change in changes:
            for name, effect in (change.row["effects"] or {}).items():
                if effect.get("key"):
                    owners[effect["key"]].add((id, name))
    for gateway_key, acts in books.evidence.acts.items():
        if acts > 1:
            names = [f"{_name(id)} {name}" for id, name in owners.get(gateway_key, ())]
            key = _name(next(iter(owners[gateway_key]))[0]) if gateway_key in owners else gateway_key
            yield Violation("I12", key, f"{acts} acts under {gateway_key} ({', '.join(names) or 'nobody'})")
        if acts and gateway_key not in owners:
            yield Violation("I12", gateway_key, "an act under a key that no effect was begun with")
        for owner in owners.get(gateway_key, ()):
            acted[owner] += bool(acts)
    for gateway_key, found in owners.items():
        if len(found) > 1:
            names = sorted(f"{_name(id)} {name}" for id, name in found)
            yield Violation("I12", names[0].split(" ")[0], f"{gateway_key} is shared by {', '.join(names)}")
    for (id, name), keys in acted.items():
        if keys > 1:
            yield Violation("I12", _name(id), f"effect {name!r} acted under {keys} keys")
    for id, accepted in books.accepted.items():
        if accepted.acts is not None and books.ended(id) == "completed":
            found_acts = sum(keys for (owner, _), keys in acted.items() if owner == id)
            if found_acts != accepted.acts:
                yield Violation("I12", _name(id), f"completed with {found_acts} acts outside, expected {accepted.acts}")


def failures_are_bounded_and_lettered(books: Books) -> Iterator[Violation]:
    """I13: an operation fails at most so many times, then there is exactly one dead letter, which says how and why."""
    for id, events in books.events.items():
        own = books.accepted[id].max_attempts if id in books.accepted else None
        limit = (own or books.evidence.max_attempts) + books.evidence.spare_attempts
        most = max((e.new["attempts"] for e in events if e.change.new is not None), default=0)
        if most > limit:
            yield Violation("I13", _name(id), f"{most} attempts, allowed are {limit}")
        for event in events:
            if event.verb not in ("fail", "give_up", "cancel"):
                continue
            letters = letters_in(books, event.change, "INSERT")
            if len(letters) != 1:
                yield Violation("I13", _name(id), f"failed ({event.verb}) with {len(letters)} dead letters")
            for letter in letters:
                wanted = ("reason", "attempts", "first_error", "last_error", "headers", "payload")
                if without := [name for name in wanted if letter.row[name] is None]:
                    yield Violation("I13", _name(id), f"a dead letter without {', '.join(without)}")


def replays_are_one(books: Books) -> Iterator[Violation]:
    """I14: a dead letter is replayed at most once: one new generation, one delivery, in one transaction."""
    for letter, lines in books.letters.items():
        replays = [c for c in lines if c.old is not None and _becomes(c, "replayed")]
        if len(replays) > 1:
            yield Violation("I14", _name(_id(lines[-1].row)), f"dead letter {letter} was replayed {len(replays)} times")
    for id, events in books.events.items():
        for event in events:
            if event.verb != "replay":
                continue
            if len(letters_in(books, event.change, "UPDATE")) != 1:
                yield Violation("I14", _name(id), "reopened without its dead letter")
            if len(deliveries_in(books, event.change)) != 1:
                yield Violation("I14", _name(id), f"reopened with {len(deliveries_in(books, event.change))} deliveries")
            if event.new["generation"] != event.old["generation"] + 1:
                yield Violation("I14", _name(id), "reopened without a new generation")


def nothing_disappears(books: Books) -> Iterator[Violation]:
    """I15: accepted = completed + failed + dead + still queued; what is in none of them is lost."""
    _, lost = _whereabouts(books)
    for id in lost:
        yield Violation("I15", _name(id), "lost: no record, no outbox row, no dead letter, and no message left for it")


def _whereabouts(books: Books) -> tuple[Counter[str], list[Id]]:
    """Where every accepted operation is, and those that are nowhere."""
    found: Counter[str] = Counter()
    nowhere: list[Id] = []
    letters = books.open_letters()
    owed = {_id(row) for row in books.rows_left() if row["settled_at"] is None}
    for id, accepted in books.accepted.items():
        ended = books.ended(id)
        if ended == "completed":
            found["completed"] += 1
        elif ended == "failed":
            found["failed" if books.code(id) == accepted.failure else "dead"] += 1
        elif books.status(id) is not None or id in owed:
            found["queued"] += 1
        elif id in letters:
            found["dead"] += 1
        else:
            nowhere.append(id)
    # what was only sent, and not begun yet, is a message in some queue: it cannot be told which
    in_queues = min(len(nowhere), sum(books.evidence.queues.values()))
    found["queued"] += in_queues
    return found, nowhere[in_queues:]


def nobody_is_robbed(books: Books) -> Iterator[Violation]:
    """I20: a holder is replaced only when its lease is over or it is dead, and a dead one is replaced."""
    last_signs: dict[str, Change] = {}
    for change in books.changes:
        if change.writer:
            last_signs[change.writer] = change
    for id, events in books.events.items():
        for event in events:
            old, change = event.old, event.change
            if old.get("status") == "started" and event.verb in ("takeover", "give_up", "recover"):
                if _time(old["locked_until"]) < change.at:
                    continue
                sign = last_signs.get(_process(old["locked_by"]) or "")
                # recovery may know that a holder is dead before its lease is over; a later line of it says otherwise
                if event.verb != "recover" or (sign is not None and sign.began > change.at + LATE):
                    yield Violation("I20", _name(id), f"{event.verb} from a holder whose lease was not over")
            early = event.verb == "claim" and _time(old.get("available_at")) > change.at
            if early:
                yield Violation("I20", _name(id), "claimed before it was due")
        last = books.records[id][-1].new or {}
        over = last.get("status") == "started" and _time(last["locked_until"]) < books.now
        if over and books.evidence.drained:
            yield Violation("I20", _name(id), "its lease is over, and nobody has recovered it")


def purged_is_past_its_time(books: Books) -> Iterator[Violation]:
    """I21: the purge deletes no record that has not ended or is younger than its retention, and nothing unsent."""
    for id, events in books.events.items():
        for event in events:
            if event.verb != "purge":
                continue
            if event.old["status"] not in TERMINAL:
                yield Violation("I21", _name(id), f"deleted while {event.old['status']}")
            elif _time(event.old["expires_at"]) >= event.change.at:
                yield Violation("I21", _name(id), "deleted before its retention was over")
            if id in books.open_letters(before=event.change):
                yield Violation("I21", _name(id), "deleted with an open dead letter")
    for lines in books.outbox.values():
        for change in lines:
            if change.new is None and change.row["settled_at"] is None and change.row["status"] != "published":
                yield Violation("I21", _name(_id(change.row)), f"outbox row {change.row['id']} was deleted unsent")
    for letter, lines in books.letters.items():
        if lines[-1].new is None and lines[-1].row["status"] == "open":
            yield Violation("I21", _name(_id(lines[-1].row)), f"dead letter {letter} was deleted while open")


# What any number of relays, sweepers and reconciles may do to an outbox row.
_SENDING = {
    ("pending", "pending"),
    ("pending", "published"),
    ("pending", "failed"),
    ("published", "pending"),
    ("published", "published"),
    ("failed", "failed"),
}


def sweepers_do_not_add_up(books: Books) -> Iterator[Violation]:
    """I22: however many relays and sweepers there are, each release has one delivery and each row one way forward."""
    for id, events in books.events.items():
        for event in events:
            if event.verb in ("release", "recover", "unknown_release"):
                number = len(deliveries_in(books, event.change))
                if number != 1:
                    yield Violation("I22", _name(id), f"{event.verb} with {number} next deliveries")
    for row_id, lines in books.outbox.items():
        for change in lines:
            if change.old is None or change.new is None:
                continue
            step = (change.old["status"], change.new["status"])
            if step == ("failed", "pending") and change.new["origin"] == "replay":
                continue  # by a person, in its old place
            if step not in _SENDING:
                yield Violation("I22", _name(_id(change.row)), f"outbox row {row_id}: {step[0]} became {step[1]}")
            elif step == ("published", "pending") and change.old["settled_at"] is not None:
                yield Violation("I22", _name(_id(change.row)), f"outbox row {row_id}: settled, and sent again")


def tenants_are_apart(books: Books) -> Iterator[Violation]:
    """I23: no tenant has another one's rows, and there is nobody's row that is of no tenant."""
    tenants = books.evidence.tenants
    if tenants is not None:
        for id in {_id(c.row) for c in books.changes if c.book in ("records", "outbox")}:
            if id.tenant not in tenants:
                yield Violation("I23", _name(id), f"a row of {id.tenant!r}, who is no tenant")
    owners: dict[tuple[str, int], set[str]] = defaultdict(set)
    for id, accepted in books.accepted.items():
        for each in accepted.rows or ():
            owners[each].add(id.tenant)
    for id in books.accepted:
        for change in books.written_by(id):
            if change.book != "entries":
                continue
            others = owners.get((change.row["account"], change.row["amount"]))
            if others and id.tenant not in others:
                yield Violation("I23", _name(id), f"wrote the row {change.row['account']!r} of {', '.join(others)}")
    # one statement about one operation never ends another tenant's of the same name
    for changes in books.by_transaction.values():
        ended: dict[tuple[str, str], set[str]] = defaultdict(set)
        for change in changes:
            if change.book == "records" and (_becomes(change, "completed") or _becomes(change, "failed")):
                id = _id(change.row)
                ended[id.operation, id.key].add(id.tenant)
        for (operation, key), found in ended.items():
            if len(found) > 1:
                name = _name(Id(min(found), operation, key))
                yield Violation("I23", name, f"ended in one transaction for {', '.join(sorted(found))}")


CHECKS: tuple[Callable[[Books], Iterable[Violation]], ...] = (
    one_result_per_generation,
    everything_ends,
    rows_exactly_with_their_end,
    the_fence_only_grows,
    ended_is_ended,
    stored_results_are_the_expected,
    acknowledged_is_held_elsewhere,
    every_row_is_published,
    nothing_rolled_back_is_sent,
    ordered_by_commit,
    events_apply_once,
    one_act_outside,
    failures_are_bounded_and_lettered,
    replays_are_one,
    nothing_disappears,
    nobody_is_robbed,
    purged_is_past_its_time,
    sweepers_do_not_add_up,
    tenants_are_apart,
)


def count(books: Books) -> Counts:
    """How much of what there was."""
    found, lost = _whereabouts(books)
    events = [event for each in books.events.values() for event in each]
    surplus = sum(number - 1 for _, _, number in _surplus_rows(books))
    return Counts(
        accepted=len(books.accepted),
        completed=found["completed"],
        failed=found["failed"],
        dead=found["dead"],
        queued=found["queued"],
        lost=len(lost),
        doubled=surplus + sum(acts - 1 for acts in books.evidence.acts.values() if acts > 1),
        duplicated=sum(event.verb == "count" for event in events),
        takeovers=sum(event.verb in ("takeover", "recover") for event in events),
        fenced=books.evidence.fenced,
    )
