"""The plan of a chaos run: the same seed, the same faults."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest

from tests.chaos import cluster_faults
from tests.chaos.attacks import ATTACKS
from tests.chaos.faults import FAULTS
from tests.chaos.plan import AT_LEAST, LANE_SECONDS, LEAD_IN, WEIGHTS, plan
from tests.chaos.report import LONG
from tests.chaos.run import Options


def test_the_same_seed_and_length_give_the_same_plan() -> None:
    assert plan(7, 60) == plan(7, 60)


def test_the_same_seed_gives_the_same_plan_in_another_process() -> None:
    script = "from tests.chaos.plan import plan; print(plan(7, 60))"
    # with another hash seed: an iteration over a set would show
    printed = subprocess.run(
        [sys.executable, "-c", script], env={"PYTHONHASHSEED": "1"}, check=True, capture_output=True, text=True
    ).stdout
    assert printed.strip() == repr(plan(7, 60))


def test_another_seed_or_another_length_gives_another_plan() -> None:
    assert len({tuple(plan(seed, 60)) for seed in range(20)}) == 20
    assert plan(7, 60) != plan(7, 61)


@pytest.mark.parametrize("seconds", [10, 60, 600])
def test_every_kind_is_in_every_plan(seconds: int) -> None:
    for seed in range(50):
        counts = Counter(fault.kind for fault in plan(seed, seconds))
        assert counts.keys() == WEIGHTS.keys()
        assert all(counts[kind] >= least for kind, least in AT_LEAST.items())


def test_every_kind_of_a_cluster_is_in_a_plan_and_can_be_done() -> None:
    kinds = Options(60, 7, is_cluster=True).kinds
    assert Counter(fault.kind for fault in plan(7, 60, weights=kinds)).keys() == kinds.keys()
    # one kind of those without a cluster is done in another way
    assert set(cluster_faults.WEIGHTS) == set(cluster_faults.FAULTS) - {"wipe_broker"} == set(kinds) - set(WEIGHTS)
    assert set(kinds) <= {*FAULTS, *ATTACKS, *cluster_faults.FAULTS}


@pytest.mark.parametrize("seconds", [120, 300])
def test_faults_of_the_same_servers_leave_each_other_time(seconds: int) -> None:
    options = Options(seconds, 7, is_cluster=True)
    for seed in range(20):
        faults = plan(seed, seconds, (), options.kinds, options.lanes)
        assert {fault.kind for fault in faults} == set(options.kinds)
        for lane in options.lanes:
            seconds_of_lane = [fault.second for fault in faults if fault.kind in lane]
            assert len(seconds_of_lane) == max(len(lane), seconds // LANE_SECONDS)
            pauses = [later - former for former, later in pairwise(seconds_of_lane)]
            assert min(pauses) > 0.4 * (seconds - LANE_SECONDS / 2) / len(seconds_of_lane)
            assert max(seconds_of_lane) < seconds - LANE_SECONDS / 2


def test_only_a_long_run_of_all_kinds_goes_on_until_all_has_happened() -> None:
    assert Options(LONG, 7).overtime > 0
    assert Options(LONG - 1, 7).overtime == Options(LONG, 7, only=("kill_beat",)).overtime == 0


def test_faults_come_in_their_order_within_the_run() -> None:
    for seed in range(50):
        faults = plan(seed, 60)
        assert faults == sorted(faults)
        assert faults[0].second >= LEAD_IN
        assert faults[-1].second < 60


def test_a_plan_may_be_of_some_kinds_only() -> None:
    assert {fault.kind for fault in plan(7, 60, ["cut_commit", "kill_beat"])} == {"cut_commit", "kill_beat"}


def test_a_whole_number_of_seconds_is_the_same_length_either_way() -> None:
    assert plan(7, 60) == plan(7, 60.0)


def test_a_kind_comes_as_often_as_its_weight_says() -> None:
    counts = Counter(fault.kind for fault in plan(1, 20_000))
    assert counts["cut_commit"] / counts["slow_postgres"] == pytest.approx(4, rel=0.3)
