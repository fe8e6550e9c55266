"""Stand-ins for a payment provider and a mail server: real servers, each with its own ledger.

The provider implements the part of Stripe's API that `tasks.gateway` uses, with faults on request. The ledgers are
append-only and without uniqueness, so that `sandbox.ledger` shows a double charge or a double e-mail.
"""
