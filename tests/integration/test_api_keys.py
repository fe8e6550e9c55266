"""API keys: made once, shown once, and no answer to any other text."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Connection, Engine, event, text

from idempotency import cli
from idempotency.application import runtime_of
from idempotency.store.tenants import Caller, authenticate

SCOPES = ("--scope", "payments:write", "--scope", "operations:read")


@pytest.fixture
def run(
    bank: Celery, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, Any, str]]:
    """Run `idempotency api-key …`: the exit status, the JSON document, and what was said beside it."""
    monkeypatch.setenv("CELERY_APP", "tests.support.bank")

    def run(*arguments: str) -> tuple[int, Any, str]:
        monkeypatch.setattr(sys, "argv", ["idempotency", "api-key", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        status = 1 if isinstance(ended.value.code, str) else int(ended.value.code or 0)
        return (
            status,
            json.loads(said.out) if said.out.startswith(("{", "[")) else said.out,
            f"{said.err}{ended.value.code or ''}",
        )

    return run


Run = Callable[..., tuple[int, Any, str]]


def test_a_key_lets_its_tenant_in_until_it_is_revoked(run: Run, connection: Connection) -> None:
    status, made, _ = run("create", "acme", "--name", "web shop", *SCOPES, "--as", "ann", "--json")
    assert (status, made["tenant"], made["key"].split("_")[:2]) == (0, "acme", ["ik", made["id"]])
    caller = authenticate(connection, made["key"])
    assert caller == Caller("acme", "web shop", ("operations:read", "payments:write"))
    assert (caller.may("payments:write"), caller.may("refunds:write")) == (True, False)
    assert run("revoke", made["id"], "--as", "ben", "--json")[1] == {"revoked": made["id"], "tenant": "acme"}
    assert authenticate(connection, made["key"]) is None
    status, _, said = run("revoke", made["id"])
    assert (status, "revoked before" in said) == (1, True)
    rows = connection.execute(text("SELECT actor, action, details->>'id' FROM idempotency.audit ORDER BY id")).all()
    assert [tuple(row) for row in rows] == [
        ("ann", "api_key_created", made["id"]),
        ("ben", "api_key_revoked", made["id"]),
    ]


def test_a_leaked_key_is_revoked_by_itself_and_never_repeated(run: Run, connection: Connection) -> None:
    made = run("create", "acme", "--name", "till", "--scope", "*", "--json")[1]
    status, revoked, said = run("revoke", made["key"], "--json")
    assert (status, revoked) == (0, {"revoked": made["id"], "tenant": "acme"})
    for wrong in (made["key"], made["key"][:-3]):
        status, _, said = run("revoke", wrong)
        assert (status, made["key"][20:40] in said) == (1, False)
    kept = connection.execute(text("SELECT string_agg(a::text, ' ') FROM idempotency.audit a")).scalar_one()
    assert made["key"][20:40] not in kept


def test_the_key_is_shown_once_and_stored_nowhere(run: Run, connection: Connection) -> None:
    _, printed, said = run("create", "acme", "--name", "web shop", "--scope", "*", "--expires", "2999-01-31")
    key = printed.strip()
    secret = key.rpartition(key.split("_")[1] + "_")[2]
    assert len(secret) == 43
    (listed,) = run("list", "--json")[1]
    assert set(listed) == {"id", "tenant", "name", "scopes", "created_at", "expires_at", "revoked_at"}
    assert listed["expires_at"].startswith("2999-01-31T00:00:00")
    stored = connection.execute(text("SELECT k::text || a::text FROM idempotency.api_keys k, idempotency.audit a"))
    everything = "".join([*stored.scalars(), *map(str, run("list")), said])
    assert secret not in everything
    assert run("list", "--tenant", "other", "--json")[1] == []
    assert authenticate(connection, key) == Caller("acme", "web shop", ("*",))
    assert Caller("acme", "web shop", ("*",)).may("anything:at.all")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["create", "", "--name", "n", "--scope", "*"], "tenant: must not be empty"),
        (["create", "a\nb", "--name", "n", "--scope", "*"], "tenant: only printable ASCII"),
        (["create", "acme", "--name", " ", "--scope", "*"], "--name: 1 to 255 characters"),
        (["create", "acme", "--name", "n", "--scope", "everything"], "--scope: a word like payments:write"),
        (["create", "acme", "--name", "n", "--scope", "*", "--expires", "2020-01-01"], "--expires: 2020-01-01"),
        (["revoke", "nothing"], "API key nothing: there is none with this id"),
        (["revoke", "ik_1_tooshort"], "ID: the part of the key between"),
    ],
)
def test_a_change_that_cannot_be_made_names_the_field(run: Run, engine: Engine, given: list[str], named: str) -> None:
    status, _, said = run(*given)
    assert (status, named in said) == (1, True), said
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM idempotency.audit")).scalar_one() == 0


def test_every_wrong_key_is_one_answer_after_one_statement(run: Run, bank: Celery, connection: Connection) -> None:
    right = run("create", "acme", "--name", "n", "--scope", "*", "--json")[1]
    other = run("create", "acme", "--name", "n", "--scope", "*", "--json")[1]
    expired = run("create", "acme", "--name", "n", "--scope", "*", "--json")[1]
    past = "UPDATE idempotency.api_keys SET expires_at = clock_timestamp() - interval '1 s' WHERE id = :id"
    connection.execute(text(past), {"id": expired["id"]})
    secret = right["key"].rpartition(f"{right['id']}_")[2]
    wrong = {
        "unknown": f"ik_{'0' * 12}_{secret}",
        "another's id": f"ik_{other['id']}_{secret}",
        "expired": expired["key"],
        "one character": right["key"][:-1] + ("A" if right["key"][-1] != "A" else "B"),
    }
    asked: list[str] = []
    with runtime_of(bank).autocommit() as connection:
        event.listen(connection, "before_cursor_execute", lambda *args: asked.append(args[2]))
        assert {what: authenticate(connection, key) for what, key in wrong.items()} == dict.fromkeys(wrong)
        assert len(asked) == len(wrong)
        for malformed in ("", "ik_", right["key"] + " ", "ik_ü_" + secret, right["key"].upper(), "\x00"):
            assert authenticate(connection, malformed) is None
