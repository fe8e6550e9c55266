"""The commands of `idempotency`, and which module has each.

A module is imported when one of its commands is called, so `--help` and `--version` need neither Celery nor SQLAlchemy.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from ..extras import PACKAGE, installed_version

# In the order of the help, with the first sentence of each one's own.
COMMANDS = {
    "migrate": ("deployment", "Bring the database's tables to this version."),
    "broker-users": (
        "broker_users",
        "Write users with the least rights for each kind of process, for RabbitMQ and Redis to read. Connects to neither.",
    ),
    "relay": (
        "deployment",
        "Publish the outbox until stopped; also recover, resend, store dead letters, alert and purge. Run any number.",
    ),
    "stream": (
        "stream_commands",
        "Handle the application's streams until stopped. Run any number: partitions are divided among them.",
    ),
    "doctor": (
        "deployment",
        "Check for anything that would lose work, do it twice or expose it. Exit status 1 if there is.",
    ),
    "metrics": (
        "deployment",
        "Serve what all processes with the same PROMETHEUS_MULTIPROC_DIR have counted, for Prometheus, until stopped.",
    ),
    "web": (
        "web",
        "Serve the page for the person on call, until stopped: flow, failures, money in doubt, dead letters, approvals.",
    ),
    "alive": (
        "alive",
        "Check that the process with this file still signs. Exit status 1 if it hangs; Postgres and the broker are not asked.",
    ),
    "recover": ("deployment", "Release operations that have lost their holder, once."),
    "purge": ("deployment", "Delete what is past its retention, once, and large results that nothing refers to."),
    "status": (
        "read",
        "Queues, processes, operations by status, and what has waited longest; other applications in the database.",
    ),
    "list": (
        "read",
        "The newest operations, without arguments and results. The accepted ones have no record yet.",
    ),
    "show": ("read", "One operation: its record, effects, deliveries, dead letters, and what people have changed."),
    "release": ("change", "Take a started operation from its holder, and deliver it again now."),
    "cancel": (
        "change",
        "End an operation that has not begun or waits for its next attempt: failed as cancelled, with a dead letter.",
    ),
    "erase": ("erase", "Erase the data of an operation that has ended, for good. Its key stays spent."),
    "forget": ("change", "Forget a process that is silent and will not come back: its alarm ends."),
    "rename-service": (
        "change",
        "Give what an application had under its old name to this one. Stop all processes of the old name first.",
    ),
    "effects": ("change", "Calls outside whose outcome only a person can find out."),
    "saga": ("saga_commands", "Operations that wait for events, call others, and are undone if they fail."),
    "dead-letters": ("dead_letter_commands", "What has ended without success and waits for a person."),
    "webhooks": ("webhook_commands", "Where customers get events, and what was delivered to them."),
    "api-key": ("api_keys", "Which clients may call, as which tenant, and what they may do."),
    "audit": ("audit", "What people have changed, and whether it is still what was recorded."),
    "audit-past": (
        "audit_past",
        "Find what has already happened twice in a table of yours. Reads only. Exit status 1 if there is any, 2 for an error.",
    ),
    "operators": ("people", "Who may change what moves money and discard dead letters, and who may approve it."),
}


def command(name: str) -> Any:
    """Import the module of a command; returns the command."""
    module = import_module(f".{COMMANDS[name][0]}", __package__)
    return get_group(module.commands).commands[name]


class _Commands(TyperGroup):
    """Lists every command by name and help; imports the one that is called."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = {name: TyperCommand(name, help=text) for name, (_, text) in COMMANDS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, command(name) if name else None, rest


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"{PACKAGE} {installed_version()}")  # noqa: T201
        raise typer.Exit


cli = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@cli.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Operate celery-idempotency."""
