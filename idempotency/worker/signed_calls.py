"""Signing what a task's `delay` and `apply_async` send: the body is known once Celery has put the message together."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from celery import current_app
from kombu.serialization import dumps
from pydantic import SecretStr

from ..application import runtime_of
from ..errors import SettingsError
from ..settings import PREFIX, Settings
from ..wire.headers import SIGNATURE_HEADER
from ..wire.signing import sign

# The secret of the application whose task is being sent, in this thread; Celery's signal does not say whose message it is. A
# plain task's is that of the current application: with what it has others called by, it has to be signed, too.
_secret: ContextVar[SecretStr | None] = ContextVar("idempotency_secret", default=None)


@contextmanager
def signing(settings: Settings) -> Iterator[None]:
    """Sign what is sent inside, with the first of the application's secrets; without any, send it as it is."""
    secrets = settings.message_secrets
    token = _secret.set(secrets[0] if secrets else None)
    try:
        yield
    finally:
        _secret.reset(token)


def _current_secret() -> SecretStr | None:
    app = current_app._get_current_object()
    if not app.conf.get(f"{PREFIX}message_secrets"):
        return None
    try:
        return runtime_of(app).settings.message_secrets[0]
    except SettingsError:  # it is told where an idempotent task is used
        return None


def sign_message(headers: dict[str, Any] | None = None, body: Any = None, **_: Any) -> None:
    """Celery's signal `before_task_publish`: what the headers hold now is published, with the body encoded as here."""
    secret = _secret.get() or _current_secret()
    if secret is not None and isinstance(headers, Mapping):
        _, _, payload = dumps(body, serializer="json")
        headers[SIGNATURE_HEADER] = sign(headers, payload, secret, at=time.time())
