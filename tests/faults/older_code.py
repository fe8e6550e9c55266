"""The bank before `transfer` existed."""

from __future__ import annotations

from tests.bank import app

app.tasks.pop("tests.bank.transfer")
