"""What is kept of the command that has started a process, and what is not: secrets, other programs, what throws work away."""

from __future__ import annotations

import shlex
from types import SimpleNamespace

import pytest

from idempotency.upkeep.started import kept, known, start_of


@pytest.fixture(autouse=True)
def no_application(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CELERY_APP", raising=False)


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ("/venv/bin/celery -A shop worker -Q eu,us -n w1@%h -c4", "celery -A shop worker -Q eu,us -n w1@%h -c4"),
        (
            "/venv/lib/celery/__main__.py -A shop beat --scheduler redbeat.RedBeatScheduler --max-interval=5",
            "python -m celery -A shop beat --scheduler redbeat.RedBeatScheduler --max-interval=5",
        ),
        ("/venv/lib/idempotency/cli/__main__.py relay -A shop", "python -m idempotency.cli relay -A shop"),
        ("/venv/bin/idempotency stream -A shop --only orders", "idempotency stream -A shop --only orders"),
        ("/srv/manage.py idempotency relay", "python manage.py idempotency relay"),
        # passwords, and what nobody here knows
        ("celery -A shop -b amqp://me:hush@mq/ worker", "celery -A shop … worker"),
        ("celery -A shop --broker=amqp://me:hush@mq/ worker --api-token hush -E", "celery -A shop … worker … -E"),
        ("celery -A shop worker -- broker_url=amqp://me:hush@mq/", "celery -A shop worker …"),
        # a second time, it would throw away what has come since
        ("celery -A shop worker --purge -D", "celery -A shop worker"),
    ],
)
def test_of_a_command_what_is_harmless_is_kept(arguments: str, command: str) -> None:
    found = kept(arguments.split())
    assert found == command.split()
    assert known(found) == found, "read as it was written"
    assert "hush" not in str(found)


@pytest.mark.parametrize(
    "arguments", ["", "pytest -k worker", "/usr/bin/python3", "sh -c worker", "celery -A shop inspect ping", "cli/__main__.py relay"]
)  # fmt: skip
def test_what_starts_no_process_of_ours_is_not_kept(arguments: str) -> None:
    assert kept(arguments.split()) is None


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ("celery worker -c 4", "celery -A shop worker -c 4"),
        ("idempotency relay", "idempotency relay -A shop"),
        ("celery --app=other worker", "celery --app=other worker"),
        ("celery -Aother worker", "celery -Aother worker"),
        ("manage.py idempotency relay", "python manage.py idempotency relay"),
    ],
)
def test_an_application_of_the_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, arguments: str, command: str
) -> None:
    monkeypatch.setenv("CELERY_APP", "shop")
    assert kept(arguments.split()) == command.split()


def test_what_others_have_written_is_no_command_but_ours() -> None:
    process = SimpleNamespace(kind="relay", name="r@h", queues=[], command=["sh", "-c", "touch x", "relay"])
    assert start_of(process) == "idempotency relay -A yourapp"
    process.command = ["celery", "-A", "shop;touch x", "worker", "$(touch x)", "\x1b[2J"]
    assert shlex.split(start_of(process)) == ["celery", "-A", "shop;touch x", "worker", "…"]
    process.command = ["celery", "-A", "\x1b[2J", "worker"]
    assert start_of(process) == "idempotency relay -A yourapp"
