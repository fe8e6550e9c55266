"""Signed webhooks to an application's customers: each event once for each endpoint, under one id, delivered or given up."""

from .tasks import send_webhooks

__all__ = ["send_webhooks"]
