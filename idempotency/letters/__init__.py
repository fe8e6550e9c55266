"""Dead letters: storing what no worker can run and what the broker gave up."""
