"""Random programs of claims, renewals, ends, deaths and passing time, each answer compared with an oracle's."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from idempotency.store.answers import Claimed, Completed, Failed, Mismatch, Renewal
from idempotency.stores.store import StoreBusy
from idempotency.wire.keys import OperationId
from tests.stores.promises import STORES, promise
from tests.stores.scene import ERROR, KEEP, LEASE, RETENTION, Scene, new_id

# Not beside those of tests/model: hypothesis names both by the same function.
SEEDS = Path(__file__).parents[1] / "seeds" / "stores"
PROGRAMS = int(os.environ.get("STATE_MACHINE_EXAMPLES", "20"))
# The stand-in for DynamoDB takes about a hundred times as long for an answer as Redis.
SHARE = {"postgres": 2.0, "redis": 2.0, "dynamodb": 0.5}
KEYS = st.integers(0, 1)
FINGERPRINTS = st.sampled_from(["v1:same", "v1:same", "v1:same", "v1:other"])
WHICH = st.integers(0, 3)


@dataclass
class Expected:
    """What the oracle knows of one operation. It shares no code with a store, and has no clock."""

    state: str = "none"
    fingerprint: str = ""
    claims: int = 0  # of this key, ever: the fence of the last has to be the highest
    attempts: int = 0
    holder: int | None = None  # which claim holds it, or held it last
    is_waiting: bool = False  # the lease runs, or it is released and not due
    result: str = ""

    def claim(self, fingerprint: str) -> str:
        if self.state != "none" and self.fingerprint != fingerprint:
            return "mismatch"
        if self.state in ("completed", "failed"):
            return self.state
        return "held" if self.is_waiting else "claimed"

    def is_held_by(self, claim: int) -> bool:
        return self.state == "started" and self.holder == claim


@dataclass
class Made:
    """A claim that was granted once; it may be stale."""

    claim: Claimed
    number: int
    key: int


class Programs(RuleBasedStateMachine):
    scene: Scene

    @initialize()
    def begin(self) -> None:
        self.ids: list[OperationId] = [new_id(), new_id()]
        self.expected = [Expected(), Expected()]
        self.made: list[Made] = []
        self.fences = [0, 0]

    @rule(key=KEYS, fingerprint=FINGERPRINTS, comes_back=st.booleans())
    def claim(self, key: int, fingerprint: str, comes_back: bool) -> None:
        expected, id = self.expected[key], self.ids[key]
        answer = self.scene.claim(id, fingerprint=fingerprint)
        if isinstance(answer, StoreBusy) and answer.seen and (comes_back or not expected.is_waiting):
            # In a store without a clock, who looks once learns no more than that there is a holder. One that lives renews.
            if expected.is_waiting:
                self.renew_holder(expected)
            answer = self.scene.claim(id, fingerprint=fingerprint, seen=answer.seen)
        match expected.claim(fingerprint):
            case "claimed":
                assert isinstance(answer, Claimed), (answer, expected)
                self.granted(key, answer, fingerprint)
            case "held":
                assert isinstance(answer, StoreBusy), (answer, expected)
            case "mismatch":
                assert answer == Mismatch(1)
            case "completed":
                assert answer == Completed(expected.result)
            case "failed":
                assert answer == Failed("no_account", "no such account")

    def granted(self, key: int, answer: Claimed, fingerprint: str) -> None:
        expected = self.expected[key]
        assert answer.fence > self.fences[key], "the fence has not grown"
        assert answer.taken_over is (expected.state == "started")
        expected.attempts = 1 if expected.state == "none" else expected.attempts + 1
        assert answer.attempts == expected.attempts
        self.fences[key], expected.claims = answer.fence, expected.claims + 1
        expected.state, expected.holder, expected.is_waiting = "started", expected.claims, True
        expected.fingerprint = expected.fingerprint if expected.fingerprint else fingerprint
        self.made.append(Made(answer, expected.claims, key))

    def renew_holder(self, expected: Expected) -> None:
        holder = next(
            each for each in self.made if self.expected[each.key] is expected and each.number == expected.holder
        )
        assert set(self.scene.store.renew([holder.claim], lease=LEASE, keep=KEEP).values()) == {Renewal.HELD}

    def one(self, which: int) -> tuple[Made, Expected]:
        """One of the last claims that were granted."""
        made = self.made[-1 - which % len(self.made)]
        return made, self.expected[made.key]

    @precondition(lambda self: self.made)
    @rule(which=WHICH)
    def claim_again(self, which: int) -> None:
        """The answer to a claim was lost: the same token claims again."""
        made, expected = self.one(which)
        if expected.is_held_by(made.number):
            answer = self.scene.claim(made.claim.id, token=made.claim.token, fingerprint=expected.fingerprint)
            assert isinstance(answer, Claimed)
            assert (answer.attempts, answer.taken_over) == (expected.attempts, False)
            assert answer.fence > self.fences[made.key]
            self.fences[made.key], expected.claims = answer.fence, expected.claims + 1
            expected.holder, expected.is_waiting = expected.claims, True
            self.made.append(Made(answer, expected.claims, made.key))

    @precondition(lambda self: self.made)
    @rule(which=WHICH)
    def renew(self, which: int) -> None:
        made, expected = self.one(which)
        is_mine = expected.is_held_by(made.number)
        found = self.scene.store.renew([made.claim], lease=LEASE, keep=KEEP)[made.claim.token]
        assert (found is Renewal.HELD) is is_mine
        expected.is_waiting = expected.is_waiting or is_mine

    @precondition(lambda self: self.made)
    @rule(which=WHICH, result=st.sampled_from(["null", "[1]", '"é"']))
    def complete(self, which: int, result: str) -> None:
        made, expected = self.one(which)
        if expected.state == "completed" and expected.holder == made.number:
            return  # asked for again: another test's
        is_mine = expected.is_held_by(made.number)
        assert self.scene.store.complete(made.claim, result, retention=RETENTION) is is_mine
        if is_mine:
            expected.state, expected.result, expected.is_waiting = "completed", result, False

    @precondition(lambda self: self.made)
    @rule(which=WHICH)
    def fail(self, which: int) -> None:
        made, expected = self.one(which)
        if expected.state == "failed" and expected.holder == made.number:
            return
        is_mine = expected.is_held_by(made.number)
        assert self.scene.store.fail(made.claim, ERROR, retention=RETENTION) is is_mine
        if is_mine:
            expected.state, expected.is_waiting = "failed", False

    @precondition(lambda self: self.made)
    @rule(which=WHICH, later=st.booleans(), give_back=st.booleans())
    def release(self, which: int, later: bool, give_back: bool) -> None:
        made, expected = self.one(which)
        if expected.state == "released" and expected.holder == made.number:
            return
        is_mine = expected.is_held_by(made.number)
        delay = 600.0 if later else 0.0
        assert self.scene.store.release(made.claim, delay=delay, keep=KEEP, give_back=give_back) is is_mine
        if is_mine:
            expected.state, expected.is_waiting = "released", later
            expected.attempts -= give_back

    @precondition(lambda self: any(each.is_waiting for each in self.expected))
    @rule(key=KEYS)
    def time_passes(self, key: int) -> None:
        """The lease runs out, or what was released is due."""
        expected, ageing = self.expected[key], self.scene.ageing
        if expected.state in ("started", "released") and expected.is_waiting:
            (ageing.lease_over if expected.state == "started" else ageing.due)(self.ids[key])
            expected.is_waiting = False

    @precondition(lambda self: any(each.state in ("completed", "failed") for each in self.expected))
    @rule(key=KEYS)
    def is_forgotten(self, key: int) -> None:
        """The retention of what has ended is over."""
        expected = self.expected[key]
        if expected.state in ("completed", "failed"):
            self.scene.ageing.forgotten(self.ids[key])
            self.expected[key] = Expected(claims=expected.claims)

    @precondition(lambda self: any(each.state != "none" for each in self.expected))
    @rule(key=KEYS)
    def is_dropped(self, key: int) -> None:
        expected = self.expected[key]
        if self.scene.name == "postgres":
            return  # not offered
        assert self.scene.store.drop(self.ids[key]) is (expected.state in ("completed", "failed"))
        if expected.state in ("completed", "failed"):
            self.expected[key] = Expected(claims=expected.claims)

    @precondition(lambda self: self.made)
    @rule(key=KEYS)
    def look(self, key: int) -> None:
        expected, stored = self.expected[key], self.scene.store.read(self.ids[key])
        assert (stored is None) is (expected.state == "none")
        if stored is not None:
            assert (stored.state, stored.attempts, stored.fence) == (
                expected.state,
                expected.attempts,
                self.fences[key],
            )


@pytest.fixture
def programs(scene: Scene) -> type[Programs]:
    return type("Programs", (Programs,), {"scene": scene})


@pytest.mark.few(1)
@promise("random programs end as an oracle says")
@pytest.mark.parametrize("scene", STORES, indirect=True)
def test_random_programs_end_as_the_oracle_says(programs: type[Programs]) -> None:
    run_state_machine_as_test(
        programs,
        settings=settings(
            max_examples=int(PROGRAMS * SHARE[programs.scene.name]),
            stateful_step_count=30,
            deadline=None,
            database=DirectoryBasedExampleDatabase(SEEDS),
            suppress_health_check=list(HealthCheck),
        ),
    )
