"""From the outbox to the broker, and again when the broker has lost it."""
