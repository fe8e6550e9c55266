"""Whose rows these are. Every business table has the tenant in its key, and every statement names it."""

from __future__ import annotations

import re
from hashlib import sha256

from idempotency import InvalidKey, MissingKey
from idempotency.wire.keys import check_key

# What rows and operations without a tenant belong to, as in `idempotency_tenant`.
DEFAULT = "default"


def named(tenant: str) -> dict[str, str]:
    """The tenant as an argument of effects and steps, whose arguments are compared with those of earlier attempts.

    Empty for the default tenant: operations that were begun before there were tenants stay the same ones.
    """
    return {} if tenant == DEFAULT else {"tenant": tenant}


def owned(tenant: str) -> dict[str, str]:
    """The tenant as an argument of tasks, which carry out what it owns by its id.

    Code from before there were tenants looks rows up by the id alone, which another tenant may use too. It does not know
    this argument, so it leaves the message to newer workers. Empty for the default tenant, whose rows it does find.
    """
    return {} if tenant == DEFAULT else {"owner": tenant}


def check_tenant(tenant: str) -> str:
    """The tenant, if it can be one. Raises `ValueError`, which names the rule."""
    try:
        return check_key(tenant, field="tenant")
    except (InvalidKey, MissingKey) as refused:
        raise ValueError(str(refused)) from None


def domain(tenant: str) -> str:
    """The domain of the addresses of a tenant's customers, whose ids are its own: no two tenants share one."""
    if tenant == DEFAULT:
        return "customers.example"
    # a hash has a hyphen before it, which no name has that is used as it is
    plain = re.fullmatch("[a-z0-9]{1,60}", tenant) is not None
    return f"{tenant if plain else f't-{sha256(tenant.encode()).hexdigest()[:40]}'}.customers.example"
