"""Stand-ins for the outside world: a payment provider and a mail server, each a real server with its own
ledger.

The provider speaks the part of Stripe's API that `tasks.gateway` uses, faults included. What really
happened is on disk, append-only and without uniqueness, so that a double charge or a double e-mail is
visible to `sandbox.ledger`.
"""
