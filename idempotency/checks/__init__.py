"""Whether a set-up can keep the promise, before anything starts."""
