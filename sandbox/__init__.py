"""Stand-ins for a payment provider, a mail server and a carrier: real servers, each with its own ledger.

The provider implements the part of Stripe's API that `tasks.gateway` uses, with faults on request. The ledgers are
append-only, and without uniqueness in what counts: `sandbox.ledger` shows a double charge, e-mail or label.
"""
