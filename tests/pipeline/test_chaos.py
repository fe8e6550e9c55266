"""A minute in which everything goes wrong, at random but repeatably: nothing is lost and nothing happens twice."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import services

# Any would do; a fixed one makes the same plan of faults each time.
SEED = 7
# A minute of faults, the start of the servers, and what a busy machine needs until all has ended.
SECONDS, LIMIT = 60, 890


@pytest.mark.long
@pytest.mark.timeout(2 * LIMIT + 10)
def test_what_an_asynchronous_standby_loses_is_reported_as_lost(servers: services.Services) -> None:
    """The control of `--cluster`: the same promotions, and a checker that has to notice."""
    if servers.broker != "rabbitmq":
        pytest.skip("needs RabbitMQ nodes of our own")
    options = ["--cluster", "--asynchronous", "--only", "promote_standby", "--seconds", "30", "--workers", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", *options, "--seed", str(SEED)],
        capture_output=True,
        text=True,
        timeout=2 * LIMIT,
    )
    assert done.returncode == 1, done.stdout[-8000:] + done.stderr[-2000:]
    assert "its COMMIT was answered, and its row is not there" in done.stdout
    last = done.stdout.splitlines()[-1]
    assert " cluster=1 " in last
    assert " lost=0 " not in last


@pytest.mark.long
@pytest.mark.timeout(LIMIT + 10)
def test_a_minute_of_chaos_loses_nothing_and_doubles_nothing(servers: services.Services) -> None:
    if servers.broker != "rabbitmq":
        pytest.skip("needs a RabbitMQ of our own to freeze and to wipe")
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--seconds", str(SECONDS), "--seed", str(SEED)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(
        rf"RESULT seed={SEED} seconds={SECONDS} faults=\d+ kinds=\d+ accepted=\d+ completed=\d+ failed=\d+ dead=\d+ "
        r"duplicated=\d+ takeovers=\d+ fenced=\d+ lost=0 doubled=0 violations=0",
        last,
    )
    numbers = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", last)}
    assert numbers["accepted"] == numbers["completed"] + numbers["failed"] + numbers["dead"]
    assert numbers["faults"] >= 20
    assert min(numbers["takeovers"], numbers["fenced"]) >= 1
