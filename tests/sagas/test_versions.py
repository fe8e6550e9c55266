"""`saga.version` while old and new workers run at once, in both orders, and when the old path is removed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from idempotency.observe import crash_points
from idempotency.sagas import saga
from tests.sagas.application import enter
from tests.sagas.conftest import Stage

HOUR = 3600.0


class Deploy:
    """A saga whose next delivery is run by old code, by new code, or by code without the old path."""

    def __init__(self, stage: Stage, *, differs_at_once: bool) -> None:
        self.stage, self.code = stage, "old"

        @saga("deployed", key="{id}", app=stage.app)
        def deployed(saga: Any, id: str) -> Any:
            is_new = self.code == "removed" or (self.code == "new" and saga.version("later"))
            if self.code == "removed":
                saga.version("later")
            if is_new and differs_at_once:
                saga.step("new", enter, "new")
            saga.step("same", enter, "same")
            saga.sleep(HOUR)
            if is_new and not differs_at_once:
                saga.step("new", enter, "new")
            saga.step("end", enter, "end")
            return is_new

        self.handle = stage.enqueue(deployed, "r1")

    def run(self, code: str, seconds: float = HOUR + 1) -> None:
        """Let time pass, and this code run."""
        self.code = code
        self.stage.pass_time(seconds)
        self.stage.run()


@pytest.fixture
def dies() -> Iterator[list[str]]:
    """The crash points at which a process dies, once at each."""
    points: list[str] = []

    def die(point: str) -> None:
        if point in points:
            points.remove(point)
            raise SystemExit

    crash_points.install(die)
    yield points
    crash_points.install(None)


@pytest.mark.long
@pytest.mark.parametrize("differs_at_once", [True, False])
def test_an_old_worker_does_not_go_past_what_a_new_one_was_asked(stage: Stage, differs_at_once: bool) -> None:
    deploy = Deploy(stage, differs_at_once=differs_at_once)
    deploy.run("new", 0.0)
    before = stage.steps("r1")
    deploy.run("old")
    deploy.run("old")
    assert (stage.steps("r1"), deploy.handle.status()) == (before, "released")
    assert stage.letters() == [("deployed", "saga_mismatch", "open")]
    deploy.run("new")
    assert (deploy.handle.result(), sorted(stage.accounts())) == (True, ["end", "new", "same"])
    assert stage.letters() == [("deployed", "saga_mismatch", "replayed")]


@pytest.mark.long
@pytest.mark.parametrize("differs_at_once", [True, False])
def test_an_old_worker_after_a_new_one_that_died_at_the_version(
    stage: Stage, dies: list[str], differs_at_once: bool
) -> None:
    deploy = Deploy(stage, differs_at_once=differs_at_once)
    dies.append("step.recorded")  # before the commit of the first step, after that of the version
    with contextlib.suppress(SystemExit):
        deploy.run("new", 0.0)
    assert (dies, [kind for kind, _, _ in stage.steps("r1")]) == ([], ["version"])
    deploy.run("old")
    assert (len(stage.steps("r1")), stage.accounts()) == (1, [])
    for _ in range(2):
        deploy.run("new")
    assert (deploy.handle.result(), sorted(stage.accounts())) == (True, ["end", "new", "same"])


def test_a_new_worker_after_an_old_one_stays_on_the_old_path(stage: Stage) -> None:
    deploy = Deploy(stage, differs_at_once=False)
    deploy.run("old", 0.0)
    deploy.run("new", 0.0)  # nothing is due
    deploy.run("new")
    assert (deploy.handle.result(), stage.accounts()) == (False, ["same", "end"])


def test_code_without_the_old_path_goes_on_if_it_still_asks(stage: Stage) -> None:
    deploy = Deploy(stage, differs_at_once=True)
    deploy.run("new", 0.0)
    deploy.run("removed")
    assert (deploy.handle.result(), stage.accounts()) == (True, ["new", "same", "end"])


def test_versions_at_one_place_may_be_asked_for_in_another_order(stage: Stage) -> None:
    order = ["a", "b"]

    @saga("asking", key="{id}", app=stage.app)
    def asking(saga: Any, id: str) -> Any:
        answers = {name: saga.version(name) for name in order}
        saga.sleep(HOUR)
        return answers

    handle = stage.enqueue(asking, "r1")
    stage.run()
    order[:] = ["c", "b", "a"]
    stage.pass_time(HOUR + 1)
    stage.run()
    assert handle.result() == {"a": True, "b": True, "c": False}


@pytest.mark.parametrize("how", ["enqueue", "apply"])
def test_another_key_template_does_not_begin_a_waiting_saga_anew(stage: Stage, how: str) -> None:
    def define(key: str) -> Any:
        stage.app.tasks.pop("keyed", None)

        @saga("keyed", key=key, app=stage.app)
        def keyed(saga: Any, id: str) -> Any:
            saga.step("one", enter, f"one:{id}")
            saga.sleep(60.0)

        return keyed

    task = define("{id}")
    if how == "enqueue":
        stage.enqueue(task, "r1")
        stage.run()
    else:
        stage._deliveries.deliver(task, "r1")
    define("v2-{id}")
    stage.pass_time(61.0)
    stage.run()
    assert stage.accounts() == ["one:r1"]
