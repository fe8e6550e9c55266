"""Celery's own integration tests, on plain tasks and on ours: what differs, and why."""
