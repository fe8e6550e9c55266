"""How a process was started, so that a person can start it again.

Of a command, only what is known to be harmless is kept: addresses have passwords in them, and an application's own options may be
anything. It is read by the same rules as it was written, since it is typed into a shell: another program than ours or Celery's is
none, and whatever is not known is `…`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

from ..environment import environment
from ..framework import framework

# In the place of what is not kept.
LEFT_OUT = "…"
# Characters of a command that is kept.
LONGEST = 2_000
KINDS = ("worker", "beat", "relay", "stream")
# Options whose value is kept: names, numbers and paths.
_VALUES = frozenset(
    [
        "-A",
        "--app",
        "--workdir",
        "--config",
        "--loader",
        "-n",
        "--hostname",
        "-S",
        "--statedb",
        "--scheduler",
        "-s",
        "--schedule",
        "--schedule-filename",
        "--max-interval",
        "-l",
        "--loglevel",
        "-f",
        "--logfile",
        "--pidfile",
        "--umask",
        "--uid",
        "--gid",
        "-O",
        "--prefetch-multiplier",
        "-c",
        "--concurrency",
        "-P",
        "--pool",
        "--time-limit",
        "--soft-time-limit",
        "--max-tasks-per-child",
        "--max-memory-per-child",
        "-Q",
        "--queues",
        "-X",
        "--exclude-queues",
        "-I",
        "--include",
        "--autoscale",
        "--heartbeat-interval",
        "--only",
        "--instance",
        "--settings",
        "--pythonpath",
    ]
)
# Options without a value.
_FLAGS = frozenset(
    [
        "-q",
        "--quiet",
        "--no-color",
        "--skip-checks",
        "-E",
        "--task-events",
        "--events",
        "-B",
        "--beat",
        "--disable-prefetch",
        "--without-gossip",
        "--without-mingle",
        "--without-heartbeat",
    ]
)
# Not named again: it would throw away what has come since, or is of a shell that waits.
_NOT_AGAIN = frozenset(["--purge", "--discard", "-D", "--detach"])
_CELERYS = (("celery",), ("python", "-m", "celery"))
_OURS = (("idempotency",), ("python", "-m", "idempotency.cli"))
# Their application is the project's.
_DJANGOS = (("python", "manage.py", "idempotency"), ("django-admin", "idempotency"))


def kept(arguments: Sequence[str]) -> list[str] | None:
    """What is kept of `sys.argv`; None if that starts none of our processes, as where an application runs Celery by a call."""
    if not arguments:
        return None
    match PurePath(arguments[0]).parts:
        case (*_, "celery", "__main__.py"):
            first = ["python", "-m", "celery"]
        case (*_, "idempotency", "cli", "__main__.py"):
            first = ["python", "-m", "idempotency.cli"]
        case (*_, "manage.py"):
            first = ["python", "manage.py"]
        case (*_, name):
            first = [name]
        case _:
            return None
    command = [*first, *arguments[1:]]
    program, app = _program(command), environment().celery_app
    named = any(each.startswith("-A") or each.partition("=")[0] == "--app" for each in command)
    if program is not None and program not in _DJANGOS and app is not None and not named:
        # of Celery, before its command; of ours, behind it
        at = len(program) + (program in _OURS)
        command[at:at] = ["-A", app]
    return known(command)


def known(command: Sequence[str]) -> list[str] | None:
    """A command without what is not known; None if it is not one of ours or Celery's."""
    program = _program(command)
    if program is None:
        return None
    options = list(_options(command[len(program) :]))
    # one after the other says no more than one
    options = [
        each for place, each in enumerate(options) if [each] != [LEFT_OUT] or options[place - 1 : place] != [each]
    ]
    found = [*program, *options]
    is_ours = any(each in KINDS for each in options) and all(each.isprintable() for each in found)
    return found if is_ours and sum(map(len, found)) <= LONGEST else None


def _program(command: Sequence[str]) -> tuple[str, ...] | None:
    return next((each for each in (*_CELERYS, *_OURS, *_DJANGOS) if tuple(command[: len(each)]) == each), None)


def _options(arguments: Sequence[str]) -> Iterator[str]:
    rest = iter(arguments)
    for each in rest:
        name, is_given, _ = each.partition("=")
        if each in _NOT_AGAIN:
            continue
        if each in KINDS or each in _FLAGS or (is_given and name.startswith("--") and name in _VALUES):
            yield each
        elif each in _VALUES:
            yield each
            yield next(rest, LEFT_OUT)
        elif each[:2] in _VALUES and not each.startswith("--"):  # -Ashop
            yield each
        else:
            yield LEFT_OUT


def start_of(process: Any) -> str:
    """How a process is started, as a shell takes it: as it was, or, where that is not known, as one of its kind.

    What starts it in production is the deployment's.
    """
    command = None if process.command is None else known(process.command)
    return shlex.join(_like(process) if command is None else command)


def _like(process: Any) -> list[str]:
    if process.kind in ("relay", "stream"):
        return [*framework().command.split(), process.kind, "-A", "yourapp"]
    if process.kind == "worker":
        queues = ["--queues", ",".join(process.queues)] if process.queues else []
        return ["celery", "-A", "yourapp", "worker", "--hostname", process.name, *queues]
    return ["celery", "-A", "yourapp", "beat"]
