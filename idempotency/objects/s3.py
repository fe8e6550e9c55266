"""Large results in a bucket of S3, or of what speaks its protocol.

Credentials, region and endpoint are boto3's: its environment variables, files and roles.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

from ..extras import extra
from ..wire.references import is_name

# Seconds for a connection, and for each part of an answer.
CONNECT_TIMEOUT = 5.0
READ_TIMEOUT = 30.0


class Bucket:
    """Objects of a bucket, whose names begin with the prefix."""

    def __init__(self, bucket: str, prefix: str) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._clients: dict[int, Any] = {}

    @property
    def _client(self) -> Any:
        if os.getpid() not in self._clients:  # after a fork, two processes would use one connection
            self._clients = {os.getpid(): _new_client()}
        return self._clients[os.getpid()]

    @property
    def where(self) -> str:
        """What the addresses of all its objects begin with."""
        return f"{self._bucket}/{self._prefix}"

    def put(self, name: str, data: bytes) -> None:
        self._client.put_object(Bucket=self._bucket, Key=self._prefix + name, Body=data)

    def get(self, name: str, at_most: int) -> bytes:
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)
        except self._client.exceptions.NoSuchKey:
            raise KeyError(name) from None
        with closing(answer["Body"]) as body:
            data: bytes = body.read(at_most)
        return data

    def delete(self, names: Sequence[str]) -> None:
        objects = [{"Key": self._prefix + name} for name in names]
        answer = self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True})
        if errors := answer.get("Errors"):
            raise OSError(f"{len(errors)} of {len(names)} objects were not deleted: {errors[0].get('Code')}")

    def older(self, seconds: float) -> Iterator[list[str]]:
        before: datetime | None = None
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix)
        for page in pages:
            if before is None:  # by the clock that objects have their times from
                now = parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"])
                before = now - timedelta(seconds=seconds)
            keys = [each["Key"] for each in page.get("Contents", ()) if each["LastModified"] <= before]
            # what else is there is somebody else's
            if names := [name for key in keys if is_name(name := key.removeprefix(self._prefix))]:
                yield names


def _new_client() -> Any:
    with extra("s3"):
        import boto3
        from botocore.config import Config
    config = Config(connect_timeout=CONNECT_TIMEOUT, read_timeout=READ_TIMEOUT, retries={"mode": "standard"})
    return boto3.session.Session().client("s3", config=config)
