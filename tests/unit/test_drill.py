"""The drill's responder: what it reads on a page and in answers, and nothing else."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from drill import incidents, responder
from drill.receiver import Received, Receiver
from drill.responder import Responder, _found, _is_closed
from drill.runbook import commands

PAGE = """# `broken`: a page

## Commands

    echo '{"key": "k 1", "task": "shop.pay"}' DEAD_LETTER    # a comment
    echo KEY TASK
    sh -c 'echo $IDEMPOTENCY_TOKEN'    # another person
    sleep 60 &    # in production: by what starts it
    echo EFFECT

## Over when

    echo never
"""


def test_a_page_is_read_as_a_person_reads_it() -> None:
    first, second, third, fourth, _ = commands(PAGE)
    assert (first.placeholders, first.comment) == (["DEAD_LETTER"], "a comment")
    assert second.filled({"KEY": "k", "TASK": "t"}) == "echo k t"
    assert (third.by_another, third.in_background) == (True, False)
    assert (fourth.by_another, fourth.in_background) == (False, True)
    assert len(commands(PAGE)) == 5


def test_commands_are_filled_with_the_alert_and_with_earlier_answers(tmp_path: Path) -> None:
    (tmp_path / "broken.md").write_text(PAGE.replace("    echo '{", "    printf '%s' '{").replace("' DEAD_LETTER", "'"))
    said: list[str] = []
    answering = Responder(
        {"CELERY_APP": "shop", "IDEMPOTENCY_TOKEN": "mine"}, "another's", tmp_path / "log", said.append
    )
    try:
        answering.answer(Received((tmp_path / "broken.md").as_uri(), "broken", {"dead_letters": [7]}))
        answering.answer(Received((tmp_path / "broken.md").as_uri(), "broken", {"dead_letters": [7]}))
        # started once, whichever alert asks for it
        assert len(answering.started) == 1
    finally:
        for started in answering.started:
            started.kill()
            started.wait()
    assert "      $ echo 'k 1' shop.pay" in said  # one word of a shell, whatever others have named
    assert "      ? echo EFFECT: no EFFECT" in said
    assert not any("never" in line for line in said)


def test_answers_name_what_later_commands_need() -> None:
    letter = {"key": "p1", "task": "shop.pay", "queue": "shop", "payload": "secret"}
    assert _found(json.dumps(letter)) == {"KEY": "p1", "TASK": "shop.pay", "QUEUE": "shop"}
    shown = {"effects": {"seat": {"state": "done"}, "charge": {"state": "begun", "key": "idem-1"}}}
    assert _found(json.dumps(shown)) == {"EFFECT": "charge", "EFFECT_KEY": "idem-1"}
    assert _found(json.dumps({"outcome": ["--happened", '{"id": "a b"}']})) == {
        "OUTCOME": """--happened '{"id": "a b"}'"""
    }
    assert _found("no JSON") == _found("[1]") == {}


def test_a_letter_that_is_closed_by_now_is_left() -> None:
    assert _is_closed(json.dumps({"id": 7, "status": "replayed"}))
    assert not _is_closed(json.dumps({"id": 7, "status": "open"}))
    assert not _is_closed("no JSON")


def test_the_responder_knows_no_incident() -> None:
    source = Path(responder.__file__).read_text()
    imported = {
        name.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    assert not imported & {"incidents", "application", "system", "INCIDENTS"}
    for incident in incidents.INCIDENTS:
        assert incident.name not in source
        assert incident.name.replace("-", "_") not in source


@pytest.mark.parametrize(
    ("severity", "ends", "taken"), [("critical", "2999", 1), ("none", "2999", 0), ("critical", "1999", 0)]
)
def test_what_prometheus_posts_is_taken_once_unless_it_is_over(severity: str, ends: str, taken: int) -> None:
    receiver = Receiver()
    try:
        alert = {
            "labels": {"alertname": "NoConsumers", "queue": "shop", "severity": severity},
            "annotations": {
                "runbook": "file:///no_consumers.md",
                "summary": "no consumers",
                "command": "idempotency status",
            },
            "startsAt": "2026-01-01T00:00:00Z",
            "endsAt": f"{ends}-01-01T00:00:00Z",
        }
        for _ in range(2):
            receiver.take("/api/v2/alerts", [alert])
        assert receiver.alerts.qsize() == taken
        if taken:
            assert receiver.alerts.get().fields["queue"] == "shop"
    finally:
        receiver.server_close()


def test_the_page_of_the_drill_names_as_many_incidents_as_there_are() -> None:
    names = [incident.name for incident in incidents.INCIDENTS]
    assert len(names) == len(set(names)) == 12
