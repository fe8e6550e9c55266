"""Wrong ends that second readers have proved and that are still open. Not collected: the proofs fail."""
