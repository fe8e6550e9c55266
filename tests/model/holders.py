"""What holders do, also former ones."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis.stateful import precondition, rule
from sqlalchemy import text

from idempotency.store import claims as claiming
from idempotency.store import effects, ends
from idempotency.store import letters as stored_letters
from idempotency.store.answers import Claimed, Renewal, error_text
from idempotency.store.ends import FailedEnd
from idempotency.wire.keys import OperationId
from tests.model.choices import LATER, LEASE, RETENTION, account, nth, some_name, which
from tests.model.expected import Holder, Letter, Row
from tests.model.upkeep import Upkeep
from tests.support.bank import INSERT


class Holders(Upkeep):
    """What holders do, also former ones."""

    @precondition(lambda self: self.holders)
    @rule(chosen=st.lists(which, min_size=1, max_size=3))
    def renew(self, chosen: list[int]) -> None:
        claims = {holder.claim.token: holder.claim for holder in (nth(self.holders, n) for n in chosen)}
        verdicts = claiming.renew(self.connection, list(claims.values()), LEASE)
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
        begun_at = effects.begin_effect(self.connection, held, name, entry)
        if record is not None and record.effects.get(name) in (None, "not_happened"):
            assert begun_at is not None
            record.effects[name] = "begun"
        else:
            assert begun_at is None

    def _change_effect(self, held: Claimed, name: str, change: dict[str, str]) -> None:
        record = self._held(held)
        open_ = record is not None and record.effects.get(name) == "begun"
        assert effects.change_effect(self.connection, held, name, change) == open_
        if record is not None and open_:
            record.effects[name] = change["state"]
            # what is recorded stays
            assert not effects.change_effect(self.connection, held, name, {"state": "done", "result": "2"})

    def _step(self, held: Claimed, name: str) -> None:
        record = self._held(held)
        entry = {"kind": "step", "state": "done", "args": "v1:a", "position": 1, "undo": None, "result": "1"}
        matches = record is not None and name not in record.effects
        with self.finishing(matches) as connection:
            connection.execute(INSERT, {"account": account(held.id), "amount": 1})
            effects.record_step(connection, held, name, entry, lease=LEASE)
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
            ends.complete(connection, held, result, retention=RETENTION, lease=LEASE)
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
        error = error_text(code, "no")
        with self.finishing(record is not None) as connection:
            connection.execute(FAILURE, {"account": held.id.key, "code": code})
            delivery = self.delivery(held.id, holder.amount)
            service = self.runtime.settings.service
            stored_letters.store_failure(connection, delivery, held, reason=code, last_error=error, service=service)
            ends.fail(connection, held, FailedEnd(code, error), retention=RETENTION, lease=LEASE)
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
        error = None if give_back else error_text("flaky", "no")
        delay = 0.0 if due else LATER
        released = ends.release(self.connection, held, delay=delay, error=error, give_back=give_back)
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


FAILURE = text("INSERT INTO failures (account, code) VALUES (:account, :code)")
