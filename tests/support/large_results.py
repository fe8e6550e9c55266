"""Large results: how long they are, where they are kept, and a place that does not answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import Engine, text

from idempotency import IdempotentTask
from idempotency.application import runtime_of
from idempotency.objects import ObjectStore
from idempotency.upkeep import objects
from tests.support.batches import put

LIMIT = 256 * 1024
DAY = 86400.0


def large(seed: int = 1) -> dict[str, str]:
    return {"document": f"{seed}ä" + "x" * LIMIT}


class Place:
    """A place for objects, and what a test does to it behind the library's back."""

    def __init__(self, address: str, directory: Path | None, client: Any) -> None:
        self.address, self._directory, self._client = address, directory, client

    @property
    def names(self) -> list[str]:
        if self._directory is not None:
            return sorted(str(path.relative_to(self._directory)) for path in self._directory.glob("*/*"))
        found = self._client.list_objects_v2(Bucket="results", Prefix="shop/")
        return [each["Key"].removeprefix("shop/") for each in found.get("Contents", ())]

    @property
    def everything(self) -> list[str]:
        """Whatever is there or below."""
        if self._directory is not None:
            found = [path for path in self._directory.rglob("*") if path.is_file()]
            return sorted(str(path.relative_to(self._directory)) for path in found)
        return self.names

    def add(self, name: str) -> None:
        """Put what is not the library's."""
        if self._directory is not None:
            (self._directory / name).parent.mkdir(parents=True, exist_ok=True)
        self.replace(name, b"another's")

    def replace(self, name: str, data: bytes) -> None:
        if self._directory is not None:
            (self._directory / name).write_bytes(data)
        else:
            self._client.put_object(Bucket="results", Key=f"shop/{name}", Body=data)


def body(self: IdempotentTask, account: str) -> Any:
    put(self, account)
    return large() if account.startswith("e") else {"short": account}


def place_of(app: Celery) -> ObjectStore:
    store = runtime_of(app).settings.large_results_at
    assert store is not None
    return store


def stored(engine: Engine) -> dict[str, str]:
    with engine.connect() as connection:
        return {row.key: row.result for row in connection.execute(text("SELECT key, result FROM idempotency.records"))}


def sweep_all(app: Celery, monkeypatch: pytest.MonkeyPatch) -> int:
    kind: Any = type(place_of(app))
    older = kind.older
    with monkeypatch.context() as patch:
        patch.setattr(kind, "older", lambda self, seconds: older(self, -60.0))
        return objects.sweep(app)


class Down:
    """A place that does not answer."""

    def put(self, name: str, data: bytes) -> None:
        raise ConnectionError("down")

    def get(self, name: str, at_most: int) -> bytes:
        raise ConnectionError("down")

    def delete(self, names: Sequence[str]) -> None:
        raise ConnectionError("down")

    def older(self, seconds: float) -> Iterator[list[str]]:
        raise ConnectionError("down")
