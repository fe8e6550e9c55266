"""docs/django.md: its settings are the example's, and its code runs in the example's project."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.django.test_example import EXAMPLE, Manage, database, manage
from tests.support.documents import every_block

__all__ = ["database", "manage"]  # fixtures
PAGE = Path(__file__).parents[2] / "docs/django.md"
RUN_TESTS = """
import unittest
from django.db import transaction as t
assert handle.status() == "accepted"
assert welcome(order.pk) is None and Customer.objects.get(name="ann").points == 10
result = unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(Welcome))
assert result.wasSuccessful() and result.testsRun == 1
assert not Customer.objects.filter(name="bob").exists()
"""


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_the_settings_of_the_page_are_those_of_the_example() -> None:
    first, tasks = blocks("python settings")
    settings = (EXAMPLE / "after" / "shop" / "settings.py").read_text()
    assert [line for line in first.splitlines() if line not in settings.splitlines()] == []
    assert "idempotency.contrib.django.backend.IdempotentBackend" in tasks


@pytest.mark.long
def test_the_code_of_the_page_runs(manage: Manage) -> None:
    manage("after", "migrate", "--verbosity", "0")
    (typed,) = [block.text for block in every_block("docs/types.md") if block.language == "python django"]
    script = "\n".join(
        [*blocks("python"), RUN_TESTS, f"exec({typed!r}, {{'__name__': 'page'}})", "print('all of it ran')"]
    )
    # in one piece: the shell would end a function at its first empty line
    assert "all of it ran" in manage("after", "shell", stdin=f"exec({script!r})\n"), sys.version
