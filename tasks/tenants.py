"""Whose rows these are. Every business table has the tenant in its key, and every statement names it."""

from __future__ import annotations

# What rows and operations without a tenant belong to, as in `idempotency_tenant`.
DEFAULT = "default"


def named(tenant: str) -> dict[str, str]:
    """The tenant as an argument of effects and steps, whose arguments are compared with those of earlier attempts.

    Empty for the default tenant: operations that were begun before there were tenants stay the same ones.
    """
    return {} if tenant == DEFAULT else {"tenant": tenant}
