"""The invariants, recomputed: each one small function over the books, grouped by what it looks at."""
