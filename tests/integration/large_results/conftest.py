"""A place for large results: a directory, and a bucket of a server that speaks S3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from celery import Celery
from moto.moto_server.threaded_moto_server import ThreadedMotoServer

from idempotency.application import close_runtime
from tests.support.large_results import Place, sweep_all


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """A server that speaks S3's protocol; its bucket is empty."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        yield "http://{}:{}".format(*server.get_host_and_port())
    finally:
        server.stop()


@pytest.fixture(params=["file", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    if request.param == "file":
        (tmp_path / "results").mkdir()
        yield Place(f"file://{tmp_path}/results", tmp_path / "results", None)
        return
    endpoint: str = request.getfixturevalue("s3")
    given = {
        "ENDPOINT_URL": endpoint,
        "ACCESS_KEY_ID": "id",
        "SECRET_ACCESS_KEY": "secret",
        "DEFAULT_REGION": "eu-west-1",
    }
    for name, value in given.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="results", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    yield Place("s3://results/shop", None, client)
    for each in client.list_objects_v2(Bucket="results").get("Contents", ()):
        client.delete_object(Bucket="results", Key=each["Key"])
    client.delete_bucket(Bucket="results")


@pytest.fixture
def kept(bank: Celery, place: Place) -> Place:
    bank.conf.idempotency_large_results_at = place.address
    bank.conf.idempotency_compress_results_above = None
    return place


@pytest.fixture
def directory(bank: Celery, tmp_path: Path) -> Place:
    """A directory, where it does not matter which place it is."""
    (tmp_path / "results").mkdir()
    bank.conf.idempotency_large_results_at = f"file://{tmp_path}/results"
    bank.conf.idempotency_compress_results_above = None
    return Place(f"file://{tmp_path}/results", tmp_path / "results", None)


@pytest.fixture
def swept(bank: Celery, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Sweep as if all that is there had been put long ago."""

    return lambda: sweep_all(bank, monkeypatch)


@pytest.fixture
def set_place(bank: Celery) -> Callable[[Any], None]:
    def set_to(place: Any) -> None:
        close_runtime(bank)
        bank.conf.idempotency_large_results_at = place

    return set_to
