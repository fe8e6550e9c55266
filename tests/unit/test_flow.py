"""The map of the example application's events says what its code does, and its page what the map says."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from fnmatch import fnmatchcase

import pytest

from tasks import branches, flow
from tests.support.documents import ROOT

# In a process of its own: the application reads its addresses when it is imported. Nothing is connected.
SUBSCRIPTIONS = """
import json
from idempotency.events import _subscriptions_of
from tasks import app
print(json.dumps([[s.task.name, s.consumer, s.patterns, s.having] for s in _subscriptions_of(app)]))
"""


@pytest.fixture(scope="module")
def subscriptions() -> list[tuple[str, str, list[str], list[str]]]:
    addresses = {"DATABASE_URL": "postgresql+psycopg://nowhere/none", "BROKER_URL": "amqp://nowhere"}
    command = [sys.executable, "-c", SUBSCRIPTIONS]
    found = subprocess.run(command, env={**os.environ, **addresses}, cwd=ROOT, check=True, capture_output=True)
    return [(name, *rest) for name, *rest in json.loads(found.stdout)]


def published(source: str) -> Iterator[str]:
    """The event types that a module publishes: the second argument, a text or a choice between texts."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "publish":
            yield from _texts(source, node.args[1])


def _texts(source: str, node: ast.expr) -> Iterator[str]:
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.IfExp(body=yes, orelse=no):
            yield from _texts(source, yes)
            yield from _texts(source, no)
        case ast.Name(id=name):
            (value,) = (
                each.value
                for each in ast.walk(ast.parse(source))
                if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == name
            )
            yield from _texts(source, value)
        case _:
            raise AssertionError(f"{ast.unparse(node)}: an event's type has to be legible")


def test_whoever_listens_is_in_the_map_and_nobody_else(
    subscriptions: list[tuple[str, str, list[str], list[str]]],
) -> None:
    heard_by: dict[str, set[str]] = defaultdict(set)
    for task, _, patterns, _ in subscriptions:
        for pattern in patterns:
            matching = [event for event in flow.EVENTS if fnmatchcase(event, pattern)]
            assert matching, f"{task} listens to {pattern}, which nobody publishes"
            for event in matching:
                heard_by[event].add(task)
    assert {event: set(each.heard_by) for event, each in flow.EVENTS.items()} == {
        event: heard_by[event] for event in flow.EVENTS
    }


def test_whoever_publishes_is_in_the_map_and_nobody_else() -> None:
    found: dict[str, set[str]] = defaultdict(set)
    for module in (ROOT / "tasks").glob("*.py"):
        for event in published(module.read_text()):
            found[event].add(module.stem)
    assert found == {event: set(each.published_by) for event, each in flow.EVENTS.items()}


def test_an_event_that_is_published_in_any_way_is_found() -> None:
    source = """
became = "a.b" if x else "a.c"
publish(session, became, {})
def f(): publish(self.session, "a.d", {}, app=app)
"""
    assert sorted(published(source)) == ["a.b", "a.c", "a.d"]
    with pytest.raises(AssertionError, match="legible"):
        list(published('publish(session, f"a.{b}", {})'))


def test_what_undoes_an_event_is_an_event() -> None:
    undoing = {event.undone_by for event in flow.EVENTS.values()} - {None}
    assert undoing <= set(flow.EVENTS)
    assert flow.EVENTS["stock.reserved"].undone_by == flow.EVENTS["stock.confirmed"].undone_by == "stock.released"


def test_those_who_listen_to_payments_of_orders_hear_of_no_others(
    subscriptions: list[tuple[str, str, list[str], list[str]]],
) -> None:
    """A payment without an order costs no row for each service that handles orders."""
    of_all = {"notifications", "support", "webhooks"}
    for task, consumer, patterns, having in subscriptions:
        if any(pattern.startswith(("payment", "*")) for pattern in patterns) and consumer not in of_all:
            assert having == ["order_id"], task


SERVICES = ("checkout", "orders", "payments", "warehouse")
# Tables by service. Refunds and the ledger are the payments' own.
FAMILIES = {
    "checkout": {"Checkout"},
    "orders": {"Order"},
    "payments": {"Payment"},
    "warehouse": {"Inspection", "Movement", "Reservation", "Stock"},
}


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_knows_no_other_and_reads_only_its_own_tables(service: str) -> None:
    imported = [
        (node.module, name.name)
        for node in ast.walk(ast.parse((ROOT / "tasks" / f"{service}.py").read_text()))
        if isinstance(node, ast.ImportFrom) and node.level
        for name in node.names
    ]
    assert {name for module, name in imported if module == "models"} == FAMILIES[service]
    assert not {module or name for module, name in imported} & (set(SERVICES) - {service})


def test_no_service_reads_what_the_observer_keeps() -> None:
    modules = {module.stem for module in (ROOT / "tasks").glob("*.py") if "placement" in module.read_text().lower()}
    users = {
        name for name in modules if re.search(r"\bplacements\b|\bPlacement\b", (ROOT / f"tasks/{name}.py").read_text())
    }
    assert users == {"observer", "models"}
    assert not [module for module in (ROOT / "tasks").glob("*.py") if "idempotency.saga_" in module.read_text()]


@pytest.mark.parametrize(
    ("page", "events"), [("docs/order-placement.md", flow.PLACEMENT), ("docs/returns.md", flow.RETURNS)]
)
def test_the_pages_show_the_map(page: str, events: dict[str, flow.Event]) -> None:
    shown = (ROOT / page).read_text()
    assert f"```mermaid\n{flow.diagram(events)}\n```" in shown, f"`python -m tasks.flow` prints what {page} should have"
    assert flow.table(events) in shown


def test_the_page_shows_every_way_in_which_a_return_can_end() -> None:
    shown = (ROOT / "docs/returns.md").read_text()
    assert f"```mermaid\n{branches.diagram()}\n```" in shown, "`python -m tasks.branches` prints it"
    assert branches.table() in shown
