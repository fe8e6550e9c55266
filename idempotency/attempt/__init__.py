"""Claim, run, commit, without Celery."""
