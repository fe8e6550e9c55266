"""One round of kills or takeovers in each branch, drawn by a seed; and that the comparison sees what it is for."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

from idempotency import StillUnknown
from tests.orders.outside import Provider
from tests.saga_crashes.run import FLOWS, kills_of, opened, rounds_of, strike, undisturbed
from tests.saga_crashes.shop import KILL, StruckReturns
from tests.search.server import databases

SEED = int(os.environ.get("SEED", "1"))


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StruckReturns]:
    with databases() as (url,), opened(url, tmp_path_factory.mktemp("carrier")) as shop:
        yield shop


# `make saga-crashes` strikes all of them at every point.
BRANCHES = [(flow, branch) for flow in FLOWS for branch in FLOWS[flow].branches]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("flow", "branch"),
    [pytest.param(*each, marks=[pytest.mark.long] * (number % 9 > 0)) for number, each in enumerate(BRANCHES)],
)
def test_a_branch_comes_to_its_end_whoever_dies(shop: StruckReturns, flow: str, branch: str) -> None:
    clean = undisturbed(shop, FLOWS[flow], branch, times=1)
    assert clean.wrong == []
    rounds = rounds_of(kills_of(branch, clean.passed))
    chosen = random.Random(f"{SEED} {branch}").choice(rounds)
    struck = strike(shop, FLOWS[flow], chosen, clean)
    assert struck.wrong == [], [str(kill) for kill in chosen]
    assert len(struck.missed) < len(chosen)


@pytest.mark.long
def test_a_provider_that_acts_twice_is_seen(shop: StruckReturns, monkeypatch: pytest.MonkeyPatch) -> None:
    flow = FLOWS["orders"]
    clean = undisturbed(shop, flow, "processed", times=1)
    kill = next(
        kill
        for kill in kills_of("processed", clean.passed)
        if (kill.delivery, kill.point, kill.action) == ("payments.capture_payment:1", "effect.called", KILL)
    )
    assert strike(shop, flow, [kill], clean).wrong == []

    def forgets(provider: Provider, doubt: Any) -> StillUnknown:
        provider._done.pop(doubt.idempotency_key)
        return StillUnknown()

    monkeypatch.setattr(Provider, "_find", forgets)
    wrong = strike(shop, flow, [kill], clean).wrong
    assert any(each.startswith("charges: undisturbed [1000], now [1000, 1000]") for each in wrong), wrong
