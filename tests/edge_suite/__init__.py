"""The tests of the published middleware `asgi-idempotency-header`, on it and on ours: `make edge-suite`."""
