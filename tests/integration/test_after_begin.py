"""A listener on SQLAlchemy's own Session, registered as an application's module is imported: before any runtime is made."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Engine, event, text
from sqlalchemy.orm import Session

from idempotency import IdempotentTask
from tests.support.batches import SETTING, message, put, run, states, together

_LISTENS = """
from sqlalchemy import event
from sqlalchemy.orm import Session
event.listen(Session, "after_begin", lambda *given: None)
from idempotency.attempt import session
session.refuse_others_commits()
print(list(session.AttemptSession().dispatch.after_begin)[0] is session._own)
"""


@pytest.fixture
def tenant_of() -> Iterator[None]:
    """As applications do, for row-level security of their own tables."""

    def begun(session: Session, transaction: Any, connection: Any) -> None:
        if tenant := session.info.get("tenant_of_listener"):
            connection.exec_driver_sql(f"SET LOCAL app.tenant = '{tenant}'")

    event.listen(Session, "after_begin", begun)
    yield
    event.remove(Session, "after_begin", begun)


def test_what_it_sets_for_one_body_is_so_for_no_other(bank: Celery, engine: Engine, tenant_of: None) -> None:
    seen: dict[str, Any] = {}

    def body(self: IdempotentTask, account: str) -> None:
        if account == "e0":
            self.session.info["tenant_of_listener"] = "e0"
        seen[account] = self.session.execute(text(SETTING)).scalar_one() or ""
        put(self, account)

    task = together(bank, body)
    run(bank, task, *(message(bank, task, f"e{n}") for n in range(3)))
    assert states(engine) == dict.fromkeys(("e0", "e1", "e2"), "completed")
    assert seen == {"e0": "e0", "e1": "", "e2": ""}


@pytest.mark.long
def test_one_that_was_registered_before_ours_is_told_after_it() -> None:
    done = subprocess.run([sys.executable, "-c", _LISTENS], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
