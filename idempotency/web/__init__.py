"""One screen for whoever is on call: `idempotency web`. Reads `store/`, changes through `operate/`, as the command line does."""
