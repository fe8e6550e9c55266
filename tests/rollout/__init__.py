"""A release to running processes, one zone at a time, against clusters: `make rollout`."""
