"""What a submitter knows of its own submissions: accepted, perhaps accepted, or refused for a reason that no fault explains."""

from __future__ import annotations

import socket

from sqlalchemy import Engine, create_engine
from sqlalchemy.engine import make_url

from tests.chaos.traffic import Traffic


def traffic(engine: Engine) -> Traffic:
    return Traffic(engine, seed=1, rate=30.0, url="http://127.0.0.1:9", may_go_on=lambda: True, shares={}, rare={})


def test_a_refusal_of_a_postgres_that_answers_is_a_finding(engine: Engine) -> None:
    """Here the application's own table is not there, as after a bad migration."""
    submitting = traffic(engine)
    submitting._submit()
    assert (submitting.tally.committed, submitting.tally.unknown) == (0, 0)
    assert [each.partition(":")[0] for each in submitting.tally.refused] == ["deposit"]
    assert "submitted" in submitting.tally.refused[0]


def test_a_postgres_that_is_away_is_none(database: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        away = make_url(database).set(host="127.0.0.1", port=unused.getsockname()[1])
        submitting = traffic(create_engine(away, connect_args={"connect_timeout": 2}))
        submitting._submit()
    assert (submitting.tally.committed, submitting.tally.unknown, submitting.tally.refused) == (0, 1, [])
