"""What two cells may not share, by their addresses."""

from __future__ import annotations

import pytest

from idempotency.errors import SettingsError
from idempotency.settings import Settings

CELL = {"database_url": "postgresql+psycopg://one/x", "broker_url": "amqp://h//"}


@pytest.mark.parametrize(
    "other",
    [
        {"database_url": "postgresql+psycopg://two/x", "broker_url": "amqp://h:5672//"},
        {"database_url": "postgresql+psycopg://two/x", "broker_url": "amqp://h/"},
        {"database_url": "postgresql+psycopg://two/x", "broker_url": "amqp://h/%2F"},
        {"database_url": "postgresql+psycopg://two/x", "broker_url": "pyamqp://h/?heartbeat=9"},
        {"database_url": "postgresql+psycopg://one,spare/x", "broker_url": "amqp://h/b"},
        {"database_url": "postgresql+psycopg://ONE/x", "broker_url": "amqp://h/b"},
    ],
)
def test_one_place_written_in_two_ways_is_one(other: dict[str, str]) -> None:
    given = {"cells": {"eu": CELL, "us": other}, "cell_of": {"a": "eu"}, "cell": "eu"}
    with pytest.raises(SettingsError, match=r"cells: eu and us have the same (database|broker)_url"):
        Settings.read({**given, "database_url": CELL["database_url"]})


def test_the_same_name_on_another_server_is_another_place() -> None:
    other = {"database_url": "postgresql+psycopg://one:5433/x", "broker_url": "amqp://h:5673//"}
    given = {
        "cells": {"eu": CELL, "us": other},
        "cell_of": {"a": "eu"},
        "cell": "eu",
        "database_url": CELL["database_url"],
    }
    assert Settings.read(given).cells.keys() == {"eu", "us"}


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("database_url", "postgresql+psycopg://u:p@9:S3CRET@h/x"),
        ("database_url", "no address"),
        ("broker_url", "amqp://u:p@h:S3CRET//"),
    ],
)
def test_an_address_that_cannot_be_read_is_named_and_not_shown(name: str, address: str) -> None:
    other = {"database_url": "postgresql+psycopg://two/x", "broker_url": "amqp://h/b"} | {name: address}
    given = {
        "database_url": CELL["database_url"],
        "cells": {"eu": CELL, "us": other},
        "cell_of": {"a": "eu"},
        "cell": "eu",
    }
    with pytest.raises(SettingsError, match=f"cells.*{name}: not an address") as refused:
        Settings.read(given)
    assert "S3CRET" not in str(refused.value)
