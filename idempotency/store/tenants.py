"""Tenants: their API keys, and how much they keep.

A key is `ik_<id>_<secret>`. Only the SHA-256 of the whole is stored.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row

from ..wire.keys import HTTP_TASK

_KEY = re.compile(r"ik_([a-z0-9]{1,32})_[A-Za-z0-9_-]{43}", re.ASCII)

_AUTHENTICATE = "SELECT tenant, name, scopes FROM idempotency.authenticate(%(id)s, %(hash)s)"

_CREATE = """
INSERT INTO idempotency.api_keys (id, tenant, name, scopes, secret_hash, expires_at)
VALUES (%(id)s, %(tenant)s, %(name)s, %(scopes)s, %(hash)s, %(expires_at)s)
"""

_API_KEYS = """
SELECT id, tenant, name, scopes, created_at, expires_at, revoked_at FROM idempotency.api_keys
WHERE %(tenant)s::text IS NULL OR tenant = %(tenant)s
ORDER BY tenant, created_at, id
"""

_REVOKE = """
UPDATE idempotency.api_keys SET revoked_at = clock_timestamp() WHERE id = %(id)s AND revoked_at IS NULL RETURNING tenant
"""

# About the size of a row with its index entries, so that a limit in bytes also bounds how many rows are counted.
ROW_BYTES = 512

# What was released keeps no answer, and what is past its retention is about to go: in partitions, with its partition.
_USAGE = f"""
SELECT count(*) AS keys, coalesce(sum(bytes), 0)::bigint AS bytes FROM (
    SELECT {ROW_BYTES} + octet_length(key) + coalesce(octet_length(result), 0) AS bytes FROM idempotency.records
    WHERE tenant = %(tenant)s AND task = '{HTTP_TASK}' AND status <> 'released'
      AND (greatest(expires_at, kept_until) > clock_timestamp()) IS NOT FALSE LIMIT %(most)s
) kept
"""


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant whose API key a request has, and what the key allows."""

    tenant: str
    name: str
    scopes: tuple[str, ...]

    def may(self, scope: str) -> bool:
        """Whether the key has this scope, or all."""
        return scope in self.scopes or "*" in self.scopes


@dataclass(frozen=True, slots=True)
class Usage:
    """What the requests of a tenant keep: how many keys, and about how many bytes."""

    keys: int
    bytes: int


def authenticate(connection: Connection, key: str) -> Caller | None:
    """Find the caller whose API key this is. None for every other text, be it unknown, wrong, revoked or expired."""
    found = _KEY.fullmatch(key)
    if found is None:
        return None
    fields = {"id": found[1], "hash": hash_of(key)}
    row = connection.exec_driver_sql(_AUTHENTICATE, fields).one_or_none()
    return None if row is None else Caller(row.tenant, row.name, tuple(row.scopes))


def id_of(key: str) -> str | None:
    """The id in an API key, which is no secret; None for every other text."""
    found = _KEY.fullmatch(key)
    return None if found is None else found[1]


def hash_of(key: str) -> bytes:
    """What is stored of a key."""
    return hashlib.sha256(key.encode()).digest()


def create(
    connection: Connection,
    id: str,
    *,
    tenant: str,
    name: str,
    scopes: Sequence[str],
    key: str,
    expires_at: datetime | None,
) -> None:
    """Store a new key's hash."""
    fields = {"id": id, "tenant": tenant, "name": name, "scopes": list(scopes), "expires_at": expires_at}
    connection.exec_driver_sql(_CREATE, fields | {"hash": hash_of(key)})


def api_keys(connection: Connection, tenant: str | None = None) -> Sequence[Row[Any]]:
    """The API keys of one tenant or of all, revoked and expired ones included; never a secret or its hash."""
    return connection.exec_driver_sql(_API_KEYS, {"tenant": tenant}).all()


def revoke(connection: Connection, id: str) -> str | None:
    """Revoke a key. Returns its tenant; None if there is none with this id, or it was revoked before."""
    tenant: str | None = connection.exec_driver_sql(_REVOKE, {"id": id}).scalar_one_or_none()
    return tenant


def usage(connection: Connection, tenant: str, *, keys_limit: int | None, bytes_limit: int | None) -> Usage:
    """What the records of a tenant's HTTP requests keep. Counts no further than just past either limit, without what is past its retention."""
    limits = (keys_limit, None if bytes_limit is None else bytes_limit // ROW_BYTES)
    most = min(limit for limit in limits if limit is not None) + 1
    row = connection.exec_driver_sql(_USAGE, {"tenant": tenant, "most": most}).one()
    return Usage(row.keys, row.bytes)
