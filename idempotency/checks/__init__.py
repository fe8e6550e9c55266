"""Checks of the set-up: `idempotency doctor`, and those at the start of a process."""
