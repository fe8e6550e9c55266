"""Whose rows these are. Every business table has the tenant in its key, and every statement names it."""

from __future__ import annotations

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
