"""The ledgers of a run, sorted by what the checks ask for: the changes of each operation, each named by its verb."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import text

from tests.chaos import ledgers
from tests.chaos.evidence import Accepted, Evidence, Id
from tests.chaos.ledgers import Change

TERMINAL = ("completed", "failed")
# How an operation may end without success although its caller expected none: faults used up its attempts, or the
# broker's delivery limit.
FAULTS = frozenset({"attempts_exhausted", "delivery_limit"})
# What a failing transaction leaves: the operation ends without success.
FAILING = ("fail", "give_up", "cancel")
# What draws a conclusion: these, and a person's word on an effect with which the operation is to end.
ENDING = (*FAILING, "resolve_end")
# The ends over an effect: perhaps it happened; and it did happen, but the operation could not finish after it.
UNKNOWN, UNFINISHED = "effect_unknown", "unfinished"
# What a killed process had sent may still be carried out; a line of it that is later than this is a sign of life.
LATE = timedelta(seconds=5)


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
    def taken(self) -> bool:
        """Whether it took the record from its holder, who was not asked."""
        revoked = self.verb == "revoke" and self.new["status"] == "released"
        return revoked or self.verb in ("takeover", "give_up", "recover")

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
        self.records = {id: list(_by_transaction(changes)) for id, changes in self._of("records").items()}
        self.letters: dict[int, list[Change]] = defaultdict(list)
        self.outbox: dict[int, list[Change]] = defaultdict(list)
        for change in self.changes:
            if change.book == "dead_letters":
                self.letters[change.row["id"]].append(change)
            elif change.book == "outbox":
                self.outbox[change.row["id"]].append(change)
        self._rows_by_id: dict[Id, list[list[Change]]] = defaultdict(list)
        for lines in self.outbox.values():
            self._rows_by_id[id_of(lines[0].row)].append(lines)
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
                if event.verb in ("complete", "effect", "resolve", *ENDING):
                    self._ends_by_transaction[event.change.txid].append(event)
        self._rows_by_operation: dict[Id, list[Change]] = defaultdict(list)
        for change in self.business:
            if change.verb == "INSERT" and (end := self.event_of(change)) is not None:
                self._rows_by_operation[id_of(end.change.row)].append(change)
        self.now = self._database_time()
        self.accepted = {
            each.id: each for each in evidence.accepted if not each.once_claimed or each.id in self.records
        }
        # what committed an enqueue was accepted, whether or not a list was kept
        for change in self.changes:
            if change.book == "outbox" and change.verb == "INSERT" and change.row["origin"] == "enqueue":
                id = id_of(change.row)
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
        return code_of(self.records[id][-1].row)

    def deliveries(self, id: Id) -> list[list[Change]]:
        """The lines of each outbox row of an operation."""
        return self._rows_by_id.get(id, [])

    def letters_of(self, id: Id) -> list[dict[str, Any]]:
        """The dead letters that name an operation, as they are at the end."""
        last = {change.row["id"]: change.row for change in self._letters_by_id.get(id, [])}
        return list(last.values())

    def open_letters(self, before: Change | None = None) -> set[Id]:
        """The operations with an open dead letter, at the end or before a change's transaction."""
        found = set()
        for lines in self.letters.values():
            seen = [c for c in lines if before is None or (c.seq < before.seq and c.txid != before.txid)]
            if seen and seen[-1].new is not None and seen[-1].new["status"] == "open":
                found.add(id_of(seen[-1].new))
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
        return next(reversed(self._ends_by_transaction.get(change.txid, [])), None)

    def written_with(self, id: Id, event: Event, book: str) -> list[Change]:
        """The business rows of one book that were committed with an event, in their order."""
        return [c for c in self.written_by(id) if c.book == book and c.txid == event.change.txid]

    def _of(self, book: str) -> dict[Id, list[Change]]:
        found: dict[Id, list[Change]] = defaultdict(list)
        for change in self.changes:
            if change.book == book:
                found[id_of(change.row)].append(change)
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
            if new["status"] == "failed":
                return "cancel" if "cancel" in self._audited(change) else "give_up"
            return {"started": "claim", "released": "revoke"}.get(new["status"], "unknown")
        if new["status"] == "started" and old["status"] != "started":
            return "claim"
        if new["status"] == "started" and (new["fence"], new["token"]) != (old["fence"], old["token"]):
            return "doubt" if new["token"] == old["token"] else "takeover"
        if (
            old["status"] != "failed"
            and new["status"] == "released"
            and new["revoked_generation"] != old["revoked_generation"]
        ):
            return "revoke"  # of a terminated attempt: claimed and let go, in the name of its holder that is gone
        moved = new["fence"] != old["fence"]
        match old["status"], new["status"]:
            # by whatever it was before: that it was no longer started is for the checks to say
            case _, "completed" if new["completed_at"] != old["completed_at"]:
                return "complete"
            case (("started" | "completed" | "failed"), "failed") if new["completed_at"] != old["completed_at"]:
                return "give_up" if moved else "fail"
            case "released", "failed":
                return "cancel" if "cancel" in self._audited(change) else "give_up"
            case "started", "released" if "release" in self._audited(change):
                return "operator_release"
            case "started", "released" if id_of(new).is_request:
                return self._request_released_by(change)
            case "started", "released":
                return {"retry": "release", "recover": "recover"}.get(self._delivered_by(change), "unknown_release")
            case "failed", "released":
                return "replay"
            case "failed", "failed" if new["error"] != old["error"]:
                return "resolve_end"
            case before, after if before != after:
                return "unknown"
        if new["effects"] != old["effects"]:
            return "effect" if new["status"] == "started" else "resolve"
        columns = {
            "duplicates": "count",
            "revoked_generation": "revoke",
            "locked_until": "renew",
            "kept_until": "keep",
        }
        for column, verb in columns.items():
            if new[column] != old[column]:
                return verb
        return "touch"

    def _request_released_by(self, change: Change) -> str:
        """A request's holder or recovery: neither sends anything, so only the writer tells them apart."""
        holder = process_of((change.old or {}).get("locked_by"))
        return "recover" if change.writer.startswith("pid ") and change.writer != holder else "release"

    def _audited(self, change: Change) -> set[str]:
        return {c.row["action"] for c in self.by_transaction[change.txid] if c.book == "audit"}

    def _delivered_by(self, change: Change) -> str:
        origins = [d.row["origin"] for d in deliveries_in(self, change)]
        return origins[0] if origins else ""

    def _database_time(self) -> datetime:
        with self.evidence.engine.connect() as connection:
            now: datetime = connection.execute(text("SELECT clock_timestamp()")).scalar_one()
            return now


def _by_transaction(changes: Sequence[Change]) -> Iterator[Change]:
    """What each transaction has made of a row: as it was in between, it was never visible."""
    for _, own in itertools.groupby(changes, key=lambda change: change.txid):
        first, *_, last = [*own] * 2
        yield replace(last, old=first.old)


def deliveries_in(books: Books, change: Change) -> list[Change]:
    """The next deliveries of a record that its change's transaction wrote into the outbox."""
    return [
        c
        for c in books.by_transaction[change.txid]
        if c.book == "outbox" and c.verb == "INSERT" and id_of(c.row) == id_of(change.row)
    ]


def letters_in(books: Books, change: Change, verb: str) -> list[Change]:
    """The dead letters of a record that its change's transaction inserted, or updated."""
    return [
        c
        for c in books.by_transaction[change.txid]
        if c.book == "dead_letters" and c.verb == verb and id_of(c.row) == id_of(change.row)
    ]


def code_of(record: Mapping[str, Any]) -> str | None:
    """The code of a record's error."""
    return json.loads(record["error"])["code"] if record["error"] else None


def in_state(effects: Mapping[str, Any], state: str) -> list[str]:
    """The names of the effects that are in a state, without the steps."""
    return [name for name, effect in effects.items() if effect["kind"] == "effect" and effect["state"] == state]


def cause_of(record: Mapping[str, Any]) -> str | None:
    """What ended an operation beside its effects: the code under which a person's word ends it."""
    cause: dict[str, str] = json.loads(record["error"]).get("cause", {})
    return cause.get("code")


def becomes(change: Change, status: str) -> bool:
    before = change.old["status"] if change.old is not None else None
    return change.new is not None and change.new["status"] == status and before != status


def surplus_rows(books: Books) -> Iterator[tuple[Id, tuple[str, int], int]]:
    for id in books.accepted:
        rows, undone = rows_of(books, id, "entries"), rows_of(books, id, "reversals")
        wanted = books.accepted[id].rows
        for each, found in rows.items():
            allowed = 1 if wanted is None else max(Counter(wanted)[each], 1)
            if found - undone[each] > allowed:
                yield id, each, found - undone[each]


def rows_of(books: Books, id: Id, book: str) -> Counter[tuple[str, int]]:
    """The accounts and amounts that an operation has written into a book."""
    return Counter((c.row["account"], c.row["amount"]) for c in books.written_by(id) if c.book == book)


def whereabouts(books: Books) -> tuple[Counter[str], list[Id]]:
    """Where every accepted operation is, and those that are nowhere."""
    found: Counter[str] = Counter()
    nowhere: list[Id] = []
    letters = books.open_letters()
    owed = {id_of(row) for row in books.rows_left() if row["settled_at"] is None}
    for id, accepted in books.accepted.items():
        ended = books.ended(id)
        if ended == "completed":
            found["completed"] += 1
        elif ended == "failed":
            found["failed" if books.code(id) == accepted.failure else "dead"] += 1
        elif books.status(id) is not None or id in owed:
            found["queued"] += 1
        elif id in letters or any(letter["status"] == "discarded" for letter in books.letters_of(id)):
            found["dead"] += 1
        else:
            nowhere.append(id)
    # what was only sent, and not begun yet, is a message in some queue: it cannot be told which; once all had its time, it is lost
    in_queues = 0 if books.evidence.drained else min(len(nowhere), sum(books.evidence.queues.values()))
    found["queued"] += in_queues
    return found, nowhere[in_queues:]


def process_of(locked_by: str | None) -> str | None:
    """How the process of a holder (host, boot, namespace, pid, start) signs its lines."""
    parts = (locked_by or "").split("|")
    return f"pid {parts[3]}" if len(parts) == 5 else None


def sha256(value: str) -> str:
    """How the ledger keeps a long text."""
    return hashlib.sha256(value.encode()).hexdigest()


def id_of(row: Mapping[str, Any]) -> Id:
    return Id(row["tenant"], row["task"], row["key"])


def name_of(id: Id) -> str:
    return "/".join(f"{part}" for part in id)


def time_of(value: str | None) -> datetime:
    return datetime.min.replace(tzinfo=UTC) if value is None else datetime.fromisoformat(value)
