"""Long results are compressed, and every duplicate gets what was returned."""

from __future__ import annotations

import base64
import json
import random
import string
from typing import Any

import pytest
import zstandard
from celery import Celery
from sqlalchemy import Engine, text
from typer.testing import CliRunner

from idempotency import IdempotentTask, lookup
from idempotency.cli.root import cli
from idempotency.errors import MissingExtra, ResultUnreadable
from idempotency.wire import results
from tests.support.batches import message, run, states
from tests.support.tasks import make_task

ABOVE = 64 * 1024


def long_one(size: int = 2 * ABOVE, seed: int = 1) -> dict[str, str]:
    """Like a document: words that come again."""
    words = ["".join(random.Random(seed * 1000 + n).choices(string.ascii_lowercase, k=6)) for n in range(200)]
    chosen = random.Random(seed).choices(words, k=size // 7)
    return {"text": "ä " + " ".join(chosen)}


def stored(engine: Engine) -> dict[str, str]:
    with engine.connect() as connection:
        return {row.key: row.result for row in connection.execute(text("SELECT key, result FROM idempotency.records"))}


@pytest.mark.parametrize("options", [{}, {"batch": 10}, {"batch": 10, "batch_commit": "each"}])
def test_a_long_result_is_stored_compressed_and_read_by_every_duplicate(
    bank: Celery, engine: Engine, options: dict[str, Any]
) -> None:
    entered = []

    def body(self: IdempotentTask, account: str) -> Any:
        entered.append(account)
        return long_one() if account == "e0" else {"short": account}

    task = make_task(bank, body, key="{account}", **options)
    if options:
        run(bank, task, *(message(bank, task, f"e{n}") for n in range(2)))
    else:
        assert [task.apply(("e0",)).get(), task.apply(("e1",)).get()] == [long_one(), {"short": "e1"}]
    assert states(engine) == {"e0": "completed", "e1": "completed"}
    found = stored(engine)
    assert found["e0"].startswith("zstd:")
    assert len(found["e0"]) < ABOVE
    assert found["e1"] == '{"short": "e1"}'
    assert task.apply(("e0",)).get() == long_one()
    assert lookup(bank, task.name, "e0").result == long_one()
    assert len(entered) == 2


def test_compression_can_be_turned_off(bank: Celery, engine: Engine) -> None:
    bank.conf.idempotency_compress_results_above = None
    task = make_task(bank, lambda self, account: long_one(), key="{account}")
    task.apply(("e0",))
    assert json.loads(stored(engine)["e0"]) == long_one()


def to_text(value: Any, above: int = ABOVE) -> str:
    return results.to_text(value, limit=10**7, compress_above=above)


def test_what_comes_out_is_what_went_in() -> None:
    for seed in range(20):
        value = long_one(random.Random(seed).randrange(ABOVE, 4 * ABOVE), seed)
        assert results.plain(to_text(value)) == results.to_text(value, limit=10**7)


def test_code_that_does_not_know_it_takes_it_for_no_value() -> None:
    with pytest.raises(json.JSONDecodeError):
        json.loads(to_text(long_one()))


def test_a_replacement_stays_readable_to_sql() -> None:
    assert to_text({results.REPLACED: long_one()}).startswith('{"idempotency-replaced-by":')


def test_without_the_extra_nothing_is_compressed_and_a_compressed_one_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed = to_text(long_one())
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    assert json.loads(to_text(long_one())) == long_one()
    with pytest.raises(MissingExtra, match="zstd"):
        results.from_text(packed)


@pytest.mark.parametrize(
    "damaged",
    [
        lambda packed: packed[:-8],
        lambda packed: packed[:40] + ("A" if packed[40] != "A" else "B") + packed[41:],
        lambda packed: "zstd:",
        lambda packed: "zstd:!" + packed[6:],
        lambda packed: "zstd:" + base64.b64encode(b"no frame").decode(),
    ],
)
def test_one_that_was_altered_is_no_value(damaged: Any) -> None:
    with pytest.raises(ResultUnreadable, match="cannot be read"):
        results.from_text(damaged(to_text(long_one())))


def test_one_that_would_take_the_memory_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(results.LONGEST + 1))
    assert len(bomb) < 10_000
    monkeypatch.setattr(zstandard.ZstdDecompressor, "decompress", lambda *_: pytest.fail("opened"), raising=False)
    with pytest.raises(ResultUnreadable, match="at most"):
        results.from_text("zstd:" + base64.b64encode(bomb).decode())
    # without a size in its header
    stream = zstandard.ZstdCompressor(write_content_size=False).compress(b"1")
    with pytest.raises(ResultUnreadable):
        results.from_text("zstd:" + base64.b64encode(stream).decode())


def test_what_is_too_long_to_be_read_compressed_is_stored_as_it_is() -> None:
    value = "a" * (results.LONGEST + 1)
    assert results.from_text(results.to_text(value, limit=2 * results.LONGEST, compress_above=ABOVE)) == value


def test_people_are_shown_a_long_result_as_it_was_returned(bank: Celery, engine: Engine) -> None:
    task = make_task(bank, lambda self, account: long_one(), key="{account}")
    task.apply(("e0",))
    answer = CliRunner().invoke(cli, ["show", "e0", "--with-payload", "--json", "-A", "tests.support.bank"])
    assert answer.exit_code == 0, answer.output
    assert json.loads(json.loads(answer.stdout)["record"]["result"]) == long_one()
