"""The list of commands, which is kept apart from the commands so that the help need not import them."""

from __future__ import annotations

from importlib import import_module

import pytest
from typer.main import get_group

from idempotency.cli import root


@pytest.mark.parametrize("name", root.COMMANDS)
def test_each_command_has_the_help_that_the_list_shows(name: str) -> None:
    assert root.command(name).help == root.COMMANDS[name][1]


def test_the_list_of_commands_is_complete() -> None:
    modules = {module for module, _ in root.COMMANDS.values()}
    found = [
        name for module in modules for name in get_group(import_module(f"idempotency.cli.{module}").commands).commands
    ]
    assert sorted(found) == sorted(root.COMMANDS)
