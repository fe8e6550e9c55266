"""Signed webhooks to an application's customers."""
