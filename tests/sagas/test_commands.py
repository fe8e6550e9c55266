"""`idempotency saga …`, on a real database: what it shows, what it says, and with which exit status."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from idempotency import EffectUnknown, PermanentError
from idempotency.application import runtime_of
from idempotency.sagas import call, observe, saga
from tests.sagas.application import enter, entering
from tests.sagas.conftest import Stage
from tests.support.commands import Run, runner


@pytest.fixture
def run(stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(monkeypatch, capsys)


@pytest.fixture
def returning(stage: Stage) -> Any:
    """A saga with one of everything: it is undone if the thing that it makes last is `bad`."""
    make, void = entering(stage, "shop.make"), entering(stage, "shop.void")
    make.refuses.add("bad")

    def charge(thing: str, *, idempotency_key: str) -> str:
        if thing == "doubt":
            raise EffectUnknown("no answer")
        return f"secret of {thing}"

    @saga("shop.take_back", key="{id}", entity="id", events={"picked": "{id}"}, max_attempts=1, app=stage.app)
    def returning(saga: Any, id: str, last: str = "good") -> Any:
        saga.version("second")
        saga.now()
        saga.step("open", enter, f"open:{id}")
        saga.effect("charge", charge, thing=last, undo=void)
        saga.gather(call(make, "x", undo=void), call(make, "y"))
        saga.sleep(timedelta(hours=1))
        event = saga.wait_for("picked", match=id, timeout=timedelta(days=5))
        saga.call(make, last)
        return None if event is None else event["data"]

    returning.make, returning.void = make, void
    return returning


@pytest.fixture
def begun(stage: Stage, returning: Any) -> Callable[..., None]:
    """Enqueue such a saga and let its hour of sleep pass."""

    def begin(key: str, last: str = "good") -> None:
        stage.enqueue(returning, key, last=last)
        stage.run()
        stage.pass_time(3601.0)
        stage.run()

    return begin


# ---------------------------------------------------------------- list


def test_the_list_says_what_each_saga_waits_for_and_why_it_has_stopped(
    stage: Stage, run: Run, returning: Any, begun: Any
) -> None:
    begun("r1")
    begun("r2", "doubt")
    returning.void.refuses.add("bad")
    begun("r3", "bad")
    stage.publish("picked", {"id": "r3"})
    stage.run()
    rows = run("saga", "list", "--json").document
    assert [(row["key"], row["status"], row["stopped"]) for row in rows] == [
        ("r3", "COMPENSATING", "compensation_failed"),
        ("r2", "COMPENSATING", "effect_unknown"),
        ("r1", "RUNNING", None),
    ]
    assert (rows[2]["waits"][0]["name"], rows[2]["entity_id"]) == ("picked", "r1")
    assert rows[0]["why"]["message"] == "the undo of effect 'charge' has failed: shop.void refuses bad"
    assert rows[0]["error"]["code"] == "no_shop.make"
    people = run("saga", "list")
    assert people.status == 0
    for said in ("picked id=r1 until 20", "effect_unknown: effect 'charge': begun", "effect charge", "no_shop.make"):
        assert said in people.out


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("options", "keys"),
    [
        (["--status", "running"], ["r2", "r1"]),
        (["--status", "FAILED"], []),
        (["--type", "take_back", "--limit", 1], ["r2"]),
        (["--type", "shop.make"], []),
        (["--waits-for", "picked"], ["r1"]),
        (["--waits-for", "sleep"], ["r2"]),
        (["--stopped"], []),
        (["--older-than", 3000], []),
        (["--tenant", "default"], ["r2", "r1"]),
        (["--tenant", "other"], []),
        (["--service", "other"], []),
    ],
)
def test_the_list_is_of_the_sagas_that_are_asked_for(
    stage: Stage, run: Run, returning: Any, begun: Any, options: list[Any], keys: list[str]
) -> None:
    begun("r1")
    stage.enqueue(returning, "r2")
    stage.run()
    assert [row["key"] for row in run("saga", "list", *options, "--json").document] == keys


def test_a_type_that_does_not_exist_is_said_to(stage: Stage, run: Run) -> None:
    answer = run("saga", "list", "--type", "nothing")
    assert (answer.status, "the application has no such task" in answer.error) == (1, True)


def test_what_an_observer_has_noted_is_listed_and_shown(stage: Stage, run: Run) -> None:
    with runtime_of(stage.app).engine.begin() as connection:
        observe(connection, "order_placement", "o1", "paid", {"amount": 1}, status="COMPLETED", app=stage.app)
    (row,) = run("saga", "list", "--json").document
    assert (row["type"], row["key"], row["status"], row["waits"]) == ("order_placement", "o1", "COMPLETED", [])
    answer = run("saga", "show", "o1")
    assert (answer.status, "seen: paid" in answer.out, "not an operation" in answer.out) == (0, True, True)


# ---------------------------------------------------------------- show


@pytest.mark.long
def test_the_timeline_has_everything_in_order(stage: Stage, run: Run, returning: Any, begun: Any) -> None:
    returning.void.refuses.add("bad")
    begun("r1", "bad")
    for _ in range(2):
        stage.publish("picked", {"id": "r1"})
    stage.run()
    stage.publish("picked", {"id": "r1"})
    returning.void.refuses.clear()
    assert run("saga", "retry", "r1", "--as", "ann").status == 0
    stage.run()
    answer = run("saga", "show", "r1")
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in answer.out.splitlines() if "│" in line]
    what = [f"{row[1]}: {row[2]}" for row in cells]
    expected = [
        *("begun: ", "version second: done", "value now: done", "step open: done", "effect charge: done"),
        *("call shop.make: done", "call shop.make#2: done", "sleep: done", "wait for picked: done"),
        *(
            "event picked: used",
            "event picked: unused",
            "event picked: late, unused",
            "call shop.make#3: failed",
        ),
        *("undo shop.make: done", "undo charge: done", "ann: replay: ", "ann: saga_retry: ", "ended: failed"),
    ]
    assert sorted(each for each in what if "dead letter" not in each) == sorted(expected)
    assert what[0] == "begun: "
    assert what.index("undo charge: done") > what.index("undo shop.make: done")
    assert (
        sorted(each.partition(": ")[2] for each in what if "dead letter" in each)
        == ["discarded", "open"] + ["replayed"] * 2
    )
    assert "undone because of no_shop.make: shop.make refuses bad" in answer.out
    assert re.search(r"shop.void \S+/r1/undo charge: completed, 1 attempt", answer.out)


@pytest.mark.long
def test_results_and_data_are_shown_only_on_request(stage: Stage, run: Run, begun: Any) -> None:
    begun("r1")
    stage.publish("picked", {"id": "r1", "door": "the back door"})
    stage.run()
    for options in ([], ["--json"], ["--mermaid"]):
        answer = run("saga", "show", "r1", *options)
        assert (answer.status, "secret of" in answer.out, "back door" in answer.out) == (0, False, False), options
    document = run("saga", "show", "r1", "--json", "--with-payload").document
    results = {step["name"]: step["result"] for step in document["steps"]}
    assert (results["charge"], document["events"][0]["data"]["door"]) == ('"secret of good"', "the back door")
    assert "secret of good" in run("saga", "show", "r1", "--with-payload").out


@pytest.mark.long
def test_the_timeline_is_drawn_as_a_sequence_diagram(stage: Stage, run: Run, begun: Any) -> None:
    begun('r"1; end', "bad")
    stage.publish("picked", {"id": 'r"1; end'})
    stage.run()
    lines = run("saga", "show", 'r"1; end', "--mermaid").out.splitlines()
    assert lines[:2] == ["sequenceDiagram", "    participant S as shop.take_back r#34;1#59; end"]
    assert "    participant E as events" in lines
    drawn = [line.strip() for line in lines[2:] if "participant" not in line]
    for line in (
        *("S->>S: step open done", "S->>T1: call shop.make", "T1-->>S: done", "Note over S: wait for picked done"),
        *("E-->>S: picked used", "T1--xS: failed", "S->>T2: undo charge"),
    ):
        assert line in drawn, line
    grammar = re.compile(r"(Note over S|(S|T\d|E)(->>|-->>|--x)(S|T\d)): [^;:\"]*(#\d+;[^;:\"]*)*")
    assert [line for line in drawn if not grammar.fullmatch(line)] == []


def test_what_was_refused_is_shown_with_its_reason(stage: Stage, run: Run) -> None:
    def refuse(session: Any) -> None:
        raise PermanentError("nothing is left", "out_of_stock")

    @saga("refused", key="{id}", app=stage.app)
    def refused(saga: Any, id: str) -> str:
        try:
            saga.step("reserve", refuse)
        except PermanentError:
            return "none"
        return "one"

    stage.enqueue(refused, "r1")
    stage.run()
    answer = run("saga", "show", "r1")
    assert re.search(r"step reserve │ failed .*out_of_stock: nothing is left", answer.out)


def test_a_saga_that_has_not_begun_is_shown_as_accepted(stage: Stage, run: Run, returning: Any) -> None:
    stage.enqueue(returning, "r1")
    assert "accepted: it has not begun" in run("saga", "show", "r1").out
    assert "accepted" in run("saga", "show", "r1", "--mermaid").out
    assert run("saga", "show", "r1", "--json").document["saga"] is None


@pytest.mark.long
def test_the_page_of_an_operation_names_its_timeline(stage: Stage, run: Run, begun: Any) -> None:
    begun("r1")
    assert "a saga; its timeline: idempotency saga show r1" in run("show", "r1").out
    assert run("show", "r1", "--json").document["is_saga"]
    assert "entity r1, RUNNING, waits for picked id=r1 until" in run("saga", "show", "r1").out


@pytest.mark.long
def test_a_key_of_several_sagas_or_of_none_is_refused(stage: Stage, run: Run, returning: Any, begun: Any) -> None:
    begun("r1")

    @saga("other", key="{id}", app=stage.app)
    def other(saga: Any, id: str) -> None:
        saga.sleep(1.0)

    stage.enqueue(other, "r1")
    stage.enqueue(returning.make, "x", idempotency_key="plain")
    stage.run()
    answer = run("saga", "show", "r1")
    choices = "2 sagas have it, choose one: --type other --tenant default; --type shop.take_back --tenant default"
    assert (answer.status, choices in answer.error) == (1, True)
    assert run("saga", "show", "r1", "--type", "take_back").status == 0
    for key, why in (("plain", "shop.make plain: is not a saga"), ("nothing", "no operation has it")):
        answer = run("saga", "show", key)
        assert (answer.status, why in answer.error, answer.out) == (1, True, "")


# ---------------------------------------------------------------- changes


@pytest.mark.long
def test_each_change_says_what_it_did(
    stage: Stage, run: Run, returning: Any, begun: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun("r1")
    monkeypatch.setattr(sys, "stdin", io.StringIO('{"n": 1}'))
    why = ("--reason", "they rang", "--as", "ann")
    answer = run("saga", "signal", "r1", "picked", "--data", "-", *why)
    assert (answer.status, answer.out) == (0, "signalled: shop.take_back r1: it goes on\n")
    stage.run()
    assert "signalled by ann" in run("saga", "show", "r1").out
    assert stage.saga("r1").status == "COMPLETED"
    begun("r2")
    given = run("saga", "signal", "r2", "picked", "--match", "later", *why, "--json").document
    assert (given["change"], given["match"], given["is_awaited"]) == ("signalled", "id=later", False)
    assert re.search(r"event picked +│ unused .*match id=later", run("saga", "show", "r2").out)
    answer = run("saga", "cancel", "r2", *why)
    assert (answer.status, answer.out) == (0, "cancelled: shop.take_back r2: it is undone from now on\n")
    answer = run("saga", "cancel", "r2", *why)
    assert (answer.status, "is being undone already, because of cancelled" in answer.error) == (1, True)


def test_a_stopped_saga_is_retried_or_undone_by_hand(stage: Stage, run: Run, returning: Any, begun: Any) -> None:
    returning.void.refuses.add("bad")
    for key in ("r1", "r2"):
        begun(key, "bad")
        stage.publish("picked", {"id": key})
        stage.run()
    assert run("saga", "retry", "r1").out == "retried: shop.take_back r1: it goes on after: undo charge\n"
    stage.run()
    answer = run("saga", "retry", "r2", "--undone", "charge", "--reason", "paid back in cash")
    assert answer.out == "undone by hand: shop.take_back r2: charge; it goes on\n"
    stage.run()
    assert (stage.saga("r1").status, stage.saga("r2").status) == ("COMPENSATING", "FAILED")
    assert "by hand" in run("saga", "show", "r2").out
    refused = run("saga", "retry", "r2")
    assert (refused.status, "is FAILED and has not stopped" in refused.error) == (1, True)


@pytest.mark.long
@pytest.mark.parametrize(("word", "undone"), [("--happened", 1), ("--not-happened", 0)])
def test_the_command_for_effects_resolves_those_of_a_saga(
    stage: Stage, run: Run, begun: Any, word: str, undone: int
) -> None:
    begun("r1", "doubt")
    said = [word, '"ch_1"'] if word == "--happened" else [word]
    ended = run("effects", "resolve", "r1", "charge", *said, "--end", "--reason", "asked", "--task", "take_back")
    assert (ended.status, "--end: a saga that is being undone ends by itself" in ended.error) == (1, True)
    answer = run("effects", "resolve", "r1", "charge", *said, "--reason", "asked", "--task", "take_back")
    assert (answer.status, answer.out) == (0, "resolved: shop.take_back r1 charge; the saga goes on\n")
    stage.run()
    assert stage.saga("r1").status == "FAILED"
    assert stage.accounts().count("shop.void:doubt") == undone


def test_data_that_are_not_json_are_a_wrong_command_line(stage: Stage, run: Run, begun: Any) -> None:
    begun("r1")
    answer = run("saga", "signal", "r1", "picked", "--data", "{", "--reason", "they rang")
    assert (answer.status, "--data: must be JSON" in answer.error) == (2, True)
