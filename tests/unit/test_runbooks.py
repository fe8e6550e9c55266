"""Every reason and alarm that the code can produce has a runbook, and what a runbook says to type is a command."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import yaml  # type: ignore[import-untyped]
from celery.bin.celery import celery as celery_command
from pydantic import SecretStr
from typer import BadParameter
from typer.main import get_command

import sandbox.__main__ as sandbox_command
from drill.runbook import DIRECTORY, PLACEHOLDERS, Line, commands, section
from idempotency import errors, reasons
from idempotency.cli.root import cli
from idempotency.reasons import page_of
from idempotency.settings import Settings
from idempotency.store.overview import QueueState, Snapshot
from idempotency.upkeep import alarms
from idempotency.upkeep.started import start_of
from tests.support.documents import ROOT

PAGES = {path.stem: path.read_text() for path in sorted(DIRECTORY.glob("*.md")) if path.stem != "README"}
INDEX = (DIRECTORY / "README.md").read_text()
RULES = (ROOT / "monitoring" / "rules.yml").read_text()
# The example application's own, from the source: importing its configuration needs addresses of servers.
OWN: tuple[str, ...] = next(
    ast.literal_eval(node.value)
    for node in ast.parse((ROOT / "celeryconfig.py").read_text()).body
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "idempotency_own_runbooks"
)
# Typer may bring a click of its own.
UsageError = BadParameter.__mro__[1]
# What ends an operation, and where its code stands among the arguments.
ENDS = {
    kind.__name__: 1
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.PermanentError)
} | {"NotDeclined": 1, "FailedAfterwards": 1, "permanent_error": 1}
# What gives a letter its reason: by place or by name.
LETTERS = {"stop": 1, "Examined": 0, "error_text": 0, "update_error": 2}
BY_NAME = {"store_failure": "reason", "store_refusal": "reason", "insert_for_rows_sql": "reason", "replace": "reason"}


Constants = dict[str, str]


def constants(tree: ast.Module) -> Constants:
    """The texts that a module gives a name at its top."""
    found: Constants = {}
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                pairs = list(zip(names, values, strict=True))
            case ast.Assign(targets=[name], value=value):
                pairs = [(name, value)]
            case _:
                continue
        for name, value in pairs:
            text = next(written(value, found), None)
            if isinstance(name, ast.Name) and text is not None:
                found[name.id] = text[0]
    return found


def codes(source: str, known: Constants) -> Iterator[tuple[str, bool]]:
    """The codes that a module gives to ends and letters, and whether each is only the beginning of one.

    What is computed by another expression is a provider's or a caller's, or is written at another place.
    """
    tree = ast.parse(source)
    # of a variable, all that it is set to anywhere in the module
    variables: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            variables.setdefault(node.targets[0].id, []).append(node.value)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name == "stop" and isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) != "stopping":
            continue  # of a thread, a server, a partition: not of a saga
        place = {**ENDS, **LETTERS}.get(name)
        given = [node.args[place]] if place is not None and len(node.args) > place else []
        given += [each.value for each in node.keywords if each.arg == BY_NAME.get(name, "code" if name in ENDS else "")]
        for each in given:
            ways = variables.get(each.id, []) if isinstance(each, ast.Name) and each.id not in known else [each]
            for way in ways:
                yield from written(way, known)


def written(node: ast.expr, known: Constants) -> Iterator[tuple[str, bool]]:
    """The texts that an expression may be, as far as the source says so: constants, their names, and the ways of an `or`."""
    match node:
        case ast.Constant(value=str(code)):
            # SQL: a text, or one of several
            yield from ((each, False) for each in re.findall(r"'(\w+)'", code) or [code])
        case ast.Name(id=name) if name in known:
            yield known[name], False
        case ast.Attribute(value=ast.Name(id=holder), attr=name):
            value = getattr(getattr(errors, holder, None), name, None)
            if isinstance(value, str):
                yield value, False
        case ast.BoolOp(values=ways):
            for way in ways:
                yield from written(way, known)
        case ast.IfExp(body=one, orelse=other):
            yield from written(one, known)
            yield from written(other, known)
        case ast.JoinedStr(values=parts):
            text = ""
            for part in parts:
                match part:
                    case ast.Constant(value=str(literal)):
                        text += literal
                    case ast.FormattedValue(value=ast.Name(id=name)) if name in known:
                        text += known[name]
                    case _:
                        yield text, True
                        return
            yield from written(ast.Constant(text), known)


def of_package(package: str) -> set[tuple[str, bool]]:
    """All codes of a package. A name that a module imports is looked up in the module that it comes from."""
    trees = {
        path: ast.parse(path.read_text()) for path in (ROOT / package).rglob("*.py") if "versions" not in path.parts
    }
    own = {path.stem: constants(tree) for path, tree in trees.items()}
    found = set()
    for path, tree in trees.items():
        known = dict(own[path.stem])
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module:
                there = own.get(node.module.rpartition(".")[2], {})
                known |= {name.asname or name.name: there[name.name] for name in node.names if name.name in there}
        found |= set(codes(path.read_text(), known))
    return found


def test_every_reason_that_the_library_writes_is_listed() -> None:
    found = of_package("idempotency")
    assert len(found) > 30
    listed = {(code, False) for code in reasons.OF_LETTERS} | {(reasons.HTTP_STATUS, True)}
    assert found - listed == set()


def test_a_new_reason_is_noticed_wherever_it_is_written() -> None:
    source = """
raise PermanentError("no", "new_one")
raise errors.StoredRefusal("no", code="new_two")
stop(attempt, "new_three", "why")
Examined("new_four")
store_failure(connection, reason=f"new_five_{status}")
insert_for_rows_sql("rows", reason="CASE WHEN x THEN 'new_six' ELSE 'new_seven' END")
raise PermanentError("no", error.code or "new_eight")
"""
    names = ["one", "two", "three", "four", "five_", "six", "seven", "eight"]
    assert {code for code, _ in codes(source, {})} == {f"new_{name}" for name in names}


def test_every_reason_of_the_example_application_is_declared() -> None:
    found = {code for code, _ in of_package("tasks")}
    assert len(found) > 15
    own = set(OWN)
    assert own == found - reasons.OF_LETTERS


def test_every_reason_and_alarm_has_a_page_and_no_page_is_about_nothing() -> None:
    known = {*reasons.OF_LETTERS, reasons.DECLINED, *reasons.ALERTS, *reasons.ALARMS, *OWN, f"{reasons.HTTP_STATUS}404"}
    wanted = {page_of(each, OWN) for each in known} | set(re.findall(r"\}\}([a-z_]+)\.md\"", RULES))
    assert set(PAGES) == wanted


def test_a_code_without_a_page_of_its_own_leads_to_the_page_about_refusals() -> None:
    own = ("card_declined", "smtp_")
    pages = {each: page_of(each, own) for each in ("card_declined", "smtp_550", "smtp", "expired_card", "http_404")}
    assert pages == {
        "card_declined": "card_declined", "smtp_550": "smtp", "smtp": "declined", "expired_card": "declined",
        "http_404": "http",
    }  # fmt: skip
    assert page_of("no_consumers/payments") == "no_consumers"


def all_wrong() -> list[alarms.Alarm]:
    """The alarms of a system in which everything is wrong."""
    rows: dict[str, Any] = {
        "outbox": SimpleNamespace(unpublished=1, oldest=1.0),
        "letters": [SimpleNamespace(unknown=1)],
        "processes": [
            SimpleNamespace(
                kind="worker",
                name="w",
                host="h",
                pid=7,
                silent_seconds=999.0,
                queues=["q"],
                command=None,
                directory=None,
            )
        ],
        "sharers": [
            SimpleNamespace(service=None, due=1),
            SimpleNamespace(service="mail", due=1, lease_over=0, has_relay=False),
        ],
        "disabled_webhooks": [SimpleNamespace(id="ep_1", disabled_because="gone", tenant="t")],
        "streams": [
            SimpleNamespace(consumer="s", topic="t", partition=0, stopped="refused", lag=1, lease_left=9.0),
            SimpleNamespace(consumer="s", topic="t", partition=1, stopped=None, lag=1, lease_left=-9.0),
        ],
    }
    queues = {"q": QueueState(accepted=1, oldest_accepted_seconds=9999.0, ready=1, consumers=0)}
    found = Snapshot(queues=queues, not_kept=1, **rows)
    return alarms.lasting(found, Settings(database_url=SecretStr("postgresql+psycopg://a@127.0.0.1/b")))


def test_every_alarm_has_a_page_that_begins_with_its_command() -> None:
    found = all_wrong()
    assert {alarm.kind for alarm in found} == set(reasons.ALARMS)
    for alarm in found:
        line = commands(PAGES[page_of(alarm.name)])[0]
        assert alarm.notice("shop").command == line.command


def test_no_alarm_is_made_that_is_not_tried_here() -> None:
    tree = ast.parse(Path(alarms.__file__).read_text())
    made = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Alarm"]
    # two of one kind: without a relay, and of another application
    assert len(made) == len(all_wrong()) == len(reasons.ALARMS) + 1


def test_every_rule_begins_with_the_command_of_its_page() -> None:
    rules = [rule for group in yaml.safe_load(RULES)["groups"] for rule in group["rules"]]
    for rule in rules:
        page = rule["annotations"]["runbook"].rpartition("}")[2].removesuffix(".md")
        lines = commands(PAGES[page])
        assert rule["annotations"]["command"] == lines[0].command, page
        wanted = {name for line in lines for name in line.placeholders}
        assert "START" not in wanted or "start" in rule["annotations"], page


def test_the_index_has_every_page_once() -> None:
    linked = re.findall(r"\]\(([a-z_]+)\.md\)", INDEX)
    assert sorted(linked) == sorted(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_short_and_says_all_that_is_needed(page: str) -> None:
    text = PAGES[page]
    assert 10 <= len(text.splitlines()) <= 25
    assert text.startswith(("# `", "# "))
    assert re.search(r"^\*\*The customer\*\* ", text, re.MULTILINE)
    assert re.search(r"^\*\*Replay\.\*\* ", text, re.MULTILINE)
    assert section(text, "Over when").strip()
    assert commands(text)


def check(line: Line) -> None:
    """Raise unless the program's own parser takes this command."""
    values = dict.fromkeys(PLACEHOLDERS, "1") | {"yourapp": "tasks", "OUTCOME": "--not-happened"}
    first, *others = line.filled(values | {"START": "idempotency relay"}).removesuffix("&").split("||")
    assert all(other.strip() == "true" for other in others)
    program, *arguments = shlex.split(first)
    if program == "idempotency":
        parse(get_command(cli), arguments)
    elif program == "celery":
        parse_celery(arguments)
    elif (program, *arguments[:2]) == ("python", "-m", "sandbox"):
        sandbox_command._parser().parse_args(arguments[2:])
    elif program == "promtool":
        promtool = shutil.which(program)
        # its own parser; where it is not installed, nothing else knows its commands
        assert promtool is None or subprocess.run([promtool, *arguments, "--help"], capture_output=True).returncode == 0
    else:
        assert program in ("psql", "curl", "kill", "ps"), program


def parse(command: Any, arguments: list[str]) -> None:
    """Let a command's parser read its arguments, without running it."""
    with command.make_context(command.name, list(arguments)) as context:
        if not hasattr(command, "resolve_command") or (command.invoke_without_command and not left_over(context)):
            return
        _, found, rest = command.resolve_command(context, left_over(context))
        parse(found, rest)


def left_over(context: Any) -> list[str]:
    """What a group leaves to its commands. Click 8.1 has another name for it."""
    held = vars(context)
    return [*(held.get("_protected_args") or held.get("protected_args") or ()), *context.args]


def parse_celery(arguments: list[str]) -> None:
    """As `parse`, but for what Celery's callbacks need: they look at the application, which is not here."""
    with celery_command.make_context("celery", list(arguments)) as context:
        _, found, rest = celery_command.resolve_command(context, left_over(context))
        assert found is not None
        with click.Context(found, parent=context, **found.context_settings) as inner:  # Flower reads its options itself
            _, left, _ = found.make_parser(inner).parse_args(rest)
        assert left == []


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_parses(page: str) -> None:
    for line in commands(PAGES[page]):
        check(line)


@pytest.mark.parametrize(
    "wrong",
    [
        "idempotency dead-letters replay",
        "idempotency nothing",
        "idempotency forget 7",
        "celery -A tasks work",
        "rm -r x",
    ],
)
def test_a_command_that_is_none_is_noticed(wrong: str) -> None:
    if wrong == "idempotency dead-letters replay":
        wrong += " --everything"
    with pytest.raises((click.UsageError, UsageError, AssertionError, SystemExit)):
        check(Line(wrong, ""))


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_can_be_filled_in(page: str) -> None:
    """From the alert, or from what an earlier command of the page has printed."""
    # what an alert has is said by notices.py and the rules; KEY and TASK are a letter's, EFFECT and EFFECT_KEY an operation's
    known = {"DEAD_LETTER", "QUEUE", "NAME", "KIND", "HOST", "PID", "ENDPOINT", "START", "WHY", "yourapp"}
    for line in commands(PAGES[page]):
        assert set(line.placeholders) <= known, line
        if line.command.startswith("idempotency dead-letters show"):
            known |= {"KEY", "TASK"}
        if line.command.startswith("idempotency show"):
            known |= {"EFFECT", "EFFECT_KEY"}
        if line.command.startswith("python -m sandbox find"):
            known |= {"OUTCOME"}


def test_a_letters_page_begins_with_the_command_that_its_alert_has() -> None:
    for reason in (*reasons.OF_LETTERS, *OWN, reasons.DECLINED):
        assert commands(PAGES[page_of(reason, OWN)])[0].command == "idempotency dead-letters show DEAD_LETTER"


# ---------------------------------------------------------------- a process that is silent


def line_of(page: str, word: str) -> Line:
    return next(each for each in commands(PAGES[page]) if word in each.command)


@pytest.mark.parametrize(("argument", "killed"), [("celery", True), ("another", False)])
def test_a_silent_process_is_killed_only_while_its_number_is_a_process_of_ours(argument: str, killed: bool) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)", argument], stdout=-1
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()  # it runs its own program by now
        subprocess.run(["/bin/sh", "-c", line_of("silent", "kill").filled({"PID": str(process.pid)})], check=True)
        if killed:
            assert process.wait(60) == -9
        else:
            assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_how_a_process_is_started_again_is_words_of_a_shell() -> None:
    process = SimpleNamespace(kind="worker", name="w@h$(touch x)", queues=["eu payments", "a;b"], command=None)
    start = start_of(process)
    filled = line_of("silent", "START").filled({"START": start}).removesuffix("&")
    assert shlex.split(filled) == [
        "celery", "-A", "yourapp", "worker", "--hostname", "w@h$(touch x)", "--queues", "eu payments,a;b",
    ]  # fmt: skip
