"""Fixtures of the tests of the checker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine

from tests.chaos.hand import Hand, writing


@pytest.fixture
def hand(engine: Engine) -> Iterator[Hand]:
    """Writes rows by hand, as a run would have left them."""
    with writing(engine) as hand:
        yield hand
