"""One screen for the person on call: `idempotency web`. Reads `store/`, changes through `operate/`, as the command line does."""
