"""The bank before `transfer` existed."""

from __future__ import annotations

from tests.support.bank import app

app.tasks.pop("tests.support.bank.transfer")
