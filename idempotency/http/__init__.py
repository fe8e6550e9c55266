"""Requests with an `Idempotency-Key`, carried out once: the middleware for ASGI applications."""

from .attempt import RequestAttempt
from .middleware import IdempotencyMiddleware
from .rules import Rule, by_status

__all__ = ["IdempotencyMiddleware", "RequestAttempt", "Rule", "by_status"]
