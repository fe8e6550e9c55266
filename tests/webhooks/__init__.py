"""Webhooks to customers: which addresses, which signatures, what is sent when, and what people do."""
