"""The list of commands, which is kept apart from the commands so that the help need not import them."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest
from psycopg.errors import InsufficientPrivilege, UndefinedFunction, UndefinedTable
from typer.main import get_group

from idempotency.cli import root
from idempotency.cli.terminal import application, print_table
from idempotency.contrib.django.integration import Django
from idempotency.errors import IdempotencyError
from idempotency.framework import Framework, framework, use_framework
from idempotency.store.refused import remedy


@pytest.mark.parametrize("name", root.COMMANDS)
def test_each_command_has_the_help_that_the_list_shows(name: str) -> None:
    assert root.command(name).help == root.COMMANDS[name][1]


def test_the_list_of_commands_is_complete() -> None:
    modules = {module for module, _ in root.COMMANDS.values()}
    found = [
        name for module in modules for name in get_group(import_module(f"idempotency.cli.{module}").commands).commands
    ]
    assert sorted(found) == sorted(root.COMMANDS)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("tests.support.bank:nothing", "the module tests.support.bank has no 'nothing'"),
        ("not_there:app", "No module named 'not_there'"),
        ("not_there", "No module named 'not_there'"),
    ],
)
def test_an_application_that_is_not_there_is_told_from_a_module_that_is_not(name: str, why: str) -> None:
    with pytest.raises(IdempotencyError) as refused:
        application(name)
    assert str(refused.value) == f"--app {name}: {why}; name your Celery application with -A, or in CELERY_APP"


def test_a_table_without_rows_is_a_line_that_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("id", "key", rows=[])
    print_table("id", "key", rows=[], title="attempts")
    assert capsys.readouterr().out == "none\nattempts: none\n"


@pytest.mark.parametrize(("used", "command"), [(Framework, "idempotency"), (Django, "manage.py idempotency")])
def test_messages_name_the_command_as_it_is_called_here(used: type[Framework], command: str) -> None:
    before = framework()
    use_framework(used())
    try:
        for missing in (UndefinedTable("no relation"), UndefinedFunction("no function idempotency.about")):
            assert str(remedy(missing)).endswith(f"run `{command} migrate`")
    finally:
        use_framework(before)


def written_out(source: str) -> list[str]:
    """The texts in a module that say `idempotency COMMAND`, except docstrings."""
    tree = ast.parse(source)
    named = re.compile(rf"\bidempotency ({'|'.join(root.COMMANDS)})\b")
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [str(text.value) for text in texts if id(text) not in docstrings and named.search(str(text.value))]


def test_no_message_names_a_command_as_it_is_called_without_a_framework() -> None:
    assert written_out('"""idempotency relay"""\nsay(f"{1} run `idempotency migrate`")') == [
        " run `idempotency migrate`"
    ]
    modules = list(Path(root.__file__).parents[1].rglob("*.py"))
    assert len(modules) > 100
    found = {str(module): texts for module in modules if (texts := written_out(module.read_text()))}
    assert found == {}


def test_who_may_not_migrate_is_told_to_log_in_as_the_owner() -> None:
    said = remedy(InsufficientPrivilege("must be owner of table records"))
    assert str(said).endswith("log in as its owner or as a member of it")


def test_an_application_that_fails_to_import_is_told_by_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_application.py").write_text(
        "from celery import Celery\nfrom idempotency import nothing_like_it\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(IdempotencyError, match=r"cannot import name 'nothing_like_it' .*failing_application\.py:2\)$"):
        application("failing_application")
    with pytest.raises(IdempotencyError, match="No module named 'no_such_application'; name your Celery application"):
        application("no_such_application")
