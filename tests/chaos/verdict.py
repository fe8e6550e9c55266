"""What a run knows besides the ledgers: what was submitted, what its submitters were told, what the broker holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from kombu import Connection
from sqlalchemy import Engine

from tests.chaos import application
from tests.chaos.evidence import Accepted, Id, Violation
from tests.chaos.expected import expected

_SUBMITTED = "SELECT DISTINCT tenant, task, key, account, amount FROM submitted"
_ANNOUNCED = """
SELECT tenant || '-announce-' || key FROM idempotency.records
WHERE task = 'chaos.announce' AND status = 'completed'
"""


def submitted(engine: Engine) -> list[Accepted]:
    """What was committed as accepted, and what should come of it."""
    with engine.connect() as connection:
        return [
            expected(row.tenant, row.task, row.key, row.account, row.amount)
            for row in connection.exec_driver_sql(_SUBMITTED)
        ]


def vanished(certain: Iterable[tuple[str, str, str]], known: Collection[Id]) -> list[Violation]:
    """I15: a violation for each that its submitter was told of, and whose row is gone."""
    return [
        Violation("I15", "/".join(id), "its COMMIT was answered, and its row is not there")
        for id in certain
        if id not in known
    ]


def announcements(engine: Engine, accepted: Iterable[Accepted]) -> list[Violation]:
    """I3: an announcement and its event are one commit: exactly one event for each that completed."""
    with engine.connect() as connection:
        completed = set(connection.exec_driver_sql(_ANNOUNCED).scalars())
    told = Counter(
        account.removesuffix(f"/{application.LEDGER}")
        for each in accepted
        for account, _ in each.rows or ()
        if each.task == application.LEDGER and "-announce-" in account
    )
    return [
        Violation("I3", account, f"announced {told[account]} times, completed: {account in completed}")
        for account in completed | told.keys()
        if told[account] != (account in completed)
    ]


def messages_left(broker_url: str) -> dict[str, int]:
    """Messages ready in the queues of the work; the broker may still be coming back."""
    names = [application.app.conf.task_default_queue, f"{application.app.conf.task_default_queue}-dead"]
    found = {}
    try:
        with Connection(broker_url, connect_timeout=5) as connection:
            for name in names:
                with connection.channel() as channel:
                    try:
                        number = channel.queue_declare(name, passive=True).message_count
                    except connection.channel_errors:
                        continue
                if number:
                    found[name] = int(number)
    except OSError as error:
        return {f"unknown: {type(error).__name__}": 1}
    return found
