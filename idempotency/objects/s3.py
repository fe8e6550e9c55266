"""Large results in a bucket of S3, or of what speaks its protocol.

Credentials, region and endpoint are boto3's: its environment variables, files and roles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any

from ..extras import extra

# Seconds for a connection, and for each part of an answer.
CONNECT_TIMEOUT = 5.0
READ_TIMEOUT = 30.0


class Bucket:
    """Objects of a bucket, whose names begin with the prefix."""

    def __init__(self, bucket: str, prefix: str) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""

    @cached_property
    def _client(self) -> Any:
        with extra("s3"):
            import boto3
            from botocore.config import Config
        config = Config(connect_timeout=CONNECT_TIMEOUT, read_timeout=READ_TIMEOUT, retries={"mode": "standard"})
        return boto3.session.Session().client("s3", config=config)

    def put(self, name: str, data: bytes) -> None:
        self._client.put_object(Bucket=self._bucket, Key=self._prefix + name, Body=data)

    def get(self, name: str) -> bytes:
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)
        except self._client.exceptions.NoSuchKey:
            raise KeyError(name) from None
        data: bytes = answer["Body"].read()
        return data

    def delete(self, names: Sequence[str]) -> None:
        objects = [{"Key": self._prefix + name} for name in names]
        answer = self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True})
        if errors := answer.get("Errors"):
            raise OSError(f"{len(errors)} of {len(names)} objects were not deleted: {errors[0].get('Code')}")

    def older(self, seconds: float) -> Iterator[list[str]]:
        before = datetime.now(UTC) - timedelta(seconds=seconds)
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix)
        for page in pages:
            found = [each["Key"] for each in page.get("Contents", ()) if each["LastModified"] <= before]
            if found:
                yield [key.removeprefix(self._prefix) for key in found]
