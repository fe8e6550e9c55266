"""Make the Secrets of deploy/kubernetes, once: `python -m scripts.kubernetes_secrets | kubectl --namespace shop create -f -`.

Passwords are random; what others have given you is read from STRIPE_API_KEY, STRIPE_WEBHOOK_SECRETS, PAYMENT_WEBHOOK_SECRETS,
SMTP_URL and WEB_CLIENT_SECRET. Nothing is written to a file, and `create` refuses to replace what is there. RabbitMQ's users and
Redis' are those of `idempotency broker-users`, with hashes.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sys
from typing import Any

# What the application needs to be imported. Nothing is connected to. Host, port and name of the database are those of the pods:
# by them, Redis' users are for these hints.
ADDRESSES = {"DATABASE_URL": "postgresql+psycopg://postgres-rw:5432/shop", "BROKER_URL": "amqps://rabbitmq:5671//"}
GIVEN = ("STRIPE_API_KEY", "STRIPE_WEBHOOK_SECRETS", "PAYMENT_WEBHOOK_SECRETS", "SMTP_URL", "WEB_CLIENT_SECRET")
NEEDED = ("STRIPE_API_KEY", "SMTP_URL")
ROLES = ("application", "relay", "operator", "read-only")
HINTS = "idempotency_hints"
USERS = ("application", "worker", "relay", "beat", "flower", "monitor")


def contents() -> dict[str, dict[str, str]]:
    """What each Secret has, by key. Exits with the names of variables that are not set, or empty where they must not be."""
    if missing := [name for name in GIVEN if name not in os.environ]:
        sys.exit(f"not set: {', '.join(missing)} (empty for webhooks and a client's secret that you have not)")
    if empty := [name for name in NEEDED if not os.environ[name]]:
        sys.exit(f"empty: {', '.join(empty)} (without them the application does not start)")
    os.environ.update(ADDRESSES)
    from idempotency.application import settings_of
    from idempotency.attempt.hints import acl
    from idempotency.broker.rights import definitions
    from idempotency.sentinel import sentinel_acl
    from tasks import app

    app.loader.import_default_modules()
    given = settings_of(app)
    users = {kind: _password() for kind in USERS}
    hints = _password()
    found = {f"postgres-{role}": {"password": _password()} for role in ROLES}
    found["postgres-deployer"] = {"username": "deployer", "password": _password()}
    found |= {f"rabbitmq-{kind}": {"password": password} for kind, password in users.items()}
    found["rabbitmq-monitor"] |= {"username": "idempotency_monitor", "tls": "enable"}
    found["rabbitmq-definitions"] = {"rabbitmq.json": json.dumps(definitions(app, given.service, users))}
    found["redis-hints"] = {"password": hints}
    operator = _password()
    users_acl = acl(given.owner, hints, name=HINTS)
    found["redis-operator"] = {"password": operator}
    found["redis-users"] = {
        "users.acl": users_acl,  # of one Redis; of several behind Sentinel:
        "replicated.acl": _with_operator(users_acl, operator),
        "sentinel.acl": _with_operator(sentinel_acl(hints, name=HINTS), operator),
    }
    found["web"] = {"secret": _password()}
    if client := os.environ["WEB_CLIENT_SECRET"]:  # a public client has none
        found["web"]["client-secret"] = client
    found["flower"] = {"basic-auth": f"shop:{_password()}"}
    found["mail"] = {"url": os.environ["SMTP_URL"]}
    found["provider"] = {
        "stripe-api-key": os.environ["STRIPE_API_KEY"],
        "stripe-webhook-secrets": os.environ["STRIPE_WEBHOOK_SECRETS"],
        "payment-webhook-secrets": os.environ["PAYMENT_WEBHOOK_SECRETS"],
    }
    return found


def secret(name: str, content: dict[str, str]) -> dict[str, Any]:
    """The object."""
    # CloudNativePG reads a user's name and password only from this type
    kind = "kubernetes.io/basic-auth" if name == "postgres-deployer" else "Opaque"
    return {"apiVersion": "v1", "kind": "Secret", "type": kind, "metadata": {"name": name}, "stringData": content}


def _with_operator(users: str, password: str) -> str:
    """The same users, and as the default user the operator, replicas and Sentinels, who cannot log in by a name."""
    secret = hashlib.sha256(password.encode()).hexdigest()
    lines = [line for line in users.splitlines() if not line.startswith("user default ")]
    return "".join(f"{line}\n" for line in [*lines, f"user default reset on #{secret} ~* &* +@all"])


def _password() -> str:
    # it becomes part of an address
    return secrets.token_hex(24)


if __name__ == "__main__":
    items = [secret(name, content) for name, content in contents().items()]
    json.dump({"apiVersion": "v1", "kind": "List", "items": items}, sys.stdout, indent=2)
