"""What people change is changed in `operate/`: each change in one function, with its audit row in its transaction."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

from idempotency.operate.change import audit
from idempotency.store import dead_letters, discards, ends, operations, people, processes

LIBRARY = Path(__file__).parents[2] / "idempotency"
WRITES = re.compile(
    r"\b(INSERT INTO|UPDATE|DELETE FROM) idempotency\.|\bidempotency\.(keep_event|signal_saga|resume_saga)\("
)
# Waits for whoever changes a record.
OF_RECORDS = re.compile(r"UPDATE idempotency\.records|FROM idempotency\.records[^;]*FOR (NO KEY )?UPDATE")
CHANGES = {
    "add_endpoint",
    "add_operator",
    "approve",
    "approve_edit",
    "archive",
    "cancel",
    "cancel_saga",
    "create_api_key",
    "disable_endpoint",
    "edit",
    "enable_endpoint",
    "erase",
    "forget_position",
    "forget_process",
    "mark_undone",
    "release",
    "redeliver",
    "remove_operator",
    "rename_service",
    "replay",
    "request",
    "resolve_effect",
    "resolve_effect_of_saga",
    "restore",
    "retry_saga",
    "revoke_api_key",
    "rotate_secret",
    "seek_stream",
    "signal_saga",
}


def modules(package: str) -> list[ModuleType]:
    names = [path.stem for path in (LIBRARY / package).glob("*.py") if not path.stem.startswith("__")]
    return [importlib.import_module(f"idempotency.{package}.{name}") for name in names]


def tree_of(code: FunctionType | ModuleType) -> ast.Module:
    return ast.parse(textwrap.dedent(inspect.getsource(code)))


def used(tree: ast.AST, namespace: dict[str, Any]) -> Iterator[object]:
    """What some code names: texts, what its module has, and what the modules that it imports have."""
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)):
                yield text
            case ast.Name(id=name):
                yield namespace.get(name)
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                yield getattr(namespace.get(name), attribute, None)


def functions(tree: ast.AST, namespace: dict[str, Any], package: str) -> set[FunctionType]:
    """The functions of a package that some code names."""
    found = {inspect.unwrap(each) for each in used(tree, namespace) if isinstance(each, FunctionType)}
    return {function for function in found if function.__module__.startswith(f"idempotency.{package}.")}


def writes(function: FunctionType, what: re.Pattern[str] = WRITES) -> bool:
    """Whether a function of the store has a statement that writes, or calls another one that has."""
    tree = tree_of(function)
    if any(isinstance(each, str) and what.search(each) for each in used(tree, function.__globals__)):
        return True
    return any(writes(each, what) for each in functions(tree, function.__globals__, "store") - {function})


def changes(function: FunctionType, what: re.Pattern[str] = WRITES) -> bool:
    """Whether a function of `operate` writes more than an audit row, itself or by another function of `operate`."""
    tree = tree_of(function)
    if any(writes(each, what) for each in functions(tree, function.__globals__, "store")):
        return True
    return any(changes(each, what) for each in functions(tree, function.__globals__, "operate") - {function, audit})


def is_repeatable(function: FunctionType) -> bool:
    """Whether it, or the transaction in it, is made again if a record was moved to another partition meanwhile."""
    decorators = [each for node in ast.walk(tree_of(function)) for each in getattr(node, "decorator_list", ())]
    return "repeatable" in map(ast.unparse, decorators)


def is_audited(function: FunctionType) -> bool:
    """Whether a function writes an audit row on the one connection that it is given or opens a transaction on."""
    tree = tree_of(function)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "audit"]
    # what a `with` gives no name is nothing to write on
    opened = [
        (ast.unparse(item.optional_vars), ast.unparse(item.context_expr))
        for node in ast.walk(tree)
        if isinstance(node, ast.With)
        for item in node.items
        if item.optional_vars is not None
    ]
    given = [name for name in inspect.signature(function).parameters if name == "connection"]
    in_transactions = all(opens.endswith(".engine.begin()") for _, opens in opened)
    on = {ast.unparse(call.args[0]) for call in calls}
    return in_transactions and given + [name for name, _ in opened] == ["connection"] and on == {"connection"}


@cache
def public_changes() -> dict[str, FunctionType]:
    return {
        name: function
        for module in modules("operate")
        for name, member in inspect.getmembers(module, inspect.isfunction)
        for function in [inspect.unwrap(member)]  # one that is `repeatable`
        if function.__module__ == module.__name__ and not name.startswith("_")
        if function is not audit and changes(function)
    }


def test_the_changes_that_people_can_make_are_known() -> None:
    assert set(public_changes()) == CHANGES


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_a_change_writes_its_audit_row_itself_and_in_its_transaction(name: str) -> None:
    assert is_audited(public_changes()[name])


def test_a_change_that_may_meet_a_record_that_moves_is_repeatable() -> None:
    found = {
        name: is_repeatable(function) for name, function in public_changes().items() if changes(function, OF_RECORDS)
    }
    # whoever commits these makes them again
    assert {name for name, is_so in found.items() if not is_so} == {"approve", "request"}
    assert len(found) > 10


def test_the_command_line_writes_no_table_itself() -> None:
    found = {
        (module.__name__, function.__name__)
        for module in modules("cli")
        for function in functions(tree_of(module), vars(module), "store")
        if writes(function)
    }
    # as a migration does, whose statements are in files that Alembic loads
    assert found == {("idempotency.cli.deployment", "partition"), ("idempotency.cli.deployment", "renew")}


# ---------------------------------------------------------------- what these tests would notice


def _unaudited(runtime: Any) -> None:
    with runtime.engine.begin() as connection:
        processes.forget(connection, "bank", "w", 1.0)


def _audited_apart(runtime: Any, change: Any) -> None:
    with runtime.engine.begin() as connection:
        processes.forget(connection, "bank", "w", 1.0)
    with runtime.engine.begin() as connection:
        audit(connection, change, "forget", None, None)


def _audited_without_a_transaction(runtime: Any, change: Any) -> None:
    with runtime.autocommit() as connection:
        processes.forget(connection, "bank", "w", 1.0)
        audit(connection, change, "forget", None, None)


@pytest.mark.parametrize("function", [_unaudited, _audited_apart, _audited_without_a_transaction])
def test_a_change_without_an_audit_row_of_its_own_is_noticed(function: FunctionType) -> None:
    assert changes(function)
    assert not is_audited(function)


@pytest.mark.parametrize(
    "function",
    [
        dead_letters.replay,
        discards.approve,
        discards.discard,
        ends.release,
        people.add,
        people.remove,
        processes.forget,
    ],
)
def test_a_function_that_writes_is_noticed(function: FunctionType) -> None:
    assert writes(function)


@pytest.mark.parametrize("function", [dead_letters.show, operations.read_locked, people.who, processes.processes])
def test_a_function_that_reads_is_not(function: FunctionType) -> None:
    assert not writes(function)
