"""Make the Secrets of deploy/kubernetes, once: `python -m scripts.kubernetes_secrets | kubectl --namespace shop create -f -`.

Passwords are random; what others have given you is read from STRIPE_API_KEY, STRIPE_WEBHOOK_SECRETS, PAYMENT_WEBHOOK_SECRETS,
SMTP_URL and WEB_CLIENT_SECRET. Nothing is written to a file, and `create` refuses to replace what is there. RabbitMQ's users and
Redis' are those of `idempotency broker-users`, with hashes.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from typing import Any

# What the application needs to be imported. Nothing is connected to.
ADDRESSES = {"DATABASE_URL": "postgresql+psycopg://postgres-rw/shop", "BROKER_URL": "amqps://rabbitmq:5671//"}
GIVEN = ("STRIPE_API_KEY", "STRIPE_WEBHOOK_SECRETS", "PAYMENT_WEBHOOK_SECRETS", "SMTP_URL", "WEB_CLIENT_SECRET")
ROLES = ("application", "relay", "operator", "read-only")
USERS = ("application", "worker", "relay", "beat", "flower", "monitor")


def contents() -> dict[str, dict[str, str]]:
    """What each Secret has, by key. Exits with the names of variables that are not set."""
    if missing := [name for name in GIVEN if name not in os.environ]:
        sys.exit(f"not set: {', '.join(missing)} (empty for what you have not)")
    os.environ.update(ADDRESSES)
    from idempotency.application import settings_of
    from idempotency.attempt.hints import acl
    from idempotency.broker.rights import definitions
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
    found["redis-users"] = {"users.acl": acl(given.owner, hints, name="idempotency_hints")}
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


def _password() -> str:
    # it becomes part of an address
    return secrets.token_hex(24)


if __name__ == "__main__":
    items = [secret(name, content) for name, content in contents().items()]
    json.dump({"apiVersion": "v1", "kind": "List", "items": items}, sys.stdout, indent=2)
