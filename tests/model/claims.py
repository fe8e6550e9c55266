"""How operations are accepted and claimed, by one attempt after another."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis.stateful import precondition, rule

from idempotency.attempt.liveness import process_identity
from idempotency.store import claims, outbox
from idempotency.store import letters as stored_letters
from idempotency.store.answers import Busy, Claimed, Completed, Failed, Mismatch, error_text
from idempotency.wire.keys import OperationId
from tests.model.choices import ELSEWHERE, LATER, LEASE, fingerprint, nth, some_amount, some_id, some_statement, which
from tests.model.expected import Holder, Letter, Record, Row
from tests.model.holders import Holders
from tests.support.operations import claim


class Claims(Holders):
    """Acceptance and claims."""

    @rule(id=some_id, amount=some_amount, later=st.sampled_from([False, False, True]), sent=st.booleans())
    def enqueue(self, id: OperationId, amount: int, later: bool, sent: bool) -> None:
        with self.transaction() as connection:
            outbox.insert(
                connection,
                id,
                fingerprint(id, amount),
                self.message(id, amount),
                service=self.runtime.settings.service,
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
        """The usual life of an operation, as far as it gets: accepted, published, claimed, completed, and perhaps forgotten."""
        for amount in amounts:
            self.enqueue(id, amount, later=False, sent=sent)
        self.claim(id, amounts[0], dies=False)
        if self.holders:
            self._complete(self.holders[-1], "1")
        if purged:
            self.check()
            self.purge(late=True)

    @precondition(lambda self: any(record.status in ("started", "released") for record in self.records.values()))
    @rule(id=some_id, amount=some_amount, then=st.sampled_from(["claim", "duplicate", None]))
    def its_time_comes(self, id: OperationId, amount: int, then: str | None) -> None:
        """A lease is over, a delay is over; and perhaps another delivery comes."""
        self._age(id)
        if then == "claim":
            self.claim(id, amount, dies=False)
        elif then == "duplicate":
            self.count_duplicate(id, amount)

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
                assert isinstance(answer, Completed)
                assert answer.result == record.result
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
        stored_letters.store_refusal(
            self.connection,
            self.delivery(id, amount),
            generation=generation,
            reason="fingerprint_mismatch",
            error=error_text("fingerprint_mismatch", "other arguments"),
            service=self.runtime.settings.service,
        )
        self._store(Letter(id, fingerprint(id, amount), "fingerprint_mismatch", "operation", generation))

    @rule(id=some_id, amount=some_amount)
    def count_duplicate(self, id: OperationId, amount: int) -> None:
        record = self.records.get(id)
        counts = record is not None and record.fingerprint == fingerprint(id, amount) and record.is_busy
        counted, token = claims.count_duplicate(
            self.connection, id, fingerprint(id, amount), service=self.runtime.settings.service
        )
        assert counted == counts
        if record is not None and counts:
            record.duplicates += 1
            assert token == record.token


def provably_dead() -> str:
    """This host, boot and namespace, and a process that has ended."""
    *where, _, _ = process_identity().split("|")
    return "|".join([*where, "4194999", "1"])
