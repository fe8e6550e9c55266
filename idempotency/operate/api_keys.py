"""API keys: what they are made of, and creating and revoking them.

A key says who the tenant of a request is, and what it may do. It is shown once; only its hash is kept. Not promised:
anyone who can write to these tables needs no key.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from sqlalchemy import Connection

from ..errors import ChangeRefused, OperationNotFound
from ..store import tenants
from ..wire.keys import check_key
from .change import Change, audit

SECRET_BYTES = 32
# Of the id, which is no secret: enough that two keys never have the same.
ID_BYTES = 6
NAME_LIMIT = 255
ALL_SCOPES = "*"
_ID = re.compile(r"[a-z0-9]{1,32}", re.ASCII)
_SCOPE = re.compile(r"[a-z][a-z0-9_.-]{0,63}:[a-z][a-z0-9_.-]{0,63}", re.ASCII)


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key that has just been made. `text` is what the client sends; nothing else ever shows it."""

    id: str
    text: str = field(repr=False)


def create_api_key(
    connection: Connection,
    change: Change,
    tenant: str,
    *,
    name: str,
    scopes: Sequence[str],
    expires_at: datetime | None = None,
) -> NewKey:
    """Make an API key of a tenant. One transaction, which the caller commits.

    `scopes` are words like `payments:write`, or `*` for all. Without `expires_at` the key is valid until it is revoked; a
    time without a zone is UTC. Raises `ChangeRefused` and `InvalidKey`, which name the field and the rule.
    """
    tenant = check_key(tenant, field="tenant")
    if not 0 < len(name.strip()) <= NAME_LIMIT:
        raise ChangeRefused(f"--name: 1 to {NAME_LIMIT} characters, got {len(name.strip())}")
    scopes = sorted(set(scopes))
    if not scopes:
        raise ChangeRefused("--scope: at least one; '*' is all")
    for scope in scopes:
        if scope != ALL_SCOPES and not _SCOPE.fullmatch(scope):
            raise ChangeRefused(f"--scope: a word like payments:write, or '*'; got {scope[:NAME_LIMIT]!r}")
    if expires_at is not None:
        expires_at = expires_at if expires_at.tzinfo is not None else expires_at.replace(tzinfo=UTC)
        if expires_at <= datetime.now(UTC):
            raise ChangeRefused(f"--expires: {expires_at:%F %T%z} is in the past")
    id = secrets.token_hex(ID_BYTES)
    text = f"ik_{id}_{secrets.token_urlsafe(SECRET_BYTES)}"
    tenants.create(connection, id, tenant=tenant, name=name, scopes=scopes, key=text, expires_at=expires_at)
    details = {"id": id, "tenant": tenant, "name": name, "scopes": ", ".join(scopes)}
    audit(connection, change, "api_key_created", None, None, details=details)
    return NewKey(id, text)


def revoke_api_key(connection: Connection, change: Change, id: str) -> str:
    """Revoke an API key, from the commit on. Returns its tenant.

    One transaction, which the caller commits. Raises `ChangeRefused` for what is no key's id, and
    `OperationNotFound` if there is no such key, or it was revoked before.
    """
    if _ID.fullmatch(id) is None:  # perhaps a whole key, whose secret must not be repeated
        raise ChangeRefused("ID: the part of the key between `ik_` and the next `_`; nothing was revoked")
    tenant = tenants.revoke(connection, id)
    if tenant is None:
        raise OperationNotFound(f"API key {id}: there is none with this id, or it was revoked before")
    audit(connection, change, "api_key_revoked", None, None, details={"id": id, "tenant": tenant})
    return tenant
