"""Keys, fingerprints, messages and results as text. No I/O."""
