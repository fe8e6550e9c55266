"""Someone who has never seen the system: opens the page that the alert links, fills in its commands, and types them.

It knows no incident and no application. It knows how a page is to be read (docs/runbooks/README.md), and where answers have
what a page calls KEY, TASK, EFFECT or OUTCOME.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from drill.receiver import Received
from drill.runbook import Line, commands

ROOT = Path(__file__).parent.parent
# Seconds: a command that takes longer is given up.
PATIENCE = 30.0
# Fields of an alert, and of a letter, by what a page calls them.
_OF_ALERTS = ("queue", "name", "kind", "host", "pid", "endpoint", "start")
_OF_ANSWERS = {"key": "KEY", "task": "TASK", "queue": "QUEUE"}


class Responder:
    """Answers alerts. `environment`: the addresses, and the token; `other_token`: another person's."""

    def __init__(self, environment: Mapping[str, str], other_token: str, log: Path, say: Callable[[str], None]) -> None:
        self._environment = {**os.environ, **environment}
        self._other_token, self._log, self._say = other_token, log, say
        self._typed: set[str] = set()
        self.started: list[subprocess.Popen[bytes]] = []

    def begin(self) -> None:
        """Another incident: what was typed before may have to be typed again."""
        self._typed.clear()

    def answer(self, alert: Received) -> None:
        """Type what the alert's page says, for each dead letter that the alert names."""
        page = Path(urlsplit(alert.runbook).path).read_text()
        values = {name.upper(): str(alert.fields[name]) for name in _OF_ALERTS if name in alert.fields}
        values |= {"WHY": "drill", "yourapp": self._environment["CELERY_APP"]}
        for letter in alert.fields.get("dead_letters") or [None]:
            known = values if letter is None else values | {"DEAD_LETTER": str(letter)}
            self._follow(commands(page), dict(known))

    def _follow(self, lines: list[Line], values: dict[str, str]) -> None:
        for line in lines:
            if missing := [name for name in line.placeholders if name not in values]:
                self._say(f"      ? {line.command}: no {', '.join(missing)}")
                continue
            command = line.filled(values)
            # START stands for a command, which may name the application as well
            command = command.replace("yourapp", values["yourapp"])
            if command in self._typed and line.in_background:
                continue  # it was started a moment ago
            self._typed.add(command)
            if line.in_background:
                self._start(command.removesuffix("&"))
            else:
                answer = self._run(command, by_another=line.by_another)
                if _is_closed(answer):
                    self._say("      (closed by now)")
                    return
                values |= _found(answer)

    def _run(self, command: str, *, by_another: bool) -> str:
        environment = dict(self._environment)
        if by_another:
            environment["IDEMPOTENCY_TOKEN"] = self._other_token
        if command.startswith("idempotency "):
            command += " --json"  # to read the answer
        try:
            done = subprocess.run(
                ["/bin/sh", "-c", command],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=PATIENCE,
            )
        except subprocess.TimeoutExpired:
            self._say(f"      $ {command}  -> no answer for {PATIENCE:.0f} s")
            return ""
        why = done.stderr.strip().splitlines()[-1:] if done.returncode else []
        self._say(f"      $ {command}{f'  -> {done.returncode} {why[0] if why else str()}' if done.returncode else ''}")
        return done.stdout

    def _start(self, command: str) -> None:
        self._say(f"      $ {command} &")
        with self._log.open("ab") as log:
            self.started.append(
                subprocess.Popen(
                    shlex.split(command),
                    cwd=ROOT,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )


def _is_closed(answer: str) -> bool:
    """Whether this shows a dead letter that is over: the saga has gone on, or another alert led to it first."""
    try:
        document: Any = json.loads(answer)
    except ValueError:
        return False
    return isinstance(document, dict) and document.get("status") in ("replayed", "discarded")


def _found(answer: str) -> dict[str, str]:
    """What later commands of the page may name."""
    try:
        document: Any = json.loads(answer)
    except ValueError:
        return {}
    if not isinstance(document, dict):
        return {}
    values = {word: str(document[name]) for name, word in _OF_ANSWERS.items() if document.get(name)}
    effects = document.get("effects")
    for name, effect in effects.items() if isinstance(effects, dict) else ():
        if effect.get("state") == "begun":
            values |= {"EFFECT": name, "EFFECT_KEY": effect["key"]}
    if isinstance(document.get("outcome"), list):
        values["OUTCOME"] = shlex.join(document["outcome"])
    return values
