"""What an operator of the vault does and sees, in one process: everything is printed."""

from __future__ import annotations

import json
import sys
import traceback

from celery.bin.celery import celery as celery_command
from click.testing import CliRunner

from idempotency import cli
from tests.support.vault import app, keep

HOW = ("succeeds", "unique", "check", "data", "own engine", "psycopg", "wrapped", "permanent")
COMMANDS = (
    "status", "status --json", "list", "list --json", "dead-letters list --json", "dead-letters list --by reason",
    "dead-letters report", "dead-letters report --mail", "dead-letters show 1", "dead-letters replay --error no_person",
    "doctor", "doctor --json", "operators list", "audit verify", "show unique", "show check --json", "recover",
)  # fmt: skip


def act(row: str) -> None:
    for how in HOW:
        keep.apply_async((f"{row}-{how}", how), idempotency_key=how)
    keep.apply_async((f"{row}-other", "succeeds"), idempotency_key="succeeds")  # the key with other arguments
    app.send_task("vault.unknown", (row,))


def look() -> None:
    for command in COMMANDS:
        print("$ idempotency", command, flush=True)  # noqa: T201
        try:
            cli.main(command.split())
        except SystemExit as ended:
            print(ended.code if isinstance(ended.code, str) else "")  # noqa: T201
        except Exception:
            traceback.print_exc()
    for command in ("report", "inspect conf", "inspect stats", "inspect report", "inspect registered", "status"):
        print("$ celery", command, flush=True)  # noqa: T201
        print(CliRunner().invoke(celery_command, ["-A", "tests.support.vault", *command.split()]).output)  # noqa: T201
    conf = app.control.inspect(timeout=2).conf(with_defaults=True)
    print(json.dumps(conf, default=str))  # noqa: T201


if __name__ == "__main__":
    app.loader.import_default_modules()
    if sys.argv[1] == "act":
        act(sys.stdin.read())
    else:
        look()
