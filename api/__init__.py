"""The application over HTTP: payments, refunds and orders, each carried out once for its `Idempotency-Key`."""
