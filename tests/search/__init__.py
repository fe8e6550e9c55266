"""A systematic search for wrong ends: real library code over real Postgres, one statement at a time."""
