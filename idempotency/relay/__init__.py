"""Publishing the outbox, and resending what the broker has lost."""
