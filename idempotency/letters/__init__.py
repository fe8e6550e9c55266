"""Dead letters: what the broker gave up becomes one."""
